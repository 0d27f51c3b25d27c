"""`meshscope compare`: one run against another, and bounds that fail a build."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from harness.compare import METRICS, check, compare_runs, measure, parse_bound
from harness.compare.text import markdown, render
from harness.errors import EXIT_GATE_FAILED, failure_json
from harness.sources import report_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "a recording, a folder of traces and snapshots, or one file"
    parser.add_argument("a", type=Path, metavar="A", help=f"the run to compare with: {what}")
    parser.add_argument("b", type=Path, metavar="B", help="the run that changed")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object, bytes and ns as integers")
    form.add_argument("--markdown", action="store_true", help="print a table for a pull request")
    parser.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="'METRIC OP BOUND'",
        help="exit 1 if B's metric is beyond a bound, absolute ('peak_reserved_bytes>12GiB') or relative to A "
        f"('step_wall_ns>+2%%'); can be given again. Metrics: {', '.join(METRICS)}",
    )


def run(args: argparse.Namespace) -> int:
    """Exits 1 if a bound is broken or cannot be decided, 3 if A or B has nothing readable, 4 if part of it was not."""
    bounds = [parse_bound(text) for text in args.fail_on]
    a, b = measure(args.a), measure(args.b)
    errors = [*a.errors, *b.errors]
    if not (a.read and b.read):
        if args.json:
            print(json.dumps(failure_json(errors)))
        return report_errors("compare", errors, read=0)
    comparison = compare_runs(a, b)
    gate = [check(bound, *comparison.values) for bound in bounds]
    if args.json:
        print(json.dumps(comparison.to_json(gate), allow_nan=False))
    else:
        print((markdown if args.markdown else render)(comparison, gate))
    code = report_errors("compare", errors, read=1)
    for result in gate:
        if not result.passed:
            print(f"meshscope compare: gate failed: {result.bound}: {result.reason}", file=sys.stderr)
            code = EXIT_GATE_FAILED
    return code
