"""Small charts, up to a few thousand marks, in Altair: pure functions from figures to a chart.

Colours are Okabe and Ito's, which the colour-blind tell apart, and no colour stands alone: series are labelled, or
differ in shape, dash or place, too. Every page shows a chart with `show`, which wants words for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd
import streamlit as st

from harness.text import GIB, MIB, milliseconds, quantity

BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999",
)  # fmt: skip
OKABE_ITO = [BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, GREY]

Chart = alt.Chart | alt.LayerChart | alt.FacetChart

STEPS_DRAWN = 1000
RANKS_DRAWN = 32
BARS = 200
HEIGHT = 260
# A step that takes longer than this many medians is cut, or the others could not be told apart.
CUT_AT_MEDIANS = 2.5
DARK = (BLUE, GREEN, RED)
"""Colours that white text is read on."""


def show(chart: Chart, words: str, **arguments: Any) -> None:
    """Draws a chart across the page; `words` say what it shows to those who do not see it."""
    st.altair_chart(chart, width="stretch", alt=words, **arguments)


def thinned(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most STEPS_DRAWN steps: of neighbours the slowest, so that none that stands out is lost."""
    stride = -(-len(steps) // STEPS_DRAWN)
    groups = (steps[start : start + stride] for start in range(0, len(steps), stride or 1))
    return [max(group, key=lambda step: step["wall_ns"]) for group in groups]


def step_times(series: Mapping[str, Sequence[Mapping[str, Any]]], height: int = HEIGHT) -> Chart | None:
    """Time of each step's slowest rank; `series` maps a run's label to its `steps`. Filled: plain steps, which a median
    is of; hollow: the first step and those that were traced, tracked or follow an export."""
    rows = [
        {
            "run": label,
            "step": step["step"],
            "ms": step["wall_ns"] / 1e6,
            "time": f"{milliseconds(step['wall_ns'])} ms",
            "counts": "plain" if step["plain"] else "not in the median",
            "tags": ", ".join(step["tags"]),
        }
        for label, steps in series.items()
        for step in thinned([step for step in steps if step["wall_ns"]])
    ]
    if not rows:
        return None
    frame = pd.DataFrame(rows)
    top = cut_at(frame["ms"])
    frame["shown"] = frame["ms"].clip(upper=top)
    frame["beyond"] = frame.apply(lambda row: f"{row['ms']:,.0f} ms ↑" if row["ms"] > top else "", axis=1)
    base = alt.Chart(frame).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1, format="d")),
        y=alt.Y("shown:Q", title="ms", scale=alt.Scale(domain=[0, top * 1.08])),
        tooltip=["run", "step", "time", "counts", "tags"],
    )
    full = alt.condition("datum.counts == 'plain'", alt.value(1), alt.value(0.15))
    layers: list[Any] = []
    if len(series) == 1 and len(frame) <= BARS:
        width = max(2, min(18, 600 // len(frame)))
        layers.append(base.mark_bar(width=width, color=BLUE, stroke=BLUE, strokeWidth=1).encode(fillOpacity=full))
    else:
        runs = run_encodings(list(series))
        layers.append(base.mark_line(strokeWidth=1).encode(color=runs["color"], strokeDash=runs["strokeDash"]))
        layers.append(
            base.mark_point(size=28).encode(
                fill=runs["fill"], color=runs["color"], shape=runs["shape"], fillOpacity=full
            )
        )
    for row, label in enumerate(dict.fromkeys(frame["run"])):  # what is cut says its time, run above run
        of_run = base.transform_filter(alt.datum.run == label)
        layers.append(
            of_run.mark_text(dx=4, dy=9 + 13 * row, align="left", fontSize=11, color=GREY).encode(text="beyond:N")
        )
    chart: Chart = alt.layer(*layers).properties(height=height)
    return chart


def cut_at(times_ms: pd.Series[float]) -> float:
    """The highest time drawn whole."""
    typical = times_ms.median()
    within = times_ms[times_ms <= CUT_AT_MEDIANS * typical]
    return float(times_ms.max() if times_ms.max() <= CUT_AT_MEDIANS * typical else within.max() * 1.15)


def run_encodings(labels: Sequence[str]) -> dict[str, Any]:
    """Colour, dash and shape of each run, in one legend; none for a single run."""
    domain = list(labels)
    legend = alt.Legend(orient="top", title=None, labelLimit=420) if len(labels) > 1 else None
    colours = alt.Scale(domain=domain, range=[OKABE_ITO[i % len(OKABE_ITO)] for i in range(len(domain))])
    same = alt.Scale(domain=domain)
    return {
        "color": alt.Color("run:N", scale=colours, legend=legend),
        "fill": alt.Fill("run:N", scale=colours, legend=legend),
        "strokeDash": alt.StrokeDash("run:N", scale=same, legend=legend),
        "shape": alt.Shape("run:N", scale=same, legend=legend),
    }


def unit_of(highest: int) -> tuple[int, str]:
    return (GIB, "GiB") if highest >= GIB // 10 else (MIB, "MiB")


PEAK_SHAPES = {"allocated": "stroke", "active": "diamond", "reserved": "triangle-down"}


def peaks_per_rank(ranks: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Bars: allocated peak of each phase; marks of a shape each: the peaks of the whole run."""
    shown = [rank for rank in ranks if rank["peak_allocated_bytes"] is not None][:RANKS_DRAWN]
    if not shown:
        return None
    highest = max(rank[f"peak_{kind}_bytes"] or 0 for rank in shown for kind in PEAK_SHAPES)
    unit, name = unit_of(highest)
    phases = [
        {"rank": str(r["rank"]), "phase": phase, "value": size / unit, "bytes": quantity("bytes", size)}
        for r in shown
        for phase, size in r["peak_allocated_bytes_by_phase"].items()
    ]
    marks = [
        {"rank": str(r["rank"]), "peak": kind, "value": size / unit, "bytes": quantity("bytes", size)}
        for r in shown
        for kind in PEAK_SHAPES
        if (size := r[f"peak_{kind}_bytes"]) is not None
    ]
    order = [str(rank["rank"]) for rank in shown]
    x = alt.X("rank:N", sort=order, title="rank", axis=alt.Axis(labelAngle=0))
    y = alt.Y("value:Q", title=name, scale=alt.Scale(domain=[0, highest / unit * 1.05]))
    layers: list[Any] = []
    if phases:
        names = list(dict.fromkeys(row["phase"] for row in phases))
        colours = alt.Scale(domain=names, range=[OKABE_ITO[i % len(OKABE_ITO)] for i in range(len(names))])
        layers.append(
            alt.Chart(pd.DataFrame(phases))
            .mark_bar()
            .encode(
                x=x,
                xOffset=alt.XOffset("phase:N", sort=names),
                y=y,
                color=alt.Color("phase:N", scale=colours, sort=names, legend=alt.Legend(orient="top", title=None)),
                tooltip=["rank", "phase", "bytes"],
            )
        )
    shapes = alt.Scale(domain=list(PEAK_SHAPES), range=list(PEAK_SHAPES.values()))
    layers.append(
        alt.Chart(pd.DataFrame(marks))
        .mark_point(size=90, strokeWidth=2, color=GREY)
        .encode(
            x=x,
            y=y,
            shape=alt.Shape("peak:N", scale=shapes, legend=alt.Legend(orient="bottom", title=None)),
            tooltip=["rank", "peak", "bytes"],
        )
    )
    chart: Chart = alt.layer(*layers).resolve_scale(shape="independent", color="independent").properties(height=HEIGHT)
    return chart


def peaks_per_step(series: Mapping[str, Sequence[Mapping[str, Any]]], peak: str, height: int = HEIGHT) -> Chart | None:
    """Highest peak of a kind (`peak_allocated_bytes`, …) over the ranks, at each step; a line for each run."""
    rows = [
        {"run": label, "step": step["step"], "value": max(known)}
        for label, steps in series.items()
        for step in steps[:: -(-len(steps) // STEPS_DRAWN) or 1]
        if (known := [ranks[peak] for ranks in step["ranks"].values() if ranks[peak] is not None])
    ]
    if not rows:
        return None
    unit, name = unit_of(max(row["value"] for row in rows))
    frame = pd.DataFrame(rows)
    frame["bytes"] = [quantity("bytes", int(value)) for value in frame["value"]]
    frame["value"] = frame["value"] / unit
    runs = run_encodings(list(series))
    chart: Chart = (
        alt.Chart(frame)
        .mark_line(point=alt.OverlayMarkDef(size=26), strokeWidth=1, interpolate="step-after")
        .encode(
            x=alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1, format="d")),
            y=alt.Y("value:Q", title=name, scale=alt.Scale(zero=True)),
            color=runs["color"],
            strokeDash=runs["strokeDash"],
            shape=runs["shape"],
            tooltip=["run", "step", "bytes"],
        )
        .properties(height=height)
    )
    return chart


def parts_of(item: Mapping[str, Any]) -> dict[str, int]:
    """The parts that a mean traced step is made of, in ns; they add up to its span."""
    parts = {
        "compute": item["compute_ns"],
        **{f"exposed: {name}": value for name, value in sorted(item["exposed_alone_ns"].items())},
        "exposed: several at once": item["exposed_together_ns"],
        "memory operations alone": item["exposed_memory_ns"],
        "idle: waits for the host": item["idle_host_ns"] or 0,
        "idle": item["idle_ns"] - (item["idle_host_ns"] or 0),
    }
    return {name: value for name, value in parts.items() if value}


PART_COLOURS = {
    "compute": BLUE,
    "exposed: several at once": RED,
    "memory operations alone": YELLOW,
    "idle: waits for the host": "#8C8C8C",
    "idle": "#C8C8C8",
}
EXPOSED_COLOURS = (ORANGE, PURPLE, GREEN, SKY)
LEGEND_COLUMNS = 4


def step_parts(items: Sequence[Mapping[str, Any]]) -> Chart:
    """A bar for each rank: where the time of its mean traced step goes, each part with its share."""
    rows = []
    for item in items[:RANKS_DRAWN]:
        at = 0.0
        for index, (part, value) in enumerate(parts_of(item).items()):
            share = 100 * value / item["span_ns"]
            rows.append(
                {
                    "row": item.get("label") or rank_name(item),
                    "part": part,
                    "ms": value / 1e6,
                    "middle": at + value / 2e6,
                    "order": index,
                    "time": f"{milliseconds(value)} ms",
                    "share": f"{share:.0f} %" if share > 4 else "",
                }
            )
            at += value / 1e6
    frame = pd.DataFrame(rows)
    names = sorted(dict.fromkeys(frame["part"]), key=lambda part: int(frame["order"][frame["part"] == part].min()))
    exposed = iter(EXPOSED_COLOURS * 4)
    colours = [PART_COLOURS.get(name) or next(exposed) for name in names]
    inks = ["white" if colour in DARK else "black" for colour in colours]
    y = alt.Y("row:N", sort=None, title=None)
    bars = (
        alt.Chart(frame)
        .mark_bar(stroke="#555", strokeWidth=0.4)
        .encode(
            y=y,
            x=alt.X("ms:Q", title="ms of the mean traced step", stack="zero"),
            color=alt.Color(
                "part:N",
                scale=alt.Scale(domain=names, range=colours),
                legend=alt.Legend(orient="top", title=None, columns=LEGEND_COLUMNS, labelLimit=260),
            ),
            order="order:Q",
            tooltip=["row", "part", "time", "share"],
        )
    )
    shares = (
        alt.Chart(frame)
        .mark_text(fontSize=11)
        .encode(
            y=y,
            x="middle:Q",
            text="share:N",
            color=alt.Color("part:N", scale=alt.Scale(domain=names, range=inks), legend=None),
        )
    )
    count, legend_rows = frame["row"].nunique(), -(-len(names) // LEGEND_COLUMNS)
    chart: Chart = (
        alt.layer(bars, shares).resolve_scale(color="independent").properties(height=34 * count + 30 * legend_rows + 90)
    )
    return chart


def rank_name(item: Mapping[str, Any]) -> str:
    return "rank ?" if item["rank"] is None else f"rank {item['rank']}"


def shares(sizes: Mapping[str, int]) -> Chart:
    """A bar for each part of a whole, largest first, with its share written beside it."""
    total = sum(sizes.values())
    unit, name = unit_of(max(sizes.values()))
    frame = pd.DataFrame(
        [
            {
                "part": part,
                "value": size / unit,
                "bytes": quantity("bytes", size),
                "share": f"{100 * size / total:.0f} %",
            }
            for part, size in sorted(sizes.items(), key=lambda pair: -pair[1])
        ]
    )
    base = alt.Chart(frame).encode(
        y=alt.Y("part:N", sort=None, title=None, axis=alt.Axis(labelLimit=180)),
        x=alt.X("value:Q", title=name),
        tooltip=["part", "bytes", "share"],
    )
    chart: Chart = alt.layer(
        base.mark_bar(color=BLUE), base.mark_text(align="left", dx=4, color=GREY, fontSize=11).encode(text="share:N")
    ).properties(height=22 * len(frame) + 80)
    return chart
