"""The section of the HTML report on the life of a parameter: the picture, its key, and every state in a table."""

from __future__ import annotations

from harness.compare.lifetime import Lifetime, Row
from harness.report.build import Report
from harness.report.figures import COLOUR_OF_KIND, OTHER_KIND
from harness.report.legend import drawn, swatch
from harness.report.lifetime import HEADERS, cells, heading, share
from harness.report.lifetime_figure import LOOKS, draw, windows
from harness.report.markup import Html, figure_cell, listing, table, tag
from harness.text import counted

ROWS_LISTED = 200


def lifetime(report: Report) -> list[Html]:
    life = report.lifetime
    if life is None:
        return []
    shown = table(HEADERS, [_row(row) for row in life.rows[:ROWS_LISTED]], left=0)
    left = len(life.rows) - ROWS_LISTED
    more = [tag("p", f"{left} more: --json")] if left > 0 else []
    return [
        tag("p", f"{heading(life)}."),
        *([tag("p", share(life))] if life.parameter else []),
        drawn(draw(life), _caption(report, life), _key(life)),
        shown,
        *more,
        *([listing(life.notes)] if life.notes else []),
    ]


def _row(row: Row) -> list[str]:
    """The same line as in the text, its figures with their values."""
    line: list[str] = cells(row)
    figures: dict[int, tuple[str, int | None]] = {0: ("start_ns", row.start_ns), 1: ("dur_ns", row.dur_ns)}
    figures |= {4: ("bytes", row.bytes)} if row.kind != "compute" else {}
    figures |= {9: ("exposed_ns", row.exposed_ns)} if row.exposed_ns is not None else {}
    return [figure_cell(*figures[place]) if place in figures else cell for place, cell in enumerate(line)]


def _key(life: Lifetime) -> list[Html]:
    held = {row.what for row in life.of_kind("storage")}
    states = [swatch(colour, name, opacity=alpha) for name, (colour, alpha) in LOOKS.items() if name in held]
    kinds = dict.fromkeys(row.what for row in life.of_kind("communication"))
    sent = [swatch(COLOUR_OF_KIND.get(k, OTHER_KIND), f"{k.replace('_', '-')}, strong: exposed") for k in kinds]
    return [*states, *sent, swatch(COLOUR_OF_KIND["compute"], "compute, strong: of this unit")]


def _caption(report: Report, life: Lifetime) -> str:
    enlarged = " and ".join(window.name for window in windows(life))
    return (
        f"Above, what {life.unit} occupies over the step; below, the brackets enlarged: {enlarged}. A state "
        "begins with the first kernel that writes it and ends with the last that uses it; gradient shards stay until "
        f"they are set to zero. {life.source.capitalize()} time, mode {report.mode}. "
        f"{counted(len(life.units), 'unit')} on this rank: meshscope report --unit NAME."
    )
