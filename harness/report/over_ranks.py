"""Figures of several traced ranks put together: per mesh dimension, and where a step's time goes on each rank."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.report.finding import ranks_text
from harness.text import in_ranges
from harness.trace import Capture
from harness.trace.capture import DeviceCapture
from harness.trace.intervals import EMPTY, join, subtract

ALL = "all"
MEANS = ("comm_ns", "overlap_ns", "exposed_ns", "span_ns")


def by_dimension(overlap: dict[str, Any] | None) -> list[dict[str, Any]]:
    """One item per mesh dimension, `all` first: means over the traced devices (ns, whole files), lowest and highest
    hidden share, and its kinds of collectives with the most exposed first. `ranks` are those that have it."""
    entries = overlap["ranks"] if overlap else []
    found: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for entry in entries:
        found.setdefault(ALL, []).append((entry, entry["window"]))
        for item in entry["dimensions"]:
            found.setdefault(item["dimension"], []).append((entry, item))
    return [
        {
            "dimension": name,
            "ranks": [entry["rank"] for entry, _ in mine],
            "sources": sorted({entry["source"] for entry, _ in mine}),
            **{key: round(statistics.mean(window[key] for _, window in mine)) for key in MEANS},
            **_shares([window["overlap_pct"] for _, window in mine]),
            "kinds": _kinds([entry for entry, _ in mine], name),
        }
        for name, mine in found.items()
    ]


def waited_for_all(dimensions: Sequence[dict[str, Any]]) -> bool:
    """Whether there was communication, on hosts only, and no operator ran during any of it."""
    every = dimensions[0] if dimensions else None
    return every is not None and every["sources"] == ["host"] and every["comm_ns"] > 0 and every["overlap_ns"] == 0


def _shares(shares: list[float | None]) -> dict[str, float | None]:
    known = [share for share in shares if share is not None]
    return {"lowest_overlap_pct": min(known, default=None), "highest_overlap_pct": max(known, default=None)}


def _kinds(entries: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for one in (one for entry in entries for one in entry["collectives"] if name in (ALL, one["dimension"])):
        kinds.setdefault(one["kind"], []).append(one)
    found = [
        {"kind": kind}
        | {key: round(sum(one[key] for one in ones) / len(entries)) for key in ("count", "comm_ns", "exposed_ns")}
        for kind, ones in kinds.items()
    ]
    return sorted(found, key=lambda item: -item["exposed_ns"])


def incomplete_steps(captures: Sequence[Capture]) -> list[str]:
    """One sentence for each set of steps that traces hold in part for one reason: which steps, on which ranks, why."""
    steps_of: dict[tuple[str, tuple[int, ...]], list[int | None]] = {}
    for capture in captures:
        for why in dict.fromkeys(capture.incomplete.values()):
            numbers = tuple(sorted(number for number, reason in capture.incomplete.items() if reason == why))
            steps_of.setdefault((why, numbers), []).append(capture.rank)
    return [
        f"{'step' if len(numbers) == 1 else 'steps'} {in_ranges(numbers)} of {ranks_text(ranks)} incomplete ({why}): "
        "neither compared nor in means"
        for (why, numbers), ranks in steps_of.items()
    ]


def step_parts(captures: Sequence[Capture]) -> list[dict[str, Any]]:
    """Where the span of each traced step goes (rule `launch`), in parts that add up to it, in ns:

    compute + communication that only one dimension exposes + what several expose at once + exposed memory operations
    + idle = span. `idle_host_ns`: what of idle the device waited for its host, None on the host.
    """
    return [
        {"rank": capture.rank, "device": device.activity.device, "step": step.number, **parts(device, index)}
        for capture in captures
        for device in capture.devices
        for index, step in enumerate(capture.steps)
        if (device.step == index).any()
    ]


def parts(device: DeviceCapture, step: int) -> dict[str, Any]:
    activity, mine = device.activity, device.step == step
    window = activity.window(mine)
    exposed = {
        name: subtract(activity.union(activity.dimension(name) & mine), window.compute)
        for name in activity.dimensions()
    }
    alone = {
        name: subtract(times, join(EMPTY, *(other for n, other in exposed.items() if n != name))).total_ns()
        for name, times in exposed.items()
    }
    total = subtract(window.communication, window.compute).total_ns()
    return {
        "source": activity.source,
        "span_ns": window.span_ns,
        "compute_ns": window.compute.total_ns(),
        "exposed_ns": total,
        "exposed_alone_ns": {name: value for name, value in alone.items() if value},
        "exposed_together_ns": total - sum(alone.values()),
        "exposed_memory_ns": window.exposed_memory_ns(),
        "idle_ns": window.idle_ns(),
        "idle_host_ns": activity.starved_ns(mine),
    }


def mean_parts(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`step_parts` as the mean step of each rank and device, in order of ranks (unknown last)."""
    groups: dict[tuple[bool, int, int], list[dict[str, Any]]] = {}
    for step in steps:
        key = (step["rank"] is None, step["rank"] or 0, step["device"] or 0)
        groups.setdefault(key, []).append(step)
    found = []
    for _, mine in sorted(groups.items(), key=lambda pair: pair[0]):
        keys = ("span_ns", "compute_ns", "exposed_ns", "exposed_together_ns", "exposed_memory_ns", "idle_ns")
        names = dict.fromkeys(name for step in mine for name in step["exposed_alone_ns"])
        alone = {name: round(np.mean([step["exposed_alone_ns"].get(name, 0) for step in mine])) for name in names}
        means = {key: round(np.mean([step[key] for step in mine])) for key in keys}
        starved = [step["idle_host_ns"] for step in mine if step["idle_host_ns"] is not None]
        means["idle_host_ns"] = round(np.mean(starved)) if starved else None
        found.append({"rank": mine[0]["rank"], "device": mine[0]["device"], **means, "exposed_alone_ns": alone})
    return found
