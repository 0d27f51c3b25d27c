"""The pictures of a report. Each takes figures that --json has and returns an SVG with the words for it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from harness.memory import Timeline
from harness.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    new_figure,
    style,
    svg,
    whole_numbers,
)
from harness.report.lanes import Lane, LanePicture
from harness.report.markup import Html
from harness.text import GIB, MIB, counted, printable, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANKS_DRAWN = 32
BARS = 80
LANE_PIXELS = 24

COLOUR_OF_KIND = {
    "compute": BLUE,
    "all_gather": ORANGE,
    "reduce_scatter": GREEN,
    "all_reduce": PURPLE,
    "exposed": RED,
    "memory": GREY,
}
OTHER_KIND = SKY
DIMENSION_LOOKS = ((ORANGE, "//"), (PURPLE, "\\\\"), (SKY, "xx"), (GREEN, ".."), (YELLOW, "--"))
PHASE_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW)

# One letter above a bar for each tag.
TAG_LETTERS = {
    "warmup": "w",
    "profiled": "t",
    "profiler_warmup": "t",
    "memory_history": "m",
    "after_export": "x",
    "gc": "g",
    "checkpoint": "c",
    "unfinished": "u",
}


def cut(ranks: Sequence[Any]) -> str:
    """Says that not every rank is drawn."""
    return f" The first {RANKS_DRAWN} of {len(ranks)} are drawn." if len(ranks) > RANKS_DRAWN else ""


def letters(tags: Sequence[str]) -> str:
    return "".join(dict.fromkeys(TAG_LETTERS.get(tag, "*") for tag in tags))


def step_times(steps: Sequence[dict[str, Any]], median_ns: int | None) -> Html:
    """Time of each step's slowest rank. A step far beyond the others is cut and its time written on it."""
    known = [item for item in steps if item["wall_ns"]]
    walls = np.array([item["wall_ns"] for item in known]) / 1e6
    numbers = np.array([item["step"] for item in known])
    typical = statistics.median(walls)
    top = float(walls.max()) if walls.max() <= 2.5 * typical else float(max(walls[walls <= 2.5 * typical])) * 1.15
    with style():
        figure, axes = new_figure(2.6)
        axes.grid(axis="y")
        if len(known) <= BARS:
            for item, wall in zip(known, walls, strict=True):
                plain = item["plain"]
                face, hatch = (BLUE, "") if plain else ("none", "///")
                axes.bar(
                    item["step"], min(wall, top), width=0.7, linewidth=0.8, color=face, edgecolor=BLUE, hatch=hatch
                )
                marks = letters(item["tags"])
                if wall > top:
                    marks = f"{wall:,.0f} ms ↑ {marks}"
                axes.text(item["step"], min(wall, top), marks, ha="center", va="bottom")
            axes.set_xlim(numbers.min() - 0.7, numbers.max() + 0.7)
        else:
            axes.plot(numbers, np.minimum(walls, top), color=BLUE, linewidth=0.7)
            for letter in sorted({mark for item in known for mark in letters(item["tags"])}):
                at = [i for i, item in enumerate(known) if letter in letters(item["tags"])]
                axes.plot(numbers[at], np.minimum(walls[at], top), linestyle="", marker=f"${letter}$", color=INK)
        if median_ns is not None:
            axes.axhline(median_ns / 1e6, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
            axes.annotate(
                f"median\n{median_ns / 1e6:,.1f} ms",
                (1.01, median_ns / 1e6),
                xycoords=("axes fraction", "data"),
                va="center",
            )
        axes.set_ylim(0, top * 1.12)
        axes.set_xlabel("step")
        axes.set_ylabel("ms")
        whole_numbers(axes.xaxis)
        alt = f"Time of {counted(len(known), 'step')}, {walls.min():.1f} to {walls.max():.1f} ms"
        return svg(figure, "steps", alt)


def peaks(ranks: Sequence[dict[str, Any]]) -> Html:
    """Allocated peaks by phase as bars, the peaks of the whole run as lines across them."""
    shown = [item for item in ranks if item["peak_allocated_bytes"] is not None][:RANKS_DRAWN]
    phases = list(dict.fromkeys(name for item in shown for name in item["peak_allocated_bytes_by_phase"]))
    unit, name = unit_of(max(item["peak_allocated_bytes"] for item in shown))
    with style():
        figure, axes = new_figure(2.8)
        axes.grid(axis="y")
        width = 0.8 / max(len(phases), 1)
        for index, phase in enumerate(phases):
            at = [i + (index - (len(phases) - 1) / 2) * width for i in range(len(shown))]
            heights = [item["peak_allocated_bytes_by_phase"].get(phase, 0) / unit for item in shown]
            axes.bar(at, heights, width=width * 0.92, color=PHASE_COLOURS[index % len(PHASE_COLOURS)])
        lines = (("peak_allocated_bytes", "-"), ("peak_active_bytes", "--"), ("peak_reserved_bytes", ":"))
        for key, dashes in lines:
            for i, item in enumerate(shown):
                if item[key] is not None:
                    axes.hlines(item[key] / unit, i - 0.45, i + 0.45, color=INK, linestyle=dashes, linewidth=1.2)
        axes.set_xticks(range(len(shown)), [str(item["rank"]) for item in shown])
        axes.set_xlim(-0.6, len(shown) - 0.4)
        axes.set_xlabel("rank")
        axes.set_ylabel(name)
        return svg(figure, "peaks", f"Peak memory of {counted(len(shown), 'rank')} by phase, {name}")


def phase_colours(ranks: Sequence[dict[str, Any]]) -> dict[str, str]:
    phases = dict.fromkeys(name for item in ranks for name in item["peak_allocated_bytes_by_phase"])
    return {phase: PHASE_COLOURS[index % len(PHASE_COLOURS)] for index, phase in enumerate(phases)}


def looks(parts: Sequence[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Part of a step → (colour, hatch), in the order they are stacked; only parts that are there."""
    names = sorted({name for item in parts for name in item["exposed_alone_ns"]})
    found = {"compute": (BLUE, "")}
    found |= {f"exposed: {n}": DIMENSION_LOOKS[i % len(DIMENSION_LOOKS)] for i, n in enumerate(names)}
    if any(item["exposed_together_ns"] for item in parts):
        found["exposed: several at once"] = (RED, "++")
    if any(item["exposed_memory_ns"] for item in parts):
        found["memory operations alone"] = (GREY, "")
    if any(item["idle_host_ns"] for item in parts):
        found["idle: waits for the host"] = (YELLOW, "")
    return found | {"idle": ("none", "")}


def part_values(item: dict[str, Any]) -> dict[str, int]:
    return {
        "compute": item["compute_ns"],
        **{f"exposed: {name}": value for name, value in item["exposed_alone_ns"].items()},
        "exposed: several at once": item["exposed_together_ns"],
        "memory operations alone": item["exposed_memory_ns"],
        "idle: waits for the host": item["idle_host_ns"] or 0,
        "idle": item["idle_ns"] - (item["idle_host_ns"] or 0),
    }


def step_parts(parts: Sequence[dict[str, Any]]) -> Html:
    """One bar per rank: where the time of its mean traced step goes; the parts add up to it."""
    shown = parts[:RANKS_DRAWN]
    with style():
        figure, axes = new_figure(0.7 + 0.27 * max(len(shown), 2))
        longest = max(item["span_ns"] for item in shown) / 1e6
        for row, item in enumerate(shown):
            at = 0.0
            values = part_values(item)
            for part, (colour, hatch) in looks(parts).items():
                width = values.get(part, 0) / 1e6
                axes.barh(row, width, left=at, height=0.76, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.4)
                if width > 0.07 * longest and not hatch:
                    ink = "white" if part == "compute" else INK
                    share = 100 * values[part] / item["span_ns"]
                    axes.text(at + width / 2, row, f"{share:.0f} %", ha="center", va="center_baseline", color=ink)
                at += width
        axes.set_yticks(range(len(shown)), [rank_name(item["rank"]) for item in shown])
        axes.invert_yaxis()
        axes.set_xlim(0, longest * 1.01 or 1)
        axes.set_xlabel("ms of the mean traced step")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        return svg(
            figure, "parts", f"Where the mean traced step of {counted(len(shown), 'rank')} goes: compute, exposed, idle"
        )


def rank_name(rank: int | None) -> str:
    return "rank ?" if rank is None else f"rank {rank}"


def lanes(picture: LanePicture) -> Html:
    """Lanes over time, see `draw_lanes`."""
    with style():
        figure, axes = new_figure(0.55 + 0.3 * len(picture.lanes))
        draw_lanes(axes, picture)
        axes.set_xlabel("ms")
        span = picture.span_ns / 1e6
        return svg(figure, "lanes", f"What {step_name(picture)} of {rank_name(picture.rank)} did over {span:.1f} ms")


def draw_lanes(axes: Axes, picture: LanePicture) -> None:
    """The filled height of a column is the share of it in which the lane ran: strong where nothing computed, pale
    where computation hid it. A thin line under a lane marks each column in which it ran at all."""
    count = len(picture.lanes)
    pixels = np.vstack([lane_pixels(lane) for lane in picture.lanes])
    axes.imshow(pixels, extent=(0, picture.span_ns / 1e6, count, 0), aspect="auto", interpolation="none")
    axes.set_yticks([row + 0.5 for row in range(count)], [lane_name(lane) for lane in picture.lanes])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


def step_name(picture: LanePicture) -> str:
    return "the whole file" if picture.step is None else f"step {picture.step}"


def lane_name(lane: Lane) -> str:
    label = printable(lane.label)
    return label if len(label) <= 34 else f"{label[:32]}.."


def lane_pixels(lane: Lane) -> NDArray[np.uint8]:
    """LANE_PIXELS rows of RGBA for one lane, the lowest rows for the exposed share, pale above it what was hidden."""
    colour = COLOUR_OF_KIND.get(lane.kind, OTHER_KIND)
    rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    rows = LANE_PIXELS - 4
    # Row r of the bar, counted from its foot, covers shares from r/rows to (r+1)/rows: partly filled rows are paler.
    foot = np.arange(rows)[:, None] / rows
    strong = lane.busy if lane.exposed_ns is None else lane.exposed
    filled = np.clip((lane.busy[None, :] - foot) * rows, 0, 1)
    strongly = np.clip((strong[None, :] - foot) * rows, 0, 1)
    alpha = strongly + 0.35 * (filled - strongly)
    picture = np.zeros((LANE_PIXELS, lane.busy.size, 4), np.uint8)
    picture[..., :3] = rgb
    picture[2 : 2 + rows, :, 3] = np.rint(255 * alpha[::-1])
    picture[2 + rows, :, 3] = np.where(lane.busy > 0, 255, 0)
    return picture


def memory_timeline(timeline: Timeline) -> Html:
    """Memory over the history, see `draw_memory`."""
    unit, name = unit_of(max(timeline.peak("reserved").bytes, timeline.peak("active").bytes))
    with style():
        figure, axes = new_figure(3.0)
        axes.set_ylim(0, 1.12 * draw_memory(axes, timeline, unit))
        axes.set_ylabel(name)
        return svg(figure, "memory", f"Memory over the history: active peak {size(timeline.peak('active').bytes)}")


def draw_memory(axes: Axes, timeline: Timeline, unit: int) -> float:
    """Allocated, active and reserved over the history, in `unit` bytes; returns the highest level drawn.

    Each column shows its highest values, so a peak is never lost. The band between allocated and active is freed and
    not reusable yet.
    """
    x, curves = highest_per_column(timeline)
    allocated, active, reserved = (curves[key] / unit for key in ("allocated", "active", "reserved"))
    top = timeline.peak("active")
    axes.grid(axis="y")
    axes.fill_between(x, allocated, step="post", color=BLUE, alpha=0.55, linewidth=0)
    axes.fill_between(
        x, allocated, active, step="post", facecolor=RED, alpha=0.9, hatch="////", edgecolor=INK, linewidth=0
    )
    axes.step(x, active, where="post", color=BLUE, linewidth=0.9)
    axes.step(x, reserved, where="post", color=INK, linewidth=1, linestyle=(0, (4, 2)))
    at = x[int(np.argmax(active))]
    late = at > x[0] + 0.8 * (x[-1] - x[0])
    axes.plot([at], [top.bytes / unit], marker="v", color=INK, markersize=5, clip_on=False)
    axes.annotate(
        f"peak {size(top.bytes)}",
        (at, top.bytes / unit),
        xytext=(-8 if late else 8, -1),
        textcoords="offset points",
        ha="right" if late else "left",
        va="top",
    )
    axes.set_xlim(x[0], x[-1])
    axes.set_xlabel("ms since the history began" if timeline.time_us is not None else "event")
    return max(float(reserved.max()), float(active.max()), 1e-9)


def highest_per_column(timeline: Timeline, columns: int = 900) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Column starts (ms, or event numbers without times; one more at the end) and each curve's highest value from
    there to the next, the level at the start included."""
    events = len(timeline.allocated)
    clock = np.arange(events) if timeline.time_us is None else np.maximum.accumulate(timeline.time_us)
    edges = np.linspace(int(clock[0]), max(int(clock[-1]), int(clock[0]) + 1), columns + 1)
    first = np.searchsorted(clock, edges, side="left")
    first[-1] = events
    curves: dict[str, Any] = {}
    for name in ("allocated", "active", "reserved"):
        levels = np.concatenate(([getattr(timeline, f"base_{name}")], getattr(timeline, name)))
        # levels[i] holds before event i, so a column from event a to b sees levels[a] … levels[b].
        curves[name] = np.array([levels[a : b + 1].max() for a, b in zip(first, [*first[1:], events], strict=True)])
    scale = 1 if timeline.time_us is None else 1e3
    return (edges - edges[0]) / scale, curves


def step_peaks(steps: Sequence[dict[str, Any]]) -> Html:
    """Highest peaks over the ranks, per step."""
    kinds = {"peak_allocated_bytes": "-", "peak_active_bytes": "--", "peak_reserved_bytes": ":"}
    series = {
        key: [max((p[key] for p in item["ranks"].values() if p[key] is not None), default=None) for item in steps]
        for key in kinds
    }
    unit, name = unit_of(max(value for values in series.values() for value in values if value is not None))
    with style():
        figure, axes = new_figure(2.4)
        axes.grid(axis="y")
        for key, dashes in kinds.items():
            points = [(i["step"], v / unit) for i, v in zip(steps, series[key], strict=True) if v is not None]
            if points:
                axes.plot(*zip(*points, strict=True), color=BLUE, linestyle=dashes, marker=".")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        axes.set_ylabel(name)
        whole_numbers(axes.xaxis)
        return svg(figure, "steppeaks", f"Highest peaks of {counted(len(steps), 'step')}, {name}")


def unit_of(highest: int) -> tuple[int, str]:
    return (GIB, "GiB") if highest >= GIB // 10 else (MIB, "MiB")
