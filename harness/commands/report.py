"""meshscope report: everything about a recording, a folder of traces and snapshots, or one file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness.report import build
from harness.report.text import render
from harness.sources import report_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="a recording, a folder of traces and snapshots, or one file")
    parser.add_argument("--json", action="store_true", help="print one JSON object, bytes and ns as integers")


def run(args: argparse.Namespace) -> int:
    """Exits 3 if nothing was readable, 4 if part of the input was not."""
    report = build(args.path)
    if args.json:
        print(json.dumps(report.to_json(), allow_nan=False))
    elif report.read:
        print(render(report))
    return report_errors("report", report.errors, read=report.read)
