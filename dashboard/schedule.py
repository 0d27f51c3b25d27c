"""A pipeline's schedule as rows and as a chart, from `pipeline` of `meshscope report --json`: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import altair as alt
import pandas as pd

from dashboard.charts import BLUE, GREEN, ORANGE, PURPLE, SKY, Chart
from harness.pipeline.actions import Action, parse_action
from harness.text import milliseconds

Row = dict[str, Any]


class Look(NamedTuple):
    """Bars differ in height too, and say their action where there is room."""

    name: str
    colour: str
    ink: str
    height: int


LOOKS = {
    "F": Look("forward (F)", BLUE, "white", 18),
    "B": Look("backward (B)", ORANGE, "black", 28),
    "I": Look("backward for inputs (I)", PURPLE, "black", 23),
    "W": Look("backward for weights (W)", GREEN, "white", 12),
    "OVERLAP_F_B": Look("forward and backward at once", SKY, "black", 28),
}
IDLE = Look("idle", "#A8A8A8", "black", 5)
HEIGHTS = {look.name: look.height for look in (*LOOKS.values(), IDLE)}
ROW_PIXELS = 34
AROUND_PIXELS = 122
"""Of the legend, the axis and its title."""
CHART_PIXELS = 1000
CHARACTER_PIXELS = 7
"""About, of the narrowest screen that is meant and of a label's font: what does not fit is left to the tooltip."""


def rows(ranks: Sequence[Row], unit: str, stages: Sequence[Row]) -> list[Row]:
    """Actions of each rank of one pipeline and the idle times before, between and after them, in order.

    `ranks`: those of one timeline; `unit`: `_ns`, or empty for units of a forward. Times are from the first start over
    all ranks on; the idle ones of a rank add up to its span less what it was busy. `needs`: where an action's input, or
    that of the action after an idle time, is received from.
    """
    first = min((action[f"start{unit}"] for rank in ranks for action in rank["actions"]), default=0)
    found = []
    for rank in ranks:
        about = {name: rank.get(name) for name in ("rank", "pipeline_rank")}
        reach = 0
        for item in sorted(rank["actions"], key=lambda item: item[f"start{unit}"]):
            action = parse_action(item["action"])
            start, end = (item[f"{side}{unit}"] - first for side in ("start", "end"))
            needs = received(action, stages)
            if start > reach:
                found.append(about | _span(None, reach, start, unit) | {"needs": needs})
            found.append(about | _span(action, start, end, unit) | {"needs": needs})
            reach = max(reach, end)
        if reach < rank[f"span{unit}"]:
            found.append(about | _span(None, reach, rank[f"span{unit}"], unit) | {"needs": None})
    return found


def _span(action: Action | None, start: int, end: int, unit: str) -> Row:
    """`action` is None for idle time."""
    look = LOOKS[action.kind] if action else IDLE
    return {
        "action": str(action) if action else "",
        "what": look.name,
        "stage": action.stage if action and not action.parts else None,
        "micro_batch": action.micro_batch if action else None,
        f"start{unit}": start,
        f"end{unit}": end,
        f"duration{unit}": end - start,
    }


def received(action: Action, stages: Sequence[Row]) -> str | None:
    """`stage 0, pipeline rank 0`: where the activation or the gradient that an action needs is sent from; None where
    it is on its own rank, or no plan says."""
    rank_of = {stage["stage"]: stage["pipeline_rank"] for stage in stages}
    places = []
    for step in action.steps:
        source = step.stage + {"F": -1, "B": 1, "I": 1}.get(step.kind, 0)
        if source in rank_of and rank_of[source] != rank_of.get(step.stage):
            places.append(f"stage {source}, pipeline rank {rank_of[source]}")
    return "; ".join(places) or None


def label(row: Mapping[str, Any]) -> str:
    if row.get("rank") is None:
        return f"pipeline rank {row['pipeline_rank']}"
    return f"rank {row['rank']}" + ("" if row["pipeline_rank"] is None else f" (pp {row['pipeline_rank']})")


def chart(spans: Sequence[Row], unit: str, *, length: int) -> Chart:
    """A line for each rank; `length`: where the axis ends, in the unit of `spans`, which are not empty."""
    scale = 1e6 if unit else 1
    frame = pd.DataFrame(
        [
            {
                "rank": label(row),
                "what": row["what"],
                "action": row["action"],
                "stage": "" if row["stage"] is None else str(row["stage"]),
                "micro-batch": "" if row["micro_batch"] is None else str(row["micro_batch"]),
                "receives from": row["needs"] or "",
                "from": row[f"start{unit}"] / scale,
                "to": row[f"end{unit}"] / scale,
                "middle": (row[f"start{unit}"] + row[f"end{unit}"]) / 2 / scale,
                "time": written(row[f"duration{unit}"], unit),
                "height": HEIGHTS[row["what"]],
                "label": fitting(row, row[f"duration{unit}"] * CHART_PIXELS / length),
            }
            for row in spans
        ]
    )
    there = set(frame["what"])
    looks = [look for look in (*LOOKS.values(), IDLE) if look.name in there]
    names = [look.name for look in looks]
    x = alt.X(
        "from:Q",
        title="ms from the pipeline's first start" if unit else "forwards from the first start",
        scale=alt.Scale(domain=[0, length / scale], nice=False),
        axis=alt.Axis(tickMinStep=0 if unit else 1),
    )
    y = alt.Y("rank:N", sort=list(dict.fromkeys(frame["rank"])), title=None, axis=alt.Axis(labelLimit=160))
    bars = (
        alt.Chart(frame)
        .mark_bar(stroke="#555", strokeWidth=0.4)
        .encode(
            x=x,
            x2="to:Q",
            y=y,
            color=alt.Color(
                "what:N",
                scale=alt.Scale(domain=names, range=[look.colour for look in looks]),
                legend=alt.Legend(orient="top", title=None, labelLimit=260),
            ),
            size=alt.Size("height:Q", scale=None),
            tooltip=["rank", "what", "action", "stage", "micro-batch", "time", "receives from"],
        )
    )
    texts = (
        alt.Chart(frame[frame["label"] != ""])
        .mark_text(fontSize=11)
        .encode(
            x="middle:Q",
            y=y,
            text="label:N",
            color=alt.Color("what:N", scale=alt.Scale(domain=names, range=[look.ink for look in looks]), legend=None),
        )
    )
    height = ROW_PIXELS * frame["rank"].nunique() + AROUND_PIXELS
    drawn: Chart = alt.layer(bars, texts).resolve_scale(color="independent").properties(height=height)
    return drawn


def fitting(row: Row, pixels: float) -> str:
    """The action, or its micro-batch alone, or nothing: what fits."""
    texts = [row["action"], "" if row["micro_batch"] is None else str(row["micro_batch"])]
    return next((text for text in texts if len(text) * CHARACTER_PIXELS <= pixels), "")


def written(duration: int, unit: str) -> str:
    return f"{milliseconds(duration)} ms" if unit else f"{duration} forwards"
