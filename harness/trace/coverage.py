"""How long a set of moments lasts within any window, found without walking over it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.trace.intervals import Intervals, Ns

Shares = NDArray[np.float64]


class Coverage(NamedTuple):
    """Sorted, disjoint intervals with running totals: interval i begins at `start[i]`, `before[i]` ns of the set lie
    before it, and `before[-1]` is the whole set (one entry more than `start`)."""

    start: Ns
    before: Ns

    @classmethod
    def of(cls, times: Intervals) -> Coverage:
        return cls(times.start, np.concatenate((np.zeros(1, np.int64), np.cumsum(times.end - times.start))))

    @property
    def end(self) -> Ns:
        return self.start + np.diff(self.before)

    def total_ns(self) -> int:
        return int(self.before[-1])

    def until(self, moments: Ns) -> Ns:
        """The ns of the set before each moment, by binary search."""
        if not self.start.size:
            return np.zeros(len(moments), np.int64)
        begun = np.searchsorted(self.start, moments, side="right")
        last = np.maximum(begun - 1, 0)
        within = np.minimum(moments, self.start[last] + self.before[last + 1] - self.before[last]) - self.start[last]
        return np.asarray(np.where(begun > 0, self.before[last] + within, 0), np.int64)

    def per_column(self, edges: Ns) -> Ns:
        """The ns of the set within each column [edges[i], edges[i+1]): nothing is widened and nothing lost, so the
        columns add up to what the whole window covers."""
        return np.diff(self.until(edges))


def shares(times: Intervals, edges: Ns) -> Shares:
    """The share of each column [edges[i], edges[i+1]) that `times` covers."""
    return np.asarray(Coverage.of(times).per_column(edges) / np.diff(edges), np.float64)
