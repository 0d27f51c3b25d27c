"""When the device of each rank does what its host told it to: starts and ends of kernels and collectives.

The rules of CUDA streams and of NCCL, in one pass over what every host issues, in its order:

- A kernel starts once its host has issued it, all before it on its stream is done, and so are the events that the
  stream waits for.
- A collective starts on a rank as any kernel, after those of the same communicator that were issued before it, and ends
  on all ranks together: the rank that comes last decides.
- On a stream beside the compute stream nothing starts while a kernel that fills the device runs: its blocks leave no
  room until they are done.
- What runs beside each other takes longer, by measured factors: a kernel for as long as it has company, a collective by
  the share of it that has. Which share is known from the pass before.
- A device that rests little slows down: by a measured factor of the share of the step in which it computes, which is
  known from the pass before, too.

Times are integer nanoseconds from the moment at which the step begins, when device and host have nothing left to do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

COMPUTE = "compute"
COPY_IN, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather copy-in", "all-gather", "reduce-scatter", "all-reduce"
"""FSDP2's streams (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py:FSDPCommContext)."""
EXCHANGE, TRANSFER = "context parallel", "pipeline"
"""The streams of NCCL for what context-parallel ranks exchange asynchronously, and for sends and receives."""
PASSES = 3
"""After two of them no share changes by more than a collective's own rounding, on the layouts that are compared."""
SHARED_BANDWIDTH = 2.0
"""Two kernels that memory bounds take twice as long beside each other."""

