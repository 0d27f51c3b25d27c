"""Legends of an experiment's pictures."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.drawing import GREY, RED
from harness.report.legend import line, swatch
from harness.report.markup import Html, joined, tag
from probes.report.figures import looks

MARKS = {
    "o": ("circle", {"cx": "10", "cy": "6", "r": "4"}),
    "s": ("path", {"d": "M6 2 H14 V10 H6 Z"}),
    "^": ("path", {"d": "M10 1.5 L15 10.5 H5 Z"}),
    "D": ("path", {"d": "M10 1 L15 6 L10 11 L5 6 Z"}),
    "v": ("path", {"d": "M10 10.5 L5 1.5 H15 Z"}),
    "P": ("path", {"d": "M8 1 H12 V4 H15 V8 H12 V11 H8 V8 H5 V4 H8 Z"}),
}

CROSS = tag("path", d="M6 2 L14 10 M6 10 L14 2", stroke=RED, stroke_width="1.6")


def arms_legend(arms: Sequence[str]) -> list[Html]:
    found = []
    for arm, (colour, marker) in looks(arms).items():
        shape, attributes = MARKS[marker]
        mark = tag(shape, fill=colour, stroke="currentColor", stroke_width="0.6", **attributes)
        found.append(joined(tag("svg", mark, viewBox="0 0 20 12", aria_hidden="true"), arm))
    return found


def differences_legend() -> list[Html]:
    return [
        line("none", "mean with its interval, thick: that of the two one-sided tests"),
        swatch(GREY, "less than matters", opacity=0.3),
        joined(tag("svg", CROSS, viewBox="0 0 20 12", aria_hidden="true"), "a run that does not count"),
    ]
