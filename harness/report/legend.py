"""Legends in HTML rather than in a picture: they follow the page's colours and are read aloud."""

from __future__ import annotations

from harness.report.drawing import RED
from harness.report.markup import Html, joined, tag

HATCH_LINES = {"//": ("0,12 12,0", "8,12 20,0"), "\\\\": ("0,0 12,12", "8,0 20,12")}


def legend(items: list[Html]) -> Html:
    return tag("ul", *(tag("li", item) for item in items), class_="legend")


def drawn(picture: Html, caption: str, key: list[Html] | None = None) -> Html:
    return tag(
        "figure", *([legend(key)] if key else []), tag("div", picture, class_="scroll"), tag("figcaption", caption)
    )


def swatch(colour: str, label: str, hatch: str = "", opacity: float = 1) -> Html:
    """A filled field, hatched as matplotlib's `hatch` of that name."""
    box = _box(colour, opacity)
    return joined(_icon(joined(box, *_marks(hatch))), label)


def line(dashes: str, label: str) -> Html:
    stroke = tag("path", d="M0 6 H20", stroke="currentColor", stroke_width="2", stroke_dasharray=dashes, fill="none")
    return joined(_icon(stroke), label)


def band(label: str) -> Html:
    return swatch(RED, label, "//")


def _box(colour: str, opacity: float) -> Html:
    return tag(
        "rect",
        width="20",
        height="12",
        fill=colour,
        fill_opacity=str(opacity),
        stroke="currentColor",
        stroke_width="0.8",
    )


def _marks(hatch: str) -> list[Html]:
    """Strokes for the hatches of `figures.DIMENSION_LOOKS`; none for a plain field."""
    if hatch in HATCH_LINES:
        return [tag("polyline", points=points, stroke="currentColor", fill="none") for points in HATCH_LINES[hatch]]
    if hatch == "xx":
        return [mark for one in ("//", "\\\\") for mark in _marks(one)]
    if hatch in ("--", "++"):
        level = [tag("path", d="M0 4 H20 M0 8 H20", stroke="currentColor")]
        return (
            level if hatch == "--" else [*level, tag("path", d="M5 0 V12 M10 0 V12 M15 0 V12", stroke="currentColor")]
        )
    if hatch == "..":
        return [tag("circle", cx=str(x), cy=str(y), r="1", fill="currentColor") for x in (4, 10, 16) for y in (4, 9)]
    return []


def _icon(content: Html) -> Html:
    return tag("svg", content, viewBox="0 0 20 12", aria_hidden="true")
