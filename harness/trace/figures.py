"""The figures of a window: how long communication, computation and memory operations ran, and how much overlapped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.trace.intervals import Intervals, Ns, clip, intersection, join, subtract, union

COMMUNICATION, COMPUTE, MEMORY = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Window:
    """What ran within a window of `span_ns`, each as the union over all streams of one device."""

    communication: Intervals
    compute: Intervals
    memory: Intervals
    span_ns: int

    @classmethod
    def of(cls, start: Ns, end: Ns, role: NDArray[np.int8]) -> Window:
        """The window of some events: from their first start to their last end."""
        communication, compute, memory = (
            union(start[role == kind], end[role == kind]) for kind in (COMMUNICATION, COMPUTE, MEMORY)
        )
        return cls(communication, compute, memory, int(end.max() - start.min()) if start.size else 0)

    def clipped(self, start_ns: int, end_ns: int) -> Window:
        """The same activity within [start_ns, end_ns), which is the new window."""
        communication, compute, memory = (
            clip(kind, start_ns, end_ns) for kind in (self.communication, self.compute, self.memory)
        )
        return Window(communication, compute, memory, end_ns - start_ns)

    def idle_ns(self) -> int:
        return self.span_ns - join(self.communication, self.compute, self.memory).total_ns()

    def exposed_ns(self, communication: Intervals) -> int:
        """How long `communication` ran while no kernel computed."""
        return subtract(communication, self.compute).total_ns()

    def exposed_memory_ns(self) -> int:
        """How long memory operations ran while nothing communicated or computed."""
        return subtract(self.memory, join(self.communication, self.compute)).total_ns()

    def figures(self, communication: Intervals | None = None) -> dict[str, Any]:
        """The eight figures of the `--json` contract, in ns and percent.

        comm_ns = |∪comm|, compute_ns = |∪compute|, memory_ns = |∪memory operations|, overlap_ns = |∪comm ∩ ∪compute|,
        exposed_ns = comm_ns − overlap_ns, idle_ns = span_ns − |∪all|, overlap_pct = 100·overlap_ns/comm_ns (None
        without communication). With `communication` (one dimension's, one kind's, …) only that counts as comm;
        compute, memory, idle and span stay the window's.
        """
        chosen = self.communication if communication is None else communication
        comm = chosen.total_ns()
        overlap = intersection(chosen, self.compute).total_ns()
        return {
            "comm_ns": comm,
            "compute_ns": self.compute.total_ns(),
            "memory_ns": self.memory.total_ns(),
            "overlap_ns": overlap,
            "exposed_ns": comm - overlap,
            "idle_ns": self.idle_ns(),
            "span_ns": self.span_ns,
            "overlap_pct": 100 * overlap / comm if comm else None,
        }
