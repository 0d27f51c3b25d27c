"""Which FSDP unit a collective belongs to: the innermost `FSDP::… (unit)` range around the call that launched it, or
the range in which a checkpointed unit is computed again."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from harness.recording import RECOMPUTE_RANGE
from harness.trace.activity import Activity
from harness.trace.events import MISSING, Trace

PREFIXES = ("FSDP::", "AC::")
UNIT_RANGE = re.compile(rf"^(?:FSDP::\w+|{RECOMPUTE_RANGE}) \((.+)\)$")


class Unit(NamedTuple):
    """An FSDP unit's name as FSDP2 prints it (`layers.3`, `norm, head`), and "forward", "backward" or "recompute"."""

    unit: str
    phase: str


class Range(NamedTuple):
    start: int
    end: int
    name: str


def unit_of_each(trace: Trace, activity: Activity) -> dict[int, Unit]:
    """Event index → unit, for the communication events whose launch lies in a unit's range."""
    threads: dict[int, list[Range]] = {}
    rows = trace.annotations
    for start, dur, thread, name in zip(*(column.tolist() for column in rows), strict=True):
        if trace.names[name].startswith(PREFIXES):
            threads.setdefault(thread, []).append(Range(start, start + dur, trace.names[name]))
    nests = {thread: Nest(ranges) for thread, ranges in threads.items()}
    found = {}
    for event in np.flatnonzero((activity.collective >= 0) & (activity.launch != MISSING)).tolist():
        nest = nests.get(int(activity.thread[event]))
        unit = nest.unit_at(int(activity.launch[event])) if nest else None
        if unit is not None:
            found[event] = unit
    return found


class Nest:
    """The ranges of one thread, in which what encloses a moment is found without walking over all of them."""

    def __init__(self, ranges: list[Range]) -> None:
        self._ranges = sorted(ranges, key=lambda r: (r.start, -r.end))
        self._starts = [r.start for r in self._ranges]
        self._reach = np.maximum.accumulate([r.end for r in self._ranges]).tolist()

    def unit_at(self, moment: int) -> Unit | None:
        enclosing = []
        index = bisect_right(self._starts, moment) - 1
        while index >= 0 and self._reach[index] > moment:
            if self._ranges[index].end > moment:
                enclosing.append(self._ranges[index].name)
            index -= 1
        named = next((match for name in enclosing if (match := UNIT_RANGE.match(name))), None)
        if named is None:
            return None
        if any(name.startswith(RECOMPUTE_RANGE) for name in enclosing):
            return Unit(named[1], "recompute")
        return Unit(named[1], "backward" if any("backward" in name for name in enclosing) else "forward")
