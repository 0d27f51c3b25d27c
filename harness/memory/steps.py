"""Peaks per step and per phase, from the named ranges of a snapshot or from a recording's step rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from harness.memory.categories import labels_of
from harness.memory.ranges import Key, phase_of_range, ranges_of, step_of_range
from harness.memory.replay import Timeline
from harness.memory.snapshot import Annotation, Device, Snapshot

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class RangePeaks:
    """The highest levels within a range of time, the level at its start included (bytes); None if unknown."""

    allocated_bytes: int | None
    active_bytes: int | None
    reserved_bytes: int | None

    def union(self, other: RangePeaks) -> RangePeaks:
        """The higher of each, None only where both are unknown."""
        return RangePeaks(
            _higher(self.allocated_bytes, other.allocated_bytes),
            _higher(self.active_bytes, other.active_bytes),
            _higher(self.reserved_bytes, other.reserved_bytes),
        )


def _higher(a: int | None, b: int | None) -> int | None:
    known = [value for value in (a, b) if value is not None]
    return max(known) if known else None


def peaks_between(timeline: Timeline, start_us: int, end_us: int | None) -> RangePeaks:
    """Highest levels from `start_us` up to, not including, `end_us` (None: to the end of the history)."""
    assert timeline.time_us is not None
    # Threads may record a few microseconds out of order; positions need a sorted clock.
    clock = np.maximum.accumulate(timeline.time_us)
    first = int(np.searchsorted(clock, start_us, side="left"))
    last = len(clock) if end_us is None else int(np.searchsorted(clock, end_us, side="left"))

    def highest(levels: Any, base: int) -> int:
        before = base if first == 0 else int(levels[first - 1])
        return max(before, int(levels[first:last].max())) if last > first else before

    return RangePeaks(
        highest(timeline.allocated, timeline.base_allocated),
        highest(timeline.active, timeline.base_active),
        highest(timeline.reserved, timeline.base_reserved),
    )


def step_peaks(snapshot: Snapshot, timelines: Sequence[Timeline]) -> dict[int, RangePeaks]:
    """Peaks of each step the snapshot's ranges name; with several devices the higher of each.

    Ranges that end before the history begins are left out: nothing is known about them.
    """
    return _range_peaks(snapshot.annotations, timelines, step_of_range)


def phase_peaks(snapshot: Snapshot, timelines: Sequence[Timeline]) -> dict[str, RangePeaks]:
    """Peaks of each phase: within its named ranges, else at the allocations our recorder labelled with it."""
    peaks: dict[str, RangePeaks] = _range_peaks(snapshot.annotations, timelines, phase_of_range)
    by_device = {timeline.device: timeline for timeline in timelines}
    for device in snapshot.devices:
        if device.index in by_device:
            for phase, found in _labelled_peaks(device, by_device[device.index]).items():
                peaks[phase] = found.union(peaks[phase]) if phase in peaks else found
    return {phase: peaks[phase] for phase in (*PHASES, *sorted(peaks.keys() - set(PHASES))) if phase in peaks}


def _labelled_peaks(device: Device, timeline: Timeline) -> dict[str, RangePeaks]:
    peaks: dict[str, RangePeaks] = {}
    for index, metadata in enumerate(device.history.metadata):
        if metadata and (phase := labels_of(metadata).get("phase")):
            level = RangePeaks(
                int(timeline.allocated[index]), int(timeline.active[index]), int(timeline.reserved[index])
            )
            peaks[phase] = level.union(peaks[phase]) if phase in peaks else level
    return peaks


def _range_peaks(
    annotations: Iterable[Annotation], timelines: Sequence[Timeline], key_of: Callable[[str], Key | None]
) -> dict[Key, RangePeaks]:
    timed = [timeline for timeline in timelines if timeline.time_us is not None]
    peaks: dict[Key, RangePeaks] = {}
    for key, start_us, end_us in ranges_of(annotations, key_of):
        for timeline in timed:
            assert timeline.time_us is not None
            if end_us is not None and end_us <= timeline.time_us[0]:
                continue
            found = peaks_between(timeline, start_us, end_us)
            peaks[key] = found.union(peaks[key]) if key in peaks else found
    return peaks


def recorded_peaks(row: Mapping[str, Any]) -> RangePeaks:
    """Peaks a recording's step row states; None for each that is missing or not a whole number."""
    return RangePeaks(*(_whole(row.get(f"peak_{name}_bytes")) for name in ("allocated", "active", "reserved")))


def recorded_phases(row: Mapping[str, Any]) -> dict[str, RangePeaks]:
    """Peaks per phase a step row states: `phases: {forward: {peak_allocated_bytes: …}, …}`."""
    phases = row.get("phases")
    if not isinstance(phases, Mapping):
        return {}
    return {str(name): recorded_peaks(values) for name, values in phases.items() if isinstance(values, Mapping)}


def recorded_composition(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """[{category, bytes}] of the row's allocated peak; None where it states none, or something else."""
    try:
        shares = msgspec.convert(row.get("peak_composition"), list[_Share] | None)
    except msgspec.ValidationError:
        return None
    return None if shares is None else [msgspec.to_builtins(share) for share in shares]


class _Share(msgspec.Struct, frozen=True):
    category: str
    bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


def _whole(value: object) -> int | None:
    return value if type(value) is int else None
