"""The predicted time of a step, beside the measured one, on the page of a report."""

from __future__ import annotations

from harness.ledger.time import Time
from harness.report.markup import Html, figure_cell, table, tag

LINES_SHOWN = 10
"""Of the first rank, the longest."""


def time_of_step(time: Time) -> list[Html]:
    """Nothing where no time is predicted."""
    if time.step_ns is None:
        return []
    rows: list[list[str]] = [
        [
            one.figure,
            figure_cell(f"predicted_{one.figure}", one.predicted),
            figure_cell(f"measured_{one.figure}", one.measured),
            figure_cell("error_pct", one.error_pct),
        ]
        for one in time.compared
    ]
    if not rows:
        rows = [["step_ns", figure_cell("predicted_step_ns", time.step_ns)]]
    caption = f"Time of a step, hardware {time.hardware}, measured in mode {time.measured_mode}"
    headers = ["figure", "predicted", *(["measured", "error, of shares in points"] if time.compared else [])]
    body = [table(headers, rows, caption=caption)]
    lines: list[list[str]] = [
        [
            line.phase,
            line.part,
            line.what,
            figure_cell("line_ns", line.ns),
            figure_cell("of_step_pct", 100 * line.ns / time.step_ns),
        ]
        for line in time.ranks[0].lines[:LINES_SHOWN]
    ]
    longest = "What takes longest, predicted, of the first rank"
    body.append(table(["phase", "part", "what", "time", "of the step"], lines, caption=longest, left=3))
    return body + [tag("p", note) for note in time.notes]