Span = tuple[int, int]
"""[start, end)."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """`fills`: its blocks occupy the whole device until they are done. `is_copy`: a memory operation, which
    counts as no computation. `host_ns`: before it is issued."""

    stream: str
    ns: int
    host_ns: int
    line: int
    fills: bool = False
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class Collective:
    """`meeting`: what the ranks that take part in it know it by, among themselves; `peers`: which of those that are
    simulated (one: the others are like it). Factors: how many times as long kernels beside it and itself take."""

    stream: str
    ns: int
    host_ns: int
    line: int
    dimension: str
    communicator: str
    meeting: tuple[object, ...]
    peers: tuple[int, ...]
    compute_factor: float = 1.0
    collective_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Record:
    """What `Wait` for the same `event` waits for: all that was issued to `stream` before."""

    stream: str
    event: int


@dataclass(frozen=True, slots=True)
class Wait:
    stream: str
    event: int


@dataclass(frozen=True, slots=True)
class Synchronise:
    """The host waits for a stream."""

    stream: str


@dataclass(frozen=True, slots=True)
class Work:
    """The host is busy with other things."""

    host_ns: int


Item = Kernel | Collective | Record | Wait | Synchronise | Work


class DeadlockError(Exception):
    """Ranks wait for each other: what they issue is in no order that could run."""


@dataclass(slots=True)
class Timeline:
    """Of one rank. `compute`: disjoint spans in which kernels run, by start; `collectives`: of each in the order of
    issue its span, dimension and line; `events`: when they were reached; `end`: when host and device are done."""

    compute: list[Span] = field(default_factory=list)
    collectives: list[tuple[int, int, str, int]] = field(default_factory=list)
    events: dict[int, int] = field(default_factory=dict)
    host_end: int = 0
    end: int = 0


def simulate(
    programs: Sequence[Sequence[Item]], sustained: Callable[[float], float] = lambda share: 1.0
) -> list[Timeline]:
    """The timelines of ranks that work together; raises `DeadlockError`.

    `sustained`: how many times as long kernels take on a device that computes for this share of the time.
    """
    shares: list[list[float]] = [[] for _ in programs]
    factors = [1.0] * len(programs)
    for _ in range(PASSES):
        timelines = _pass(programs, shares, factors)
        end = max((timeline.end for timeline in timelines), default=0) or 1
        found = [_shares(timeline) for timeline in timelines]
        slowed = [sustained(total_ns(timeline.compute) / end) for timeline in timelines]
        if found == shares and slowed == factors:
            break
        shares, factors = found, slowed
    return timelines


def _pass(
    programs: Sequence[Sequence[Item]], shares: Sequence[Sequence[float]], factors: Sequence[float]
) -> list[Timeline]:
    meetings: dict[tuple[object, ...], _Meeting] = {}
    ranks = [_Rank(number, shares[number], factors[number], meetings) for number in range(len(programs))]
    runs = [rank.run(program) for rank, program in zip(ranks, programs, strict=True)]
    waiting = list(range(len(runs)))
    while waiting:
        left = [number for number in waiting if next(runs[number], None) is not None]
        if left == waiting and not any(rank.moved for rank in ranks):
            raise DeadlockError(f"simulated ranks {left} wait for each other")
        waiting = left
    return [rank.timeline for rank in ranks]


def _shares(timeline: Timeline) -> list[float]:
    """Of each collective, how much of it computation runs beside."""
    return [
        overlap_ns([(start, end)], timeline.compute) / (end - start or 1) for start, end, _, _ in timeline.collectives
    ]


@dataclass(slots=True)
class _Meeting:
    """Ranks of a collective as they arrive: how long it would take each, and when they all could begin."""

    arrived: dict[int, tuple[int, int]] = field(default_factory=dict)


class _Rank:
    def __init__(
        self, number: int, shares: Sequence[float], factor: float, meetings: dict[tuple[object, ...], _Meeting]
    ) -> None:
        self._number, self._shares, self._factor, self._meetings = number, shares, factor, meetings
        self.timeline = Timeline()
        self.moved = False
        """Came to a meeting, or went on from one, when it was last run."""
        self._host = 0
        self._free: dict[str, int] = {}
        self._communicators: dict[str, int] = {}
        self._filled: list[Span] = []
        self._beside: list[tuple[int, int, float]] = []
        """What is known to run beside the compute stream, and how much longer kernels take meanwhile."""

    def run(self, program: Sequence[Item]) -> Generator[bool]:
        """Yields where it has to wait for other ranks to come to a meeting."""
        free, events = self._free, self.timeline.events
        for item in program:
            if isinstance(item, Kernel):
                self._host += item.host_ns
                self._kernel(item)
            elif isinstance(item, Wait):
                free[item.stream] = max(free.get(item.stream, 0), events[item.event])
            elif isinstance(item, Record):
                events[item.event] = free.get(item.stream, 0)
            elif isinstance(item, Collective):
                self._host += item.host_ns
                yield from self._collective(item)
            elif isinstance(item, Synchronise):
                self._host = max(self._host, free.get(item.stream, 0))
            else:
                self._host += item.host_ns
        self.timeline.host_end = self._host
        self.timeline.end = max(self._host, *free.values(), 0)
        self.timeline.compute = union(self.timeline.compute)

    def _kernel(self, kernel: Kernel) -> None:
        start = max(self._host, self._free.get(kernel.stream, 0))
        if kernel.stream == COMPUTE:
            end = self._beside_others(start, kernel.ns * self._factor)
            if kernel.fills:
                self._filled.append((start, end))
        else:
            start = self._once_there_is_room(start)
            end = start + kernel.ns
            self._beside.append((start, end, SHARED_BANDWIDTH))
        self._free[kernel.stream] = end
        if not kernel.is_copy:
            self.timeline.compute.append((start, end))

    def _beside_others(self, start: int, ns: float) -> int:
        """When a kernel ends that takes `ns` alone."""
        at, left = float(start), ns
        self._beside = [other for other in self._beside if other[1] > start]
        for begins, ends, factor in self._beside:
            if begins > at:
                alone = min(begins - at, left)
                at, left = at + alone, left - alone
            if left <= 0:
                break
            if ends > at:
                together = min(ends - at, left * factor)
                at, left = at + together, left - together / factor
        return round(at + max(left, 0.0))

    def _once_there_is_room(self, start: int) -> int:
        place = bisect_right(self._filled, (start, 2**63)) - 1
        return max(start, self._filled[place][1]) if place >= 0 else start

    def _collective(self, one: Collective) -> Generator[bool]:
        start = max(self._host, self._free.get(one.stream, 0), self._communicators.get(one.communicator, 0))
        if one.stream != COMPUTE:
            start = self._once_there_is_room(start)
        place = len(self.timeline.collectives)
        share = self._shares[place] if self._shares else 0.0
        meeting = self._meetings.setdefault(one.meeting, _Meeting()) if len(one.peers) > 1 else _Meeting()
        meeting.arrived[self._number] = start, round(one.ns * (1 + (one.collective_factor - 1) * share))
        self.moved = True
        while len(meeting.arrived) < len(one.peers):
            yield True
            self.moved = False
        self.moved = True
        end = max(arrival for arrival, _ in meeting.arrived.values()) + max(ns for _, ns in meeting.arrived.values())
        self._free[one.stream] = self._communicators[one.communicator] = end
        self.timeline.collectives.append((start, end, one.dimension, one.line))
        if one.stream != COMPUTE:
            self._beside.append((start, end, one.compute_factor))
            self._beside.sort()


def union(spans: Sequence[Span]) -> list[Span]:
    """The moments in any of the spans, as disjoint ones by start."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = found[-1][0], end
        elif end > start:
            found.append((start, end))
    return found


def total_ns(spans: Sequence[Span]) -> int:
    """Of disjoint ones."""
    return sum(end - start for start, end in spans)


def overlap_ns(one: Sequence[Span], other: Sequence[Span]) -> int:
    """How long both are; each disjoint and by start."""
    total = 0
    for start, end in one:
        place = max(0, bisect_right(other, (start, 2**63)) - 1)
        while place < len(other) and other[place][0] < end:
            total += max(0, min(end, other[place][1]) - max(start, other[place][0]))
            place += 1
    return total
