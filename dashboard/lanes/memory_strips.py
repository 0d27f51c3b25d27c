"""Memory of a run's snapshots as strips of a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dashboard.lanes.picture import Band, Shown, Strip
from dashboard.lanes.source import Moment
from dashboard.lanes.strip import NS_PER_US, Curves, curves_of
from dashboard.store import Extract
from harness.text import size


def curves(extract: Extract, item: dict[str, Any]) -> Curves:
    return curves_of(item, extract.columns, (item["place"][0], item["place"][1]))


def beside(extract: Extract, moment: Moment, shown: Sequence[Shown]) -> list[Strip]:
    """Strips of the ranks that are shown, where their snapshot's history meets the time of the traces."""
    groups = {one.index.rank: one.group for one in reversed(shown)}
    found = []
    for item in extract.values["devices"]:
        if item["rank"] not in groups or not item["clock"] or not moment.common_clock:
            continue
        made = curves(extract, item)
        first, last = int(made.time_ns[0]), int(made.time_ns[-1])
        if last > moment.origin_ns and first < moment.origin_ns + moment.extent_ns:
            group = groups[item["rank"]]
            found.append(
                Strip(
                    label=f"{group}: memory",
                    group=group,
                    curves=made,
                    offset_ns=-moment.origin_ns,
                    height=90,
                    marks=peak_marks(item, first),
                    pending_marks=pending_marks(item),
                )
            )
    return found


def oom_marks(item: dict[str, Any], memory: dict[str, Any]) -> list[tuple[int, int, str]]:
    """The moments at which an allocation failed, of the object of `memory --json`."""
    return [
        (oom["time_us"] * NS_PER_US, oom["active_bytes"], f"out of memory: asked for {size(oom['size_bytes'])}")
        for file in memory["files"]
        if file["file"] == item["file"]
        for device in file["devices"]
        if device["device"] == item["device"]
        for oom in device["oom"]
        if oom["time_us"] is not None and oom["active_bytes"] is not None
    ]


def pending_marks(item: dict[str, Any]) -> list[tuple[int, int, str]]:
    """The allocation at which most was pending."""
    most = sum(share["bytes"] for share in item["pending"])
    return [] if item["pending_ns"] is None else [(item["pending_ns"], most, f"{size(most)} at an allocation")]


def peak_marks(item: dict[str, Any], first_ns: int) -> list[tuple[int, int, str]]:
    """The highest active level; at `first_ns`, where the history begins, if nothing in it exceeds the level before."""
    peak = item["peaks"]["active"]
    words = f"peak {size(peak['bytes'])} active"
    if peak["time_ns"] is None:
        return [(first_ns, peak["bytes"], f"{words}, when the history begins")]
    return [(peak["time_ns"], peak["bytes"], words)]


def bands(item: dict[str, Any], group: str, origin_ns: int, first_ns: int, last_ns: int) -> list[Band]:
    """The steps within a history; those that were open at its edges as far as they are in it."""
    return [
        Band(
            group=group,
            label=f"step {name}",
            start_ns=max(start, first_ns) - origin_ns,
            end_ns=min(last_ns if end is None else end, last_ns) - origin_ns,
        )
        for name, start, end in item["ranges"]
        if isinstance(name, int) and start < last_ns and (end is None or end > first_ns)
    ]
