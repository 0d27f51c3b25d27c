"""What a page of memory needs of a run's snapshots: the curves, and what they consisted of where they were highest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from dashboard.lanes.strip import Curves
from dashboard.store import Extract
from harness.memory import DeviceSummary
from harness.memory.composition import Share
from harness.report import Report
from harness.sources import SourceFile

SITES_KEPT = 200


def memory_timeline(report: Report) -> Extract:
    """`devices`: an item per device of each snapshot with a history, with its place in the columns `time_ns` (unix, or
    the number of the event without a `clock`), `allocated`, `active`, `reserved` (bytes; the first two requested).
    `phases`: the peaks of each rank's phases (bytes)."""
    devices = report.snapshots.devices if report.snapshots is not None else []
    items: list[dict[str, Any]] = []
    pieces: dict[str, list[Any]] = {name: [] for name in ("time_ns", "allocated", "active", "reserved")}
    first = 0
    for source, device in devices:
        if device.timeline is None:
            continue
        curves = Curves.of(device.timeline)
        pieces["time_ns"].append(curves.time_ns)
        for name in ("allocated", "active", "reserved"):
            pieces[name].append(curves.levels[name])
        items.append(_item(source, device, curves, first))
        first += len(curves.time_ns)
    columns = {name: np.concatenate(parts) if parts else np.empty(0, np.int64) for name, parts in pieces.items()}
    return Extract(values={"devices": items, "phases": _phases(report)}, columns=columns)


def _phases(report: Report) -> list[dict[str, Any]]:
    found = report.snapshots.phases if report.snapshots is not None else {}
    return [
        {
            "rank": rank,
            "phase": phase,
            "peak_allocated_bytes": peaks.allocated_bytes,
            "peak_active_bytes": peaks.active_bytes,
            "peak_reserved_bytes": peaks.reserved_bytes,
        }
        for (rank, phase), peaks in found.items()
    ]


def _item(source: SourceFile, device: DeviceSummary, curves: Curves, first: int) -> dict[str, Any]:
    assert device.timeline is not None
    base = {name: curves.base[name] for name in ("allocated", "active", "reserved")}
    peaks = {name: curves.peak(name) for name in ("allocated", "active", "reserved")}
    return {
        "rank": source.rank,
        "file": str(source.path),
        "iteration": source.iteration,
        "device": device.index,
        "clock": device.timeline.time_us is not None,
        "place": [first, first + len(curves.time_ns)],
        "base": base,
        "peaks": {name: {"bytes": level, "time_ns": at} for name, (level, at) in peaks.items()},
        "by_category": shares(device.by_category),
        "by_site": shares(device.by_site),
        "pending": shares(device.pending),
        "pending_ns": None if device.pending_us is None else device.pending_us * 1000,
        "ranges": [[name, start * 1000, None if end is None else end * 1000] for name, start, end in device.ranges],
        "sites": [asdict(site) for site in device.stacking.sites[:SITES_KEPT]],
    }


def shares(found: Sequence[Share]) -> list[dict[str, Any]]:
    return [asdict(share) for share in found[:SITES_KEPT]]
