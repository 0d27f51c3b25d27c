"""The pictures of an experiment, in Altair, from what `extract.experiment` holds. An arm has a colour and a shape."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from dashboard.charts import GREY, OKABE_ITO, RED, Chart, cut_at
from harness.text import MIB, milliseconds, quantity
from probes.report.amounts import amount, around_zero, scale_of_axis

Row = Mapping[str, Any]

SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
HEIGHT = 250
ROW = 34
REACH = 3.0
"""An interval is drawn up to so many times what the pairs reach, or one that says little would hide them."""
LABELS = 180


def arm_scales(arms: Sequence[str]) -> dict[str, alt.Scale]:
    """Colour and shape of each arm, the same in every picture; no two of up to 36 arms share both."""
    count = len(OKABE_ITO)
    domain = list(arms)
    return {
        "color": alt.Scale(domain=domain, range=[OKABE_ITO[i % count] for i in range(len(domain))]),
        "shape": alt.Scale(domain=domain, range=[SHAPES[(i + i // count) % len(SHAPES)] for i in range(len(domain))]),
    }


def marked(arms: Sequence[str], *, legend: bool = True) -> dict[str, Any]:
    """Encodings of points that belong to arms."""
    scales = arm_scales(arms)
    shown = alt.Legend(orient="top", title=None, labelLimit=260, symbolOpacity=1) if legend else None
    return {
        "color": alt.Color("arm:N", scale=scales["color"], legend=shown),
        "shape": alt.Shape("arm:N", scale=scales["shape"], legend=shown),
    }


def points_of(distributions: Sequence[Row], unit: float) -> pd.DataFrame:
    """A row for each valid trial of one metric."""
    return pd.DataFrame(
        [
            {
                "arm": item["arm"],
                "trial": point["index"],
                "pair": point["pair"],
                "value": point["value"] / unit,
                "said": quantity(item["metric"], point["value"]),
            }
            for item in distributions
            for point in item["points"]
        ]
    )


def axis_of(metric: str, distributions: Sequence[Row]) -> tuple[float, str]:
    """What values are divided by, and the unit that leaves."""
    highest = max(point["value"] for item in distributions for point in item["points"])
    return scale_of_axis(metric, highest)


def trials(metric: str, arms: Sequence[str], distributions: Sequence[Row], paired: Sequence[Row]) -> Chart:
    """Each trial, thin lines between those of a pair, and the means that are compared."""
    unit, name = axis_of(metric, distributions)
    frame = points_of(distributions, unit)
    means = {one["baseline"]: one["comparison"]["a"] for one in paired}
    means |= {one["arm"]: one["comparison"]["b"] for one in paired}
    x = alt.X("arm:N", sort=list(arms), title=None, axis=alt.Axis(labelAngle=0, labelLimit=LABELS))
    y = alt.Y("value:Q", title=name, scale=alt.Scale(zero=False, nice=True))
    base = alt.Chart(frame).encode(x=x, y=y)
    layers: list[Any] = [base.mark_line(color=GREY, opacity=0.5, strokeWidth=1).encode(detail="pair:N")]
    if means:
        rows = [
            {"arm": arm, "value": mean / unit, "mean": quantity(metric, mean)}
            for arm, mean in means.items()
            if mean is not None
        ]
        ticks = alt.Chart(pd.DataFrame(rows)).mark_tick(color=GREY, thickness=3, size=46)
        layers.append(ticks.encode(x=x, y=y, tooltip=["arm", "mean"]))
    points = base.mark_point(filled=True, size=70, opacity=0.9)
    layers.append(points.encode(**marked(arms, legend=False), tooltip=["arm", "trial", "pair", "said"]))
    return finished(layers)


def in_order(metric: str, arms: Sequence[str], distributions: Sequence[Row], order: Sequence[Row]) -> Chart:
    """The trials in the order in which they ran, where a slope of all arms is a drift; crosses are runs that do not
    count."""
    unit, name = axis_of(metric, distributions)
    frame = points_of(distributions, unit)
    low, high = float(frame["value"].min()), float(frame["value"].max())
    foot = low - 0.12 * (high - low or 1.0)
    x = alt.X("trial:Q", title="trial", axis=alt.Axis(tickMinStep=1, format="d"))
    y = alt.Y("value:Q", title=name, scale=alt.Scale(zero=False, nice=True))
    base = alt.Chart(frame).encode(x=x, y=y)
    points = base.mark_point(filled=True, size=70, opacity=0.9)
    layers: list[Any] = [
        base.mark_line(color=GREY, opacity=0.6, strokeWidth=1),
        points.encode(**marked(arms), tooltip=["trial", "arm", "pair", "said"]),
    ]
    lost = [
        {"trial": row["index"], "value": foot, "arm": row["arm"], "state": row["state"], "why": row["reason"] or ""}
        for row in order
        if row["state"] in ("void", "given up", "outcome")
    ]
    if lost:
        crosses = alt.Chart(pd.DataFrame(lost)).mark_text(text="✕", color=RED, fontSize=13)
        layers.append(crosses.encode(x=x, y=y, tooltip=["trial", "arm", "state", "why"]))
    return finished(layers)


def differences(arms: Sequence[str], paired: Sequence[Row]) -> Chart:
    """Two lines for each arm: the differences of its pairs, and their mean with its interval (thick: that of the two
    one-sided tests). The band is less than matters."""
    comparisons = [one["comparison"] for one in paired]
    in_bytes = comparisons[0]["unit"] == "bytes"
    unit, name = (MIB, "MiB") if in_bytes else (1, comparisons[0]["unit"])
    limit = REACH * max(_reach(one) for one in paired) / unit or 1.0
    rows = [label for one in paired for label in (f"{one['arm']}: pairs", f"{one['arm']}: mean")]
    y = alt.Y("row:N", title=None, scale=alt.Scale(domain=rows, padding=0), axis=alt.Axis(labelLimit=LABELS))
    reaches = [_interval_row(one, unit, limit) for one in paired]
    x = alt.X(
        "at:Q",
        title=f"{name} against {paired[0]['baseline']}; {comparisons[0]['better']} is better",
        scale=alt.Scale(domain=_extent(paired, reaches, unit), nice=False),
    )
    band = [
        {"row": row, "at": -one["comparison"]["threshold"] / unit, "to": one["comparison"]["threshold"] / unit}
        for one in paired
        for row in (f"{one['arm']}: pairs", f"{one['arm']}: mean")
    ]
    points = [
        {
            "arm": one["arm"],
            "row": f"{one['arm']}: pairs",
            "at": pair["difference"] / unit,
            "pair": pair["pair"],
            "said": amount(pair["difference"], pair["unit"]),
        }
        for one in paired
        for pair in one["pairs"]
    ]
    layers: list[Any] = [
        alt.Chart(pd.DataFrame(band)).mark_bar(color=GREY, opacity=0.3).encode(y=y, x=x, x2="to"),
        alt.Chart(pd.DataFrame([{"at": 0}])).mark_rule(color=GREY, strokeWidth=1.5).encode(x=x),
        *_intervals(arms, reaches, x, y),
        alt.Chart(pd.DataFrame(points))
        .mark_point(filled=True, size=60, opacity=0.85)
        .encode(x=x, y=y, **marked(arms, legend=False), tooltip=["arm", "pair", "said"]),
    ]
    return finished(layers, max(HEIGHT, ROW * len(rows) + 50))


def _extent(paired: Sequence[Row], means: Sequence[Row], unit: float) -> list[float]:
    """What is drawn: the pairs, the means with their intervals, the bands and 0."""
    at = [pair["difference"] / unit for one in paired for pair in one["pairs"]]
    at += [sign * one["comparison"]["threshold"] / unit for one in paired for sign in (-1, 1)]
    at += [row[end] for row in means for end in ("at", "low", "high") if end in row]
    margin = 0.06 * (max(at) - min(at))
    return [min(at) - margin, max(at) + margin]


def _reach(one: Row) -> float:
    found = one["comparison"]
    reached: list[float] = [found["threshold"], abs(found["effect"])]
    reached += [abs(pair["difference"]) for pair in one["pairs"]]
    return max(reached)


def _interval_row(one: Row, unit: float, limit: float) -> dict[str, Any]:
    """The mean, and its intervals as far as they are drawn."""
    found = one["comparison"]
    row = {
        "arm": one["arm"],
        "row": f"{one['arm']}: mean",
        "at": found["effect"] / unit,
        "mean": amount(found["effect"], found["unit"]),
        "matters": around_zero(found["threshold"], found["unit"]),
    }
    for name, low, high in (("", "ci_low", "ci_high"), ("inner_", "equivalence_low", "equivalence_high")):
        if found[low] is None or found[high] is None:
            continue
        row[f"{name}low"] = max(-limit, found[low] / unit)
        row[f"{name}high"] = min(limit, found[high] / unit)
        row[f"{name}interval"] = f"{amount(found[low], found['unit'])} to {amount(found[high], found['unit'])}"
        row[f"{name}cut"] = [end for end in (found[low] / unit, found[high] / unit) if abs(end) > limit]
    return row


def _intervals(arms: Sequence[str], rows: Sequence[dict[str, Any]], x: alt.X, y: alt.Y) -> list[Any]:
    layers: list[Any] = []
    for name, width in (("", 1.5), ("inner_", 4)):
        ends = [
            {"row": row["row"], "at": row[f"{name}low"], "to": row[f"{name}high"], "interval": row[f"{name}interval"]}
            for row in rows
            if f"{name}low" in row
        ]
        if ends:
            rule = alt.Chart(pd.DataFrame(ends)).mark_rule(color=GREY, strokeWidth=width)
            layers.append(rule.encode(y=y, x=x, x2="to", tooltip=["row", "interval"]))
    beyond = [
        {"row": row["row"], "at": row["low"] if end < 0 else row["high"], "sign": "◀" if end < 0 else "▶"}
        for row in rows
        for end in row.get("cut", ())
    ]
    if beyond:
        arrows = alt.Chart(pd.DataFrame(beyond)).mark_text(color=GREY, fontSize=14)
        layers.append(arrows.encode(y=y, x=x, text="sign:N"))
    means = pd.DataFrame([{name: row[name] for name in ("arm", "row", "at", "mean", "matters")} for row in rows])
    diamonds = alt.Chart(means).mark_point(shape="diamond", filled=True, size=110, opacity=1)
    colour = marked(arms, legend=False)["color"]
    return [*layers, diamonds.encode(y=y, x=x, color=colour, tooltip=["row", "mean", "matters"])]


def step_traces(arms: Sequence[str], traces: Sequence[Row]) -> Chart | None:
    """Every step of every trial, faint, and the median over an arm's trials; steps far beyond the others are cut.
    Hollow: steps that no figure comes from."""
    rows = [
        {"arm": one["arm"], "trial": one["index"], "step": step, "ms": wall / 1e6, "plain": plain}
        for one in traces
        for step, wall, plain in zip(one["steps"], one["wall_ns"], one["plain"], strict=True)
        if wall is not None
    ]
    if not rows:
        return None
    frame = pd.DataFrame(rows)
    counted = frame["ms"][frame["plain"]]
    top = cut_at(counted if len(counted) else frame["ms"])
    frame["shown"] = frame["ms"].clip(upper=top)
    frame["time"] = [f"{milliseconds(round(ms * 1e6))} ms" for ms in frame["ms"]]
    middle = [
        {
            "arm": arm,
            "step": step,
            "shown": min(top, statistics.median(of_step["ms"])),
            "time": f"{milliseconds(round(statistics.median(of_step['ms']) * 1e6))} ms, median",
            "counts": "counts" if of_step["plain"].all() else "does not count",
        }
        for (arm, step), of_step in frame.groupby(["arm", "step"])
    ]
    x = alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1, format="d"))
    y = alt.Y("shown:Q", title="ms", scale=alt.Scale(domain=[0, top * 1.05]))
    colour = marked(arms)["color"]
    medians = alt.Chart(pd.DataFrame(middle)).encode(x=x, y=y, color=colour)
    full = alt.condition("datum.counts == 'counts'", alt.value(1), alt.value(0.1))
    layers: list[Any] = [
        alt.Chart(frame)
        .mark_line(strokeWidth=1, opacity=0.3)
        .encode(x=x, y=y, color=colour, detail="trial:N", tooltip=["arm", "trial", "step", "time"]),
        medians.mark_line(strokeWidth=2),
        medians.mark_point(size=40).encode(
            fill=alt.Fill("arm:N", scale=arm_scales(arms)["color"], legend=None),
            shape=marked(arms)["shape"],
            fillOpacity=full,
            tooltip=["arm", "step", "time", "counts"],
        ),
    ]
    return finished(layers)


def queue_latencies(arms: Sequence[str], found: Sequence[Row]) -> Chart | None:
    """When independent work ends beside so many busy streams: early while there is a free queue."""
    rows = [
        {"arm": one["arm"], "streams": int(streams), "ms": ns / 1e6, "time": f"{milliseconds(ns)} ms"}
        for one in found
        for streams, ns in one["latency_ns"].items()
    ]
    if not rows:
        return None
    x = alt.X("streams:Q", title="streams", axis=alt.Axis(tickMinStep=1, format="d"))
    base = alt.Chart(pd.DataFrame(rows)).encode(x=x, y=alt.Y("ms:Q", title="ms"), color=marked(arms)["color"])
    points = base.mark_point(filled=True, size=45)
    layers: list[Any] = [
        base.mark_line(strokeWidth=1),
        points.encode(shape=marked(arms)["shape"], tooltip=["arm", "streams", "time"]),
    ]
    return finished(layers)


def finished(layers: Sequence[Any], height: int = HEIGHT) -> Chart:
    chart: Chart = alt.layer(*layers).properties(height=height)
    return chart
