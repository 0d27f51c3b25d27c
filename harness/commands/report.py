"""meshscope report: everything about a recording, a folder of traces and snapshots, or one file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from harness.commands import add_cache_argument, add_json_argument
from harness.errors import InputError
from harness.recording import atomic_path
from harness.report import Report, build
from harness.report.text import render
from harness.sources import report_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="a recording, a folder of traces and snapshots, or one file")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write the report as one HTML file, with pictures"
    )
    add_json_argument(parser)
    add_cache_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Exits 3 if nothing was readable or measured (of a recording its state is said all the same), 4 if part of the
    input was not."""
    report = build(args.path)
    if args.html is not None and (report.read or report.recording):
        write_html(report, args.html)
    if args.json:
        print(json.dumps(report.to_json(), allow_nan=False))
    elif report.read or report.recording:
        print(render(report))
    return report_errors("report", report.errors, read=report.read)


def write_html(report: Report, path: Path) -> None:
    """Raises `InputError` if the file cannot be written."""
    from harness.report.html import page  # matplotlib takes a second to import

    try:
        with atomic_path(path) as temporary:
            temporary.write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise InputError(path, f"cannot be written: {error.strerror}") from error
    print(f"wrote {path}", file=sys.stderr)
