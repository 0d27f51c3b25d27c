"""meshscope overlap: communication/compute overlap of chrome traces, whole, per step, collective, dimension, unit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.commands import add_cache_argument, add_json_argument
from harness.errors import InputError, UsageError
from harness.sources import find_sources, report_errors
from harness.text import printable
from harness.trace import analyse_captures, read_captures

RULES = {"launch": "launched in the step", "clip": "cut to the step's host window"}
CROSS_RANK_SHOWN = 5

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="a trace, a recording, or a folder of traces")
    parser.add_argument("--by", choices=sorted(LEVELS), help="what the text lists; --json always holds everything")
    parser.add_argument("--rank", type=int, metavar="N", help="only this rank")
    add_json_argument(parser)
    add_cache_argument(parser)


def run(args: argparse.Namespace) -> int:
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
        print_text(result, args.by)
    return report_errors("overlap", errors, read=len(captures))


def print_text(result: Row, by: str | None) -> None:
    """Tables for a reader: ms and percent, n/a where there is nothing to divide by."""
    print(f"mode: {result['mode']}; times in ms; overlap = communication hidden by compute / communication")
    print_table("Whole file", ("rank", "device", "source"), [{**r, **r["window"]} for r in result["ranks"]])
    if by is not None:
        LEVELS[by](result["ranks"])
    print_cross_rank(result["cross_rank"], len(result["ranks"]))
    notes: dict[str, list[str]] = {}
    for entry in result["ranks"]:
        dropped = [f"{count} device events dropped: {reason}" for reason, count in entry["dropped"].items()]
        for note in entry["notes"] + dropped:
            notes.setdefault(note, []).append(str_or(entry["rank"], "?"))
    for note, ranks in notes.items():
        where = "all ranks" if len(ranks) == len(result["ranks"]) > 1 else f"rank {', '.join(dict.fromkeys(ranks))}"
        print(f"note ({printable(where)}): {printable(note)}")


def by_step(ranks: Sequence[Row]) -> None:
    for rule, meaning in RULES.items():
        rows = [{**r, **step} for r in ranks for step in r["steps"] if step["rule"] == rule]
        print_table(f"Steps, rule {rule} ({meaning})", ("rank", "step", "rule"), rows)


def by_collective(ranks: Sequence[Row]) -> None:
    rows = [{**r, **one} for r in ranks for one in r["collectives"]]
    print_table("Collectives, whole file", ("rank", "dimension", "kind", "group", "count"), rows)


def by_dimension(ranks: Sequence[Row]) -> None:
    rows = [{**r, **one} for r in ranks for one in r["dimensions"]]
    print_table("Parallel dimensions, whole file", ("rank", "dimension"), rows)


def by_unit(ranks: Sequence[Row]) -> None:
    rows = [{**r, **one} for r in ranks for one in r["units"]]
    print_table("FSDP units, whole file", ("rank", "unit", "phase", "kind"), rows)


LEVELS: dict[str, Callable[[Sequence[Row]], None]] = {
    "step": by_step,
    "collective": by_collective,
    "dimension": by_dimension,
    "unit": by_unit,
}

FIGURES = {
    "comm": "comm_ns",
    "overlapped": "overlap_ns",
    "exposed": "exposed_ns",
    "compute": "compute_ns",
    "memory ops": "memory_ns",
    "idle": "idle_ns",
    "span": "span_ns",
}


def print_table(title: str, keys: Sequence[str], rows: Sequence[Row]) -> None:
    """One line per row: what it is, then the figures of its window."""
    print(f"\n{title}")
    if not rows:
        print("  none")
        return
    lines = [[*keys, "overlap", *FIGURES]]
    for row in rows:
        what = [shortened(printable(str_or(row[key], "-"))) for key in keys]
        percent = row["overlap_pct"]
        overlap = "n/a" if percent is None else f"{percent:.2f} %"
        lines.append([*what, overlap, *(f"{row[key] / 1e6:.3f}" for key in FIGURES.values())])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        left = (cell.ljust(width) for cell, width in zip(line[: len(keys)], widths, strict=False))
        right = (cell.rjust(width) for cell, width in zip(line[len(keys) :], widths[len(keys) :], strict=True))
        print("  " + "  ".join([*left, *right]).rstrip())


def print_cross_rank(found: Row, ranks: int) -> None:
    collectives = found["collectives"]
    if collectives:
        transfer = sum(one["transfer_ns"] for one in collectives) / 1e6
        print(f"\nAcross {ranks} ranks: {len(collectives)} collectives matched, transfer {transfer:.3f} ms in all")
        if found["aligned"]:
            waits: dict[str, int] = {}
            for one in collectives:
                for rank, wait in one["wait_ns"].items():
                    waits[rank] = waits.get(rank, 0) + wait
            print("  waiting for the last rank: " + ", ".join(f"rank {r} {w / 1e6:.3f} ms" for r, w in waits.items()))
            longest = sorted(collectives, key=lambda one: -max(one["wait_ns"].values()))[:CROSS_RANK_SHOWN]
            for one in longest:
                wait = max(one["wait_ns"].values()) / 1e6
                what = printable(f"{one['kind']} ({one['dimension']})")
                print(f"  longest wait {wait:.3f} ms: {what}, transfer {one['transfer_ns'] / 1e6:.3f} ms,", end=" ")
                print(f"rank {one['last_rank']} arrived last")
    for note in found["notes"]:
        print(f"note (across ranks): {printable(note)}")


def str_or(value: object, unknown: str) -> str:
    return unknown if value is None else str(value)


def shortened(text: str, limit: int = 24) -> str:
    return text if len(text) <= limit else text[: limit - 2] + ".."
