"""The pictures of an experiment. Each takes what `data` gives and returns an SVG with the words for it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    new_figure,
    new_grid,
    style,
    svg,
    whole_numbers,
)
from harness.report.figures import draw_lanes, draw_memory, rank_name, unit_of
from harness.report.markup import Html
from harness.text import MIB, counted, printable
from probes.report.amounts import scale_of_axis
from probes.report.data import AlignedLanes, AlignedMemory, Distribution, Paired, StepTrace, TrialRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
MARKERS = ("o", "s", "^", "D", "v", "P")
NAME_SHOWN = 24
PEAK_LINES = {
    "peak_rss_bytes": "-.",
    "peak_allocated_bytes": "-",
    "peak_active_bytes": "--",
    "peak_reserved_bytes": ":",
}


def looks(arms: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Arm -> colour and marker, so that no arm is told by colour alone."""
    count = len(COLOURS)
    return {arm: (COLOURS[i % count], MARKERS[(i + i // count) % len(MARKERS)]) for i, arm in enumerate(arms)}


def shown_name(arm: str) -> str:
    name = printable(arm)
    return name if len(name) <= NAME_SHOWN else f"{name[: NAME_SHOWN - 2]}.."


def metric_panels(
    metric: str, arms: Sequence[str], values: Sequence[Distribution], paired: Sequence[Paired], rows: Sequence[TrialRow]
) -> Html:
    """Three views of one metric: the trials of each arm, joined where they are a pair; the differences of the pairs
    with mean, interval and what matters; the trials in the order in which they ran."""
    unit, name = scale_of_axis(metric, max(max(item.values) for item in values))
    with style():
        figure, [trials, differences, order] = new_grid(
            2.7 + 0.3 * max(0, len(paired) - 1), 1, 3, width_ratios=(3, 4, 4)
        )
        _draw_trials(trials, arms, values, paired, unit)
        trials.set_ylabel(name)
        _draw_differences(differences, arms, paired)
        _draw_order(order, arms, values, rows, unit)
        for axes, title in ((trials, "trials"), (differences, "difference of each pair"), (order, "in order of time")):
            axes.set_title(title, fontsize=8.5, loc="left")
        alt = f"{metric}: {counted(sum(len(item.points) for item in values), 'trial')} of {counted(len(arms), 'arm')}"
        return svg(figure, f"metric-{metric}", alt)


def _draw_trials(
    axes: Axes, arms: Sequence[str], values: Sequence[Distribution], paired: Sequence[Paired], unit: float
) -> None:
    look = looks(arms)
    means = {item.baseline: item.comparison.a for item in paired} | {item.arm: item.comparison.b for item in paired}
    place = {arm: i for i, arm in enumerate(arms)}
    pairs: dict[int, list[tuple[int, float]]] = {}
    for item in values:
        for point in item.points:
            pairs.setdefault(point.pair, []).append((place[item.arm], point.value / unit))
    for points in pairs.values():
        axes.plot(*zip(*sorted(points), strict=True), color=INK, alpha=0.3, linewidth=0.7)
    for item in values:
        colour, marker = look[item.arm]
        x = place[item.arm]
        heights = [value / unit for value in item.values]
        axes.plot([x] * len(heights), heights, linestyle="", marker=marker, color=colour, markersize=5)
        if item.arm in means:
            axes.hlines(means[item.arm] / unit, x - 0.22, x + 0.22, color=INK, linewidth=1.4)
    axes.set_xticks(range(len(arms)), [shown_name(arm) for arm in arms], rotation=0 if len(arms) < 4 else 30)
    axes.set_xlim(-0.5, len(arms) - 0.5)
    axes.grid(axis="y")


def _draw_differences(axes: Axes, arms: Sequence[str], paired: Sequence[Paired]) -> None:
    look = looks(arms)
    unit: float = MIB if paired and paired[0].comparison.unit == "bytes" else 1
    axes.axvline(0, color=INK, linewidth=0.8)
    for row, item in enumerate(paired):
        found = item.comparison
        colour, marker = look[item.arm]
        threshold = found.threshold / unit
        axes.fill_between([-threshold, threshold], row - 0.46, row + 0.46, color=GREY, alpha=0.25, linewidth=0)
        spread = np.linspace(-0.3, 0.12, len(item.pairs)) if len(item.pairs) > 1 else [0.0]
        at = [pair.difference / unit for pair in item.pairs]
        axes.plot(at, [row + up for up in spread], linestyle="", marker=marker, color=colour, markersize=4.5)
        if found.ci_low is not None and found.ci_high is not None:
            axes.plot([found.ci_low / unit, found.ci_high / unit], [row + 0.3] * 2, color=INK, linewidth=1)
        if found.equivalence_low is not None and found.equivalence_high is not None:
            inner = [found.equivalence_low / unit, found.equivalence_high / unit]
            axes.plot(inner, [row + 0.3] * 2, color=INK, linewidth=3, solid_capstyle="butt")
        axes.plot([found.effect / unit], [row + 0.3], marker="D", color=INK, markersize=5)
    axes.set_yticks(range(len(paired)), [shown_name(item.arm) for item in paired])
    axes.set_ylim(len(paired) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    if paired:
        named = "MiB" if unit == MIB else paired[0].comparison.unit
        axes.set_xlabel(f"{named} against {shown_name(paired[0].baseline)}")


def _draw_order(
    axes: Axes, arms: Sequence[str], values: Sequence[Distribution], rows: Sequence[TrialRow], unit: float
) -> None:
    look = looks(arms)
    everything = sorted((point for item in values for point in item.points), key=lambda point: point.index)
    axes.plot([p.index for p in everything], [p.value / unit for p in everything], color=INK, alpha=0.25, linewidth=0.7)
    for item in values:
        colour, marker = look[item.arm]
        x, y = [point.index for point in item.points], [point.value / unit for point in item.points]
        axes.plot(x, y, linestyle="", marker=marker, color=colour, markersize=5)
    lost = sorted({row.index for row in rows if row.state in ("void", "given up", "outcome")})
    if lost:
        foot = axes.get_ylim()[0]
        axes.plot(lost, [foot] * len(lost), linestyle="", marker="x", color=RED, markersize=6, clip_on=False)
        axes.set_ylim(bottom=foot)
    axes.set_xlabel("trial")
    axes.grid(axis="y")
    whole_numbers(axes.xaxis)


def step_traces(arms: Sequence[str], traces: Sequence[StepTrace], warmup: int) -> Html:
    """Every step of every trial, faint, with the median over an arm's trials; steps far beyond the others are cut."""
    look = looks(arms)
    plain = [
        wall / 1e6
        for trace in traces
        for wall, counts in zip(trace.wall_ns, trace.plain, strict=True)
        if counts and wall is not None
    ]
    known = plain or [wall / 1e6 for trace in traces for wall in trace.wall_ns if wall is not None]
    top = max(value for value in known if value <= 2.5 * statistics.median(known)) * 1.15
    last = max(max(trace.steps) for trace in traces)
    with style():
        figure, axes = new_figure(2.7)
        axes.grid(axis="y")
        axes.axvspan(-0.5, warmup - 0.5, color=GREY, alpha=0.2, linewidth=0)
        counted_steps = [
            step for t in traces for step, counts in zip(t.steps, t.plain, strict=True) if counts and step >= warmup
        ]
        if counted_steps and max(counted_steps) < last:
            axes.axvspan(max(counted_steps) + 0.5, last + 0.5, color=GREY, alpha=0.2, linewidth=0)
        for trace in traces:
            points = [(step, wall / 1e6) for step, wall in zip(trace.steps, trace.wall_ns, strict=True) if wall]
            colour, _ = look[trace.arm]
            x, y = zip(*points, strict=True)
            axes.plot(x, np.minimum(y, top), color=colour, alpha=0.35, linewidth=0.8)
        for arm, (colour, marker) in look.items():
            middle = _middle_over_trials([trace for trace in traces if trace.arm == arm])
            if middle:
                x, y = zip(*middle, strict=True)
                every = max(1, len(x) // 12)
                axes.plot(
                    x, np.minimum(y, top), color=colour, linewidth=1.6, marker=marker, markersize=4, markevery=every
                )
        axes.set_xlim(-0.5, last + 0.5)
        axes.set_ylim(0, top * 1.05)
        axes.set_xlabel("step")
        axes.set_ylabel("ms")
        whole_numbers(axes.xaxis)
        return svg(figure, "steptraces", f"Time of every step of {counted(len(traces), 'trial')}")


def _middle_over_trials(traces: Sequence[StepTrace]) -> list[tuple[int, float]]:
    """(step, median ms over the trials), in order."""
    of_step: dict[int, list[int]] = {}
    for trace in traces:
        for step, wall in zip(trace.steps, trace.wall_ns, strict=True):
            if wall is not None:
                of_step.setdefault(step, []).append(wall)
    return [(step, statistics.median(walls) / 1e6) for step, walls in sorted(of_step.items())]


def memory(found: AlignedMemory, name: str) -> Html:
    """The histories next to each other, on one axis of bytes and of the same length."""
    unit, label = unit_of(found.top_bytes)
    with style():
        figure, panels = new_grid(3.1, 1, len(found.timelines), sharex=True, sharey=True)
        length = 0.0
        for axes, (arm, timeline) in zip(panels, found.timelines.items(), strict=True):
            draw_memory(axes, timeline, unit)
            length = max(length, axes.get_xlim()[1])
            axes.set_title(shown_name(arm), fontsize=8.5, loc="left")
        panels[0].set_xlim(0, length)
        panels[0].set_ylim(0, 1.12 * found.top_bytes / unit)
        panels[0].set_ylabel(label)
        return svg(figure, name, f"Memory of {rank_name(found.rank)}: {' and '.join(found.timelines)}, side by side")


def peaks_by_step(arms: dict[str, list[dict[str, Any]]], keys: Sequence[str], name: str) -> Html:
    """The arms' peaks over the steps after warm-up, a line for each kind of peak that is known."""
    look = looks(list(arms))
    unit, label = unit_of(max(step[key] or 0 for steps in arms.values() for step in steps for key in keys))
    with style():
        figure, axes = new_figure(2.5)
        axes.grid(axis="y")
        for arm, steps in arms.items():
            colour, marker = look[arm]
            for key in keys:
                points = [(step["step"], step[key] / unit) for step in steps if step[key] is not None]
                if points:
                    x, y = zip(*points, strict=True)
                    axes.plot(x, y, color=colour, linestyle=PEAK_LINES[key], marker=marker, markersize=4)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        whole_numbers(axes.xaxis)
        return svg(figure, name, f"Peaks of the steps: {' and '.join(arms)}")


def lanes(found: AlignedLanes, name: str) -> Html:
    """The lanes of each arm below one another, on one axis of time."""
    heights = [len(picture.lanes) for picture in found.pictures.values()]
    with style():
        figure, panels = new_grid(
            0.6 + sum(0.3 * count + 0.25 for count in heights), len(heights), 1, sharex=True, height_ratios=heights
        )
        for axes, (arm, picture) in zip(panels, found.pictures.items(), strict=True):
            draw_lanes(axes, picture)
            axes.set_title(f"{shown_name(arm)}: {picture.span_ns / 1e6:,.1f} ms", fontsize=8.5, loc="left")
        panels[0].set_xlim(0, found.span_ns / 1e6)
        panels[-1].set_xlabel("ms since the step's first event")
        return svg(figure, name, f"One step of {rank_name(found.rank)}: {' and '.join(found.pictures)}, side by side")
