"""The command line that shows the same: a page is never the only way to a figure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import streamlit as st

from dashboard.data import Rows
from dashboard.discover import Run
from harness.text import printable


def show(lines: Sequence[str]) -> None:
    st.caption("The same on a terminal")
    st.code("\n".join(printable(line) for line in lines), language="sh")


def of_run(run: Run, rows: Rows | None) -> list[str]:
    """What prints the figures of a page about a run, and what ran it where the recording says so."""
    path = shlex.quote(str(run.path))
    lines = [f"meshscope report {path}", f"meshscope report {path} --html report.html"]
    argv = rows.recording.manifest.get("argv") if rows is not None else None
    if isinstance(argv, list) and argv:
        lines.append(f"# it was run as: {shlex.join(map(str, argv))}")
    return lines


def compare(a: Run, b: Run) -> list[str]:
    return [f"meshscope compare {shlex.quote(str(a.path))} {shlex.quote(str(b.path))}"]
