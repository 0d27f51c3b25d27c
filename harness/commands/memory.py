"""`meshscope memory`: peaks, stacking and composition of allocator snapshots, peaks per step and phase."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness.commands import add_cache_argument, add_json_argument
from harness.errors import InputError
from harness.memory.analyse import analyse_sources
from harness.memory.text import report
from harness.recording import is_recording, manifest_path
from harness.sources import Sources, find_sources, mode_of, report_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="a snapshot, a trace, a recording, or a folder of them")
    parser.add_argument("--by", choices=("step", "phase", "category", "site"), help="the table to show")
    add_json_argument(parser)
    add_cache_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the analysis of `args.path`; the exit code says whether all, a part or nothing could be read."""
    analysis = analyse_sources(_sources(args.path))
    if args.json:
        print(json.dumps(analysis.to_json(), allow_nan=False))
    elif text := report(analysis, args.by):
        print(text)
    return report_errors("memory", analysis.errors, read=len(analysis.files) + len(analysis.steps))


def _sources(path: Path) -> Sources:
    try:
        return find_sources(path)
    except InputError:
        # A recording without traces and snapshots still has the peaks in its step rows.
        if not (path.is_dir() and is_recording(path)):
            raise
        return Sources(root=path, recording=True, mode=mode_of(manifest_path(path)))
