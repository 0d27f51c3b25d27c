"""meshscope report: everything about a recording, a folder of traces and snapshots, one file, or an experiment."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness.commands import add_cache_argument, add_json_argument, write_page
from harness.compare import Wanted
from harness.report import Report, build
from harness.report.text import render
from harness.sources import report_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=Path,
        help="a recording, a folder of traces and snapshots, one file, or an experiment of meshscope probe",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write the report as one HTML file, with pictures"
    )
    life = parser.add_mutually_exclusive_group()
    life.add_argument(
        "--unit",
        metavar="NAME",
        help="the FSDP unit whose life in a traced step is shown (default: a layer in the middle)",
    )
    life.add_argument(
        "--parameter", metavar="NAME", help="the same by a parameter's name, with its own shapes and bytes"
    )
    add_json_argument(parser)
    add_cache_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Exits 3 if nothing was readable or measured (of a recording its state is said all the same), 4 if part of the
    input was not."""
    wanted = Wanted(unit=args.unit, parameter=args.parameter)
    if args.path.is_dir():
        from harness.commands.probe import report_experiment  # scipy, which no other report needs, takes a while

        code = report_experiment(args.path, html=args.html, as_json=args.json, wanted=wanted)
        if code is not None:
            return code
    report = build(args.path, wanted=wanted)
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

    write_page(path, page(report))
