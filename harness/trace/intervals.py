"""Sets of half-open intervals [start, end) as sorted, disjoint int64 arrays of nanoseconds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ns = NDArray[np.int64]


class Intervals(NamedTuple):
    """A set of moments: `start[i] <= t < end[i]` for some i; sorted, disjoint, not touching, none empty."""

    start: Ns
    end: Ns

    def total_ns(self) -> int:
        return int((self.end - self.start).sum())

    def shifted(self, by_ns: int) -> Intervals:
        return Intervals(self.start + by_ns, self.end + by_ns)


EMPTY = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start: Ns, end: Ns) -> Intervals:
    """The moments covered by at least one of the given intervals, which may overlap and be in any order."""
    real = end > start
    start, end = start[real], end[real]
    if not start.size:
        return EMPTY
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    opens = np.concatenate(([True], start[1:] > reach[:-1]))
    closes = np.concatenate((opens[1:], [True]))
    return Intervals(start[opens], reach[closes])


def join(*sets: Intervals) -> Intervals:
    """The moments in any of the sets."""
    return union(np.concatenate([s.start for s in sets]), np.concatenate([s.end for s in sets])) if sets else EMPTY


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """The moments in both sets."""
    # For each interval of a, the intervals of b from the first that ends after its start to the last before its end.
    first = np.searchsorted(b.end, a.start, side="right")
    last = np.searchsorted(b.start, a.end, side="left")
    counts = np.maximum(last - first, 0)
    of_a = np.repeat(np.arange(a.start.size), counts)
    within = np.arange(of_a.size) - np.repeat(np.cumsum(counts) - counts, counts)
    of_b = first[of_a] + within
    return Intervals(np.maximum(a.start[of_a], b.start[of_b]), np.minimum(a.end[of_a], b.end[of_b]))


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """The moments in `a` and not in `b`."""
    if not a.start.size or not b.start.size:
        return a
    gap_start = np.concatenate(([min(a.start[0], b.start[0])], b.end))
    gap_end = np.concatenate((b.start, [max(a.end[-1], b.end[-1])]))
    gaps = gap_end > gap_start
    return intersection(a, Intervals(gap_start[gaps], gap_end[gaps]))


def clip(a: Intervals, start_ns: int, end_ns: int) -> Intervals:
    """The moments of `a` within [start_ns, end_ns)."""
    return intersection(a, union(np.array([start_ns], np.int64), np.array([end_ns], np.int64)))
