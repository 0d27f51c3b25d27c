"""Memory levels from the `[memory]` instant events of a chrome trace (`profile_memory=True`).

They state the allocator's totals after each event, in rounded bytes, for allocated and reserved memory; nothing
about memory waiting for a stream. Traces of torch before 1.10 carry no totals: only the level relative to the
unknown start is left.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from harness.memory.ranges import step_of_range
from harness.memory.replay import Int64
from harness.memory.steps import RangePeaks
from harness.trace.events import MAX_US
from harness.trace.stream import EventStream

_CPU = 0  # `Device Type`: 0 CPU, 1 CUDA, 6 HIP
_HOST_CATEGORIES = frozenset({"user_annotation", "operator", "cpu_op", ""})


class _Event(msgspec.Struct):
    ph: Any = None
    cat: Any = None
    name: Any = None
    ts: Any = None
    dur: Any = None
    args: Any = None


@dataclass(frozen=True, slots=True)
class DeviceEvents:
    """The memory events of one device in time order (bytes; times in µs as the trace gives them).

    `allocated` and `reserved` hold the totals of those events that state them, at `time_us`; `change` is the signed
    size of every event. `without_total` counts events that state none; `has_reserved` tells whether the others also
    state the reserved total.
    """

    device: int
    time_us: list[float]
    allocated: Int64
    reserved: Int64
    change: Int64
    without_total: int
    change_of_first_total: int
    has_reserved: bool

    @property
    def relative_peak_bytes(self) -> int:
        """Highest level above the unknown start: the largest prefix sum of the changes, at least 0."""
        return max(0, int(np.cumsum(self.change).max())) if len(self.change) else 0


@dataclass(slots=True)
class TraceMemory:
    """What a trace says about memory: per device, and the peaks of its `ProfilerStep#N` host ranges.

    A step's peaks are None where its events state no totals.
    """

    rank: int | None
    devices: list[DeviceEvents]
    steps: dict[int, RangePeaks]
    dropped: int = field(default=0)


def read_trace_memory(path: Path) -> TraceMemory:
    """The memory events of a trace; `devices` is empty if it holds none. Raises InputError if it is unreadable."""
    stream = EventStream(path, _Event)
    events: dict[int, list[tuple[float, int, int | None, int | None]]] = defaultdict(list)
    windows: dict[int, list[float]] = {}
    dropped = 0
    for batch in stream:
        for event in batch:
            if event.name == "[memory]":
                dropped += not _keep(event, events)
            elif event.ph == "X" and isinstance(event.name, str) and _is_host(event.cat):
                step = step_of_range(event.name)
                if step is not None and _is_time(event.ts) and _is_time(event.dur):
                    window = windows.setdefault(step, [event.ts, event.ts + event.dur])
                    window[:] = [min(window[0], event.ts), max(window[1], event.ts + event.dur)]
    devices = [_columns(device, rows) for device, rows in sorted(events.items())]
    steps = {step: _within(devices, *windows[step]) for step in sorted(windows)} if devices else {}
    info = stream.header.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return TraceMemory(rank if type(rank) is int else None, devices, steps, dropped)


def _keep(event: _Event, events: dict[int, list[tuple[float, int, int | None, int | None]]]) -> bool:
    args = event.args
    if not isinstance(args, dict) or not _is_time(event.ts):
        return False
    device, kind, size = args.get("Device Id"), args.get("Device Type"), args.get("Bytes")
    if type(kind) is not int or type(device) is not int or type(size) is not int:
        return False
    if kind != _CPU:
        events[device].append((event.ts, size, _total(args, "Allocated"), _total(args, "Reserved")))
    return True


def _total(args: dict[str, Any], name: str) -> int | None:
    value = args.get(f"Total {name}")
    return value if type(value) is int else None


def _is_time(value: object) -> bool:
    """A number that can be a time in µs: not NaN, not infinite, no integer that a double cannot hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MAX_US


def _is_host(category: object) -> bool:
    return category is None or (isinstance(category, str) and category.lower() in _HOST_CATEGORIES)


def _columns(device: int, rows: list[tuple[float, int, int | None, int | None]]) -> DeviceEvents:
    rows.sort(key=lambda row: row[0])  # stable: the file's order decides between equal times
    totals = [row for row in rows if row[2] is not None]
    return DeviceEvents(
        device=device,
        time_us=[row[0] for row in totals],
        allocated=np.array([row[2] for row in totals], dtype=np.int64),
        reserved=np.array([row[3] or 0 for row in totals], dtype=np.int64),
        change=np.array([row[1] for row in rows], dtype=np.int64),
        without_total=len(rows) - len(totals),
        change_of_first_total=totals[0][1] if totals else 0,
        has_reserved=all(row[3] is not None for row in totals),
    )


def _within(devices: list[DeviceEvents], start_us: float, end_us: float) -> RangePeaks:
    peaks = RangePeaks(None, None, None)
    for device in devices:
        inside = [index for index, time in enumerate(device.time_us) if start_us <= time < end_us]
        if inside:
            span = slice(inside[0], inside[-1] + 1)
            found = RangePeaks(
                int(device.allocated[span].max()),
                None,
                int(device.reserved[span].max()) if device.has_reserved else None,
            )
            peaks = found.union(peaks)
    return peaks
