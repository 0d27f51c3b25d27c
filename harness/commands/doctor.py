"""`meshscope doctor`: what this machine can run, what is missing and the command for it."""

from __future__ import annotations

import argparse
import json

from harness.doctor import LATER_MODES, Report, examine
from harness.errors import EXIT_OK, EXIT_UNAVAILABLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Exits 0 if at least mode cpu can run here, else 5."""
    report = examine()
    print(json.dumps(report.to_json()) if args.json else _text(report))
    return EXIT_OK if report.modes["cpu"] != 0 else EXIT_UNAVAILABLE


def _text(report: Report) -> str:
    lines = [
        f"{check.state:<8}  {check.name:<14} {check.value}" + (f"  ->  {check.fix}" if check.fix else "")
        for check in report.checks
    ]
    lines.append("")
    for mode, ranks in report.modes.items():
        if mode in LATER_MODES:
            lines.append(f"no        mode {mode:<10} not in this version")
        elif ranks == 0:
            lines.append(f"no        mode {mode:<10} see what is missing above")
        else:
            lines.append(
                f"yes       mode {mode:<10} " + ("any number of ranks" if ranks is None else f"1 to {ranks} ranks")
            )
    return "\n".join(lines)
