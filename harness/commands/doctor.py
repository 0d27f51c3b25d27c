"""`meshscope doctor`: what this machine can run, what is missing and the command for it."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from itertools import groupby

from harness.doctor import Report, examine
from harness.errors import EXIT_OK, EXIT_UNAVAILABLE
from harness.text import counted
from harness.variables import Variable

WIDTH = 120
SHOWN = 4
LISTED = ("live", "deprecated alias")
STATES = ("live", "ignored", "deprecated alias", "not in this build", "unknown")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Exits 0 if at least mode cpu can run here, else 5."""
    report = examine()
    print(json.dumps(report.to_json()) if args.json else "\n".join(_text(report)))
    return EXIT_OK if report.modes["cpu"].available else EXIT_UNAVAILABLE


def _text(report: Report) -> Iterator[str]:
    for group, checks in groupby(report.checks, key=lambda check: check.group):
        yield f"{group}:"
        for check in checks:
            yield f"{check.state:<8}  {check.name:<14} {check.value}" + (f"  ->  {check.fix}" if check.fix else "")
        yield ""
    yield from _variables(report.variables)
    for error in report.errors:
        yield f"unread    {error['file']}: {error['reason']}"
    yield "modes:"
    for name, mode in report.modes.items():
        ranks = "any number of ranks" if mode.max_ranks is None else f"up to {counted(mode.max_ranks, 'rank')}"
        yield f"{'yes' if mode.available else 'no':<9} mode {name:<10} {ranks if mode.available else mode.reason}"


def _variables(variables: list[Variable]) -> Iterator[str]:
    """Those set here with their evidence, the others by what is known of them."""
    here = [variable for variable in variables if variable.value is not None]
    yield "variables set here:" if here else "variables: none of those known is set here"
    for variable in here:
        place = f" ({variable.library})" if variable.library else ""
        yield f"  {variable.name}={variable.value}: {variable.state}, {variable.evidence}{place}"
        if variable.note:
            yield f"    {variable.note}"
    others = [variable for variable in variables if variable.value is None]
    yield "variables not set here, and what this build would do with them:"
    for state in STATES:
        found = [variable for variable in others if variable.state == state]
        if state in LISTED:
            yield from _wrapped(state, ", ".join(_named(variable) for variable in found))
            continue
        found.sort(key=lambda variable: variable.evidence)
        for evidence, group in groupby(found, key=lambda variable: variable.evidence):
            names = [variable.name for variable in group]
            more = f" and {len(names) - SHOWN} more (see --json)" if len(names) > SHOWN else ""
            yield from _wrapped(state, f"{', '.join(names[:SHOWN])}{more}: {evidence}")
    yield ""


def _named(variable: Variable) -> str:
    return f"{variable.name} (now {variable.alias_of})" if variable.alias_of else variable.name


def _wrapped(state: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"  {state:<18} ",
        subsequent_indent=" " * 21,
        break_long_words=False,
        break_on_hyphens=False,
    )
