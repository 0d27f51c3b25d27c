"""meshscope overlap: communication/compute overlap of chrome traces, whole, per step, collective, dimension, unit."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from harness.commands import add_cache_argument, add_json_argument
from harness.errors import InputError, UsageError
from harness.sources import find_sources, mode_of, report_errors
from harness.trace import Capture, analyse_captures, complete, read_captures
from harness.trace.text import LEVELS, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="a trace, a recording, or a folder of traces")
    parser.add_argument(
        "--by",
        choices=sorted(LEVELS),
        help="what the text lists, as means over ranks where there are several; --json always holds everything",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="N", help="only this rank")
    which.add_argument("--per-rank", action="store_true", help="what --by lists, for each rank instead of their means")
    add_json_argument(parser)
    add_cache_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Exits 3 if no trace was readable, 4 if part of them was not."""
    if mode_of(args.path / "manifest.json") == "rehearsal":
        raise InputError(args.path, "is a rehearsal, in which nothing was communicated: there is no overlap")
    sources = find_sources(args.path)
    if not sources.traces and not sources.errors:
        raise InputError(args.path, "holds memory snapshots but no trace")
    captures, errors = read_captures(sources)
    result = analyse_captures(captures, errors, sources.mode)
    if args.rank is not None:
        known = sorted({entry["rank"] for entry in result["ranks"]} - {None})
        result["ranks"] = [entry for entry in result["ranks"] if entry["rank"] == args.rank]
        if captures and not result["ranks"]:
            raise UsageError(f"--rank {args.rank}: no trace of that rank (ranks here: {known or 'unknown'})")
    if args.json:
        print(json.dumps(result, allow_nan=False))
    elif result["ranks"]:
        ranks = len({capture.rank for capture in captures} - {None})
        print(report(result, args.by, complete=_complete(captures, result), ranks=ranks, per_rank=args.per_rank))
    return report_errors("overlap", errors, read=len(captures))


def _complete(captures: list[Capture], result: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of all ranks without incomplete steps; analysed again only where there are some."""
    if not any(capture.incomplete for capture in captures):
        return list(result["ranks"])
    return list(analyse_captures(complete(captures), [], result["mode"])["ranks"])
