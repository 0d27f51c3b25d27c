"""Memory over time at the detail of a screen: the lowest and the highest level in each column of pixels, so that no
peak is lost, however short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.memory import Timeline
from harness.trace.intervals import Ns

CURVES = ("allocated", "active", "reserved", "pending")
NS_PER_US = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """Memory of one device: `levels[name][k]` bytes hold from `time_ns[k]` on, `base[name]` before the first time.
    Without a clock `time_ns` counts the events."""

    time_ns: Ns
    levels: Mapping[str, Ns]
    base: Mapping[str, int]

    @classmethod
    def of(cls, timeline: Timeline) -> Curves:
        count = len(timeline.allocated)
        # Threads may record a few microseconds out of order; positions need a sorted clock.
        times = timeline.time_us
        clock = np.arange(count) if times is None else np.maximum.accumulate(times) * NS_PER_US
        return cls(
            time_ns=np.asarray(clock, np.int64),
            levels={
                "allocated": timeline.allocated,
                "active": timeline.active,
                "reserved": timeline.reserved,
                "pending": timeline.active - timeline.allocated,
            },
            base={
                "allocated": timeline.base_allocated,
                "active": timeline.base_active,
                "reserved": timeline.base_reserved,
                "pending": timeline.base_active - timeline.base_allocated,
            },
        )

    def extremes(self, name: str, edges: Ns) -> tuple[Ns, Ns]:
        """(lowest, highest) level within each column [edges[i], edges[i+1]), that at its start included."""
        first = np.searchsorted(self.time_ns, edges, side="left")
        begin, stop = int(first[0]), int(first[-1])
        entering = self.base[name] if begin == 0 else self.levels[name][begin - 1]
        levels = np.concatenate(([entering], self.levels[name][begin:stop])).astype(np.int64)
        place = first - begin
        low = np.minimum.reduceat(levels, place[:-1])
        high = np.maximum.reduceat(levels, place[:-1])
        # A column's events end with the level that the next one begins with.
        leaving = levels[place[1:]]
        return np.minimum(low, leaving), np.maximum(high, leaving)

    def columns(self, edges: Ns) -> dict[str, NDArray[np.float64]]:
        """`<curve>_low` and `<curve>_high` of every curve."""
        found: dict[str, NDArray[np.float64]] = {}
        for name in CURVES:
            low, high = self.extremes(name, edges)
            found |= {f"{name}_low": low.astype(np.float64), f"{name}_high": high.astype(np.float64)}
        return found

    def level_at(self, name: str, time_ns: int) -> int:
        """The level after the last event of a time."""
        index = int(np.searchsorted(self.time_ns, time_ns, side="right")) - 1
        return self.base[name] if index < 0 else int(self.levels[name][index])

    def peak(self, name: str) -> tuple[int, int | None]:
        """(bytes, time in ns) of a curve's first maximum; no time where nothing exceeds the level before it."""
        levels = self.levels[name]
        index = int(levels.argmax()) if len(levels) else -1
        if index < 0 or levels[index] <= self.base[name]:
            return self.base[name], None
        return int(levels[index]), int(self.time_ns[index])


def curves_of(values: Mapping[str, Any], columns: Mapping[str, NDArray[Any]], place: tuple[int, int]) -> Curves:
    """Curves out of an extract of `memory_timeline`."""
    first, last = place
    levels = {name: columns[name][first:last] for name in ("allocated", "active", "reserved")}
    base: dict[str, int] = dict(values["base"])
    return Curves(
        time_ns=columns["time_ns"][first:last],
        levels={**levels, "pending": levels["active"] - levels["allocated"]},
        base={**base, "pending": base["active"] - base["allocated"]},
    )
