"""The picture of the life of an FSDP unit: its storage over the whole step, and its forward and backward enlarged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from harness.compare.lifetime import Lifetime, Phase, Row
from harness.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    WIDTH_INCHES,
    YELLOW,
    few_numbers,
    new_mosaic,
    style,
    svg,
)
from harness.report.figures import COLOUR_OF_KIND, OTHER_KIND, lane_pixels, unit_of
from harness.report.lanes import COLUMNS, Lane
from harness.report.markup import Html
from harness.text import printable, size
from harness.trace.coverage import shares
from harness.trace.intervals import EMPTY, Intervals, clip, subtract, union
from harness.trace.lifetime import STATES, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colour and opacity of each state; what a collective fills or empties has the collective's colour.
LOOKS = {
    "sharded parameters": (GREY, 0.8),
    "all-gather input": (YELLOW, 0.9),
    "all-gather output": (ORANGE, 0.45),
    "unsharded parameters": (BLUE, 0.85),
    "unsharded gradients": (SKY, 0.8),
    "accumulated gradients": (PURPLE, 0.5),
    "reduce-scatter input": (GREEN, 0.35),
    "gradient shards": (GREEN, 0.9),
}
# What outlives a pass, lowest in the stack.
LONG_LIVED = ("sharded parameters", "gradient shards", "accumulated gradients")
PHASE_SHADES = {"forward": BLUE, "backward": ORANGE, "optimizer": PURPLE}
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
MARGIN = 0.04  # of a window, on each side
LABEL_INCHES, CHARACTER_INCHES = 2.6, 0.06


class Window(NamedTuple):
    """A part of the step that is enlarged, in ns."""

    name: str
    start: int
    end: int


def draw(life: Lifetime) -> Html:
    """Above, the unit's storage in bytes over the step; below, each window with a line for every state, its
    collectives and what computed."""
    enlarged = windows(life)
    lines = [name for name in STATES if any(row.what == name for row in life.of_kind("storage"))]
    with style():
        places = [["step"] * len(enlarged), [window.name for window in enlarged]]
        height = 0.27 * (len(lines) + 3)
        figure, axes = new_mosaic(1.75 + height + 0.45, places, height_ratios=(1.5, height))
        _draw_step(axes["step"], life, lines, enlarged)
        for place, window in enumerate(enlarged):
            _draw_window(axes[window.name], life, lines, window, named=place == 0, of=len(enlarged))
        what = f"Life of {printable(life.unit)} over step {life.step}: {len(life.rows)} states, collectives and passes"
        return svg(figure, "lifetime", what)


def windows(life: Lifetime) -> list[Window]:
    """The unit's first forward and its last backward, each with what leads to it and what follows from it, and the
    reduction where that is not soon after; the whole step where it has neither."""
    passes = life.of_kind("compute")
    forwards, backwards = ([row for row in passes if row.phase == phase] for phase in ("forward", "backward"))
    several = len(backwards) > 1
    found = []
    if forwards:
        until = min((row.start_ns for row in backwards), default=life.span_ns)
        found.append(_around(life, forwards[0], 0, until, "first forward" if several else "forward"))
    if backwards:
        since = backwards[-2].end_ns if several else forwards[-1].end_ns if forwards else 0
        found.append(_around(life, backwards[-1], since, life.span_ns, "last backward" if several else "backward"))
    reductions = [row for row in life.rows if row.what == "reduce-scatter input"]
    if backwards and reductions and reductions[-1].start_ns > found[-1].end:
        found.append(_around(life, reductions[-1], found[-1].end, life.span_ns, "reduction"))
    return found or [Window("step", 0, life.span_ns)]


def _around(life: Lifetime, one: Row, since: int, until: int, name: str) -> Window:
    """A pass with the states and collectives of its phase that it touches, and those that these touch, from their
    starts and to their ends as far as these lie in [since, until]."""
    start, end = one.start_ns, one.end_ns
    near = (end - start) // 10  # gaps between kernels
    rows = [row for row in life.rows if row.phase in (one.phase, "recompute") and row.what not in LONG_LIVED]
    for row in [*rows[::-1], *rows]:
        if row.end_ns >= start - near and row.start_ns <= end + near:
            start = min(start, row.start_ns) if row.start_ns >= since else start
            end = max(end, row.end_ns) if row.end_ns <= until else end
    margin = max(int(MARGIN * (end - start)), 1)
    return Window(name, max(start - margin, 0), min(end + margin, life.span_ns))


def _draw_step(axes: Axes, life: Lifetime, lines: Sequence[str], enlarged: Sequence[Window]) -> None:
    """Storage of the unit stacked up, over the shaded phases; brackets above mark what is enlarged."""
    edges = np.unique(
        [0, life.span_ns, *(edge for row in life.of_kind("storage") for edge in (row.start_ns, row.end_ns))]
    )
    levels = np.zeros((len(lines), edges.size))
    for row in life.of_kind("storage"):
        levels[lines.index(row.what), (edges >= row.start_ns) & (edges < row.end_ns)] += row.bytes or 0
    stacked = sorted(lines, key=lambda line: LONG_LIVED.index(line) if line in LONG_LIVED else len(LONG_LIVED))
    levels = levels[[lines.index(line) for line in stacked]]
    top = np.vstack([np.zeros(edges.size), np.cumsum(levels, axis=0)])
    unit, name = unit_of(max(int(top.max()), 1))
    for place, line in enumerate(stacked):
        colour, alpha = LOOKS[line]
        below, above = top[place] / unit, top[place + 1] / unit
        axes.fill_between(edges / 1e6, below, above, step="post", color=colour, alpha=alpha, linewidth=0)
    _shade(axes, life)
    highest = float(top.max()) / unit or 1
    axes.set_ylim(0, 1.3 * highest)
    axes.set_xlim(0, life.span_ns / 1e6)
    for phase in _longest_of_each(life):
        middle = (phase.start_ns + phase.end_ns) / 2e6
        axes.text(middle, 1.28 * highest, phase.phase, ha="center", va="top", alpha=0.75)
    for window in enlarged:
        begin, end = max(window.start, 0) / 1e6, min(window.end, life.span_ns) / 1e6
        axes.plot(
            [begin, begin, end, end],
            [1.02 * highest, 1.07 * highest, 1.07 * highest, 1.02 * highest],
            color=INK,
            linewidth=0.9,
        )
    axes.set_ylabel(name)
    axes.set_xlabel("ms of the step")
    axes.grid(axis="y")


def _longest_of_each(life: Lifetime) -> list[Phase]:
    by_name = {}
    for phase in sorted(life.phases, key=lambda one: one.end_ns - one.start_ns):
        by_name[phase.phase] = phase
    return [phase for phase in by_name.values() if phase.end_ns - phase.start_ns > 0.05 * life.span_ns]


def _shade(axes: Axes, life: Lifetime) -> None:
    for phase in life.phases:
        colour = PHASE_SHADES.get(phase.phase, GREY)
        axes.axvspan(phase.start_ns / 1e6, phase.end_ns / 1e6, color=colour, alpha=0.07, linewidth=0, zorder=0)


def _draw_window(axes: Axes, life: Lifetime, lines: Sequence[str], window: Window, *, named: bool, of: int) -> None:
    """Bars of the states with their durations, the unit's collectives, and lanes of what else ran."""
    labels = Labels(axes, window, (WIDTH_INCHES - LABEL_INCHES) / of)
    _shade(axes, life)
    for row in life.of_kind("storage"):
        colour, alpha = LOOKS[row.what]
        words = [] if row.what in LONG_LIVED else [_duration(row)]
        _bar(axes, row, window, lines.index(row.what), colour, alpha, words, labels)
    for row in life.of_kind("communication"):
        _collective(axes, row, life.compute, window, len(lines), labels)
    labels.write()
    others = subtract(life.communication, _times(life.of_kind("communication")))
    _lane(axes, window, len(lines) + 1, "memory", others, EMPTY)
    _lane(axes, window, len(lines) + 2, "compute", life.compute, life.own_compute)
    rows = len(lines) + 3
    names = [_label(life, line) for line in lines] + ["its collectives", "other communication", "compute"]
    axes.set_yticks([row + 0.5 for row in range(rows)], names if named else [""] * rows)
    axes.set_ylim(rows, 0)
    axes.set_xlim(window.start / 1e6, window.end / 1e6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.axhline(len(lines), color=INK, linewidth=0.5, alpha=0.5)
    few_numbers(axes.xaxis, most=10 // of)
    axes.set_xlabel(f"ms of the step: {window.name}")


def _label(life: Lifetime, line: str) -> str:
    """`unsharded parameters, bf16  0.1133 GiB`."""
    row = next(row for row in life.of_kind("storage") if row.what == line)
    dtype = f", {SHORT_DTYPES.get(row.dtype, row.dtype)}" if row.dtype else ""
    return f"{line}{dtype}  {size(row.bytes)}"


def _bar(
    axes: Axes, row: Row, window: Window, line: int, colour: str, alpha: float, words: Sequence[str], labels: Labels
) -> None:
    start, end = max(row.start_ns, window.start), min(row.end_ns, window.end)
    if end < start:
        return
    width = max(end - start, (window.end - window.start) // 400)
    axes.barh(line + 0.5, width / 1e6, left=start / 1e6, height=0.7, color=colour, alpha=alpha, linewidth=0)
    labels.add(line, Span(start, start + width), words, light=colour == BLUE)


def _collective(axes: Axes, row: Row, compute: Intervals, window: Window, line: int, labels: Labels) -> None:
    """A pale bar, strong where nothing computed."""
    colour = COLOUR_OF_KIND.get(row.what, OTHER_KIND)
    words = [f"{row.what.replace('_', '-')} {_duration(row)}", _duration(row)]
    _bar(axes, row, window, line, colour, 0.35, words, labels)
    exposed = clip(subtract(_times([row]), compute), window.start, window.end)
    spans = [(start / 1e6, (end - start) / 1e6) for start, end in zip(*(e.tolist() for e in exposed), strict=True)]
    axes.broken_barh(spans, (line + 0.15, 0.7), color=colour, linewidth=0)


class Labels:
    """The words on the bars of a window: within their bar where there is room, else beside it, never over another's."""

    def __init__(self, axes: Axes, window: Window, inches: float) -> None:
        self._axes, self._window, self._ns_per_inch = axes, window, (window.end - window.start) / inches
        self._bars: list[tuple[int, Span, Sequence[str], bool]] = []
        self._written: list[tuple[int, float, float]] = []

    def add(self, line: int, bar: Span, words: Sequence[str], *, light: bool) -> None:
        """The first of `words` that there is room for; `light` letters within the bar."""
        self._bars.append((line, bar, words, light))

    def write(self) -> None:
        for line, bar, words, light in self._bars:
            choices = (choice for text in words for choice in self._places(text, bar))
            for text, left, right, side in choices:
                if self._is_free(line, left, right, None if side != "center" else bar):
                    at = {"left": left, "right": right, "center": (left + right) / 2}[side]
                    ink = "white" if light and side == "center" else INK
                    self._axes.text(at / 1e6, line + 0.52, text, ha=side, va="center_baseline", color=ink, fontsize=7.5)
                    self._written.append((line, left, right))
                    break

    def _places(self, text: str, bar: Span) -> Iterator[tuple[str, float, float, str]]:
        """Text, left and right edge in ns, and where the text is anchored."""
        width, gap = CHARACTER_INCHES * (len(text) + 1) * self._ns_per_inch, 0.05 * self._ns_per_inch
        if bar.end - bar.start >= width:
            middle = (bar.start + bar.end) / 2
            yield text, middle - width / 2, middle + width / 2, "center"
        yield text, bar.end + gap, bar.end + gap + width, "left"
        yield text, bar.start - gap - width, bar.start - gap, "right"

    def _is_free(self, line: int, left: float, right: float, within: Span | None) -> bool:
        taken = [(begin, end) for other, begin, end in self._written if other == line]
        taken += [(bar.start, bar.end) for other, bar, *_ in self._bars if other == line and bar != within]
        inside = left >= self._window.start and right <= self._window.end
        return inside and all(right <= begin or left >= end for begin, end in taken)


def _duration(row: Row) -> str:
    return f"{row.dur_ns / 1e6:,.2f} ms"


def _lane(axes: Axes, window: Window, line: int, kind: str, times: Intervals, strong: Intervals) -> None:
    """As in the lanes of a step: the share of each column in which it ran, strong for the unit's own."""
    edges = np.unique(window.start + np.arange(COLUMNS // 2 + 1) * (window.end - window.start) // (COLUMNS // 2))
    lane = Lane(
        label="",
        kind=kind,
        streams=[],
        count=0,
        busy=shares(times, edges),
        exposed=shares(strong, edges),
        busy_ns=times.total_ns(),
        exposed_ns=strong.total_ns(),
    )
    extent = (window.start / 1e6, window.end / 1e6, line + 1, line)
    axes.imshow(lane_pixels(lane), extent=extent, aspect="auto", interpolation="none")


def _times(rows: Sequence[Row]) -> Intervals:
    starts, ends = ([getattr(row, edge) for row in rows] for edge in ("start_ns", "end_ns"))
    return union(np.array(starts, np.int64), np.array(ends, np.int64))
