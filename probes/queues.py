"""How many hardware work queues a CUDA context has, from how many busy streams hold up one more. Free of torch.

A queue starts its work in order: where the work at its head waits, what other streams put behind it waits too, though
nothing depends on it. `queues_worker` keeps K - 1 streams busy, one with a kernel of known length and the others
waiting for it, and starts independent work on one more. As long as there is a free queue, that work gets it and ends
early; from one stream more than there are queues on, it ends after the kernel. So the queues are one fewer than the
smallest K that is held up. Every round measures all K, from 2 on; the rounds' numbers give the interval.

Which two streams share a queue says nothing: CUDA assigns queues as work arrives (H200, CUDA 13), so that a single
stream that waits holds up no other one while any queue is free.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from harness.text import counted

# The numbers of streams that may contradict a round's count, and that must be known, as shares: else it says nothing.
MOST_CONTRADICTING, LEAST_KNOWN = 0.1, 0.8
# Rounds whose numbers are further apart than this share of the count do not measure one thing.
FURTHEST_APART = 0.25
# With one queue all work beside the sleeping stream is late, with two half (H200: 29 to 48 of 96). Between them:
SINGLE_LATE = 0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Of `streams` streams the first runs a kernel until `released_ns`, the last computes until `ended_ns`, and those
    between wait for the first. Nanoseconds since the first kernel's start. `in_time`: everything had been launched
    before that kernel ended."""

    streams: int
    released_ns: int
    ended_ns: int
    in_time: bool

    @property
    def late(self) -> bool:
        """Whether the last stream was held up."""
        return self.ended_ns >= self.released_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """No stream waits: beside one that runs a kernel, `others` work, of which `late` ended after that kernel."""

    others: int
    late: int
    in_time: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    latencies: list[Latency]
    controls: list[Control]


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """What `queues_worker` printed. `setting`: the variable in its environment. `streams`: the largest K. `error`: why
    it is not all there."""

    setting: str | None = None
    device: str | None = None
    streams: int = 0
    sleep_ns: int | None = None
    launch_ns: int | None = None
    rounds: list[Round] = field(default_factory=list)
    phase: str | None = None
    error: str | None = None


def parse(document: Mapping[str, Any]) -> Observations:
    """Raises `msgspec.ValidationError` for what the program never prints."""
    found = msgspec.convert(document, Observations)
    for sample in (sample for item in found.rounds for sample in item.latencies):
        if not 2 <= sample.streams <= found.streams:
            raise msgspec.ValidationError(f"{sample.streams} streams are not between 2 and {found.streams}")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundResult:
    """What one round alone says: at least `low` queues and at most `high`, which are None where `reason` says why;
    `high` alone is None where no number of streams was held up. `contradicting`: numbers of streams
    that say otherwise; `known`: numbers of streams of which the round says anything."""

    low: int | None
    high: int | None
    reason: str | None = None
    contradicting: int = 0
    known: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The queues of one context: `count`, the median of the rounds', between the smallest and the largest of them;
    None where `reason` says why.

    `at_least`: in some round no number of streams was held up, so that there may be more; `high` is None then.
    `error`: why the measurement ended early. `streams`: the largest number of them. `latency_ns`: number of streams ->
    when the last one's work ended, median. `latency_released_ns`: when the kernel did that others waited for.
    """

    count: int | None
    low: int | None
    high: int | None
    at_least: bool
    reason: str | None
    error: str | None
    streams: int
    rounds: list[RoundResult]
    latency_ns: dict[int, int]
    latency_released_ns: dict[int, int]

    @property
    def number(self) -> str:
        """The count without its interval, `at least` included."""
        if self.count is None:
            return "no number"
        return ("at least " if self.at_least else "") + counted(self.count, "queue")

    def words(self) -> str:
        """The count with its interval."""
        if self.count is None:
            return f"{self.number} ({self.reason})"
        if self.at_least:
            return f"{self.number} ({self.streams} streams)"
        known = [item for item in self.rounds if item.low is not None]
        interval = f"{self.low} in each" if self.low == self.high else f"{self.low} to {self.high} in each"
        return f"{self.number} ({interval} of {counted(len(known), 'round')})"


def estimate(found: Observations) -> Estimate:
    """The number of queues with its uncertainty, or why there is none; never raises for what the GPU did."""
    results = [_saturation(item, found.streams) for item in found.rounds]
    lows = [item.low for item in results if item.low is not None]
    highs = [item.high for item in results if item.high is not None]
    reason = _refusal(results, lows, highs) if results else found.error or "no round was measured"
    at_least = reason is None and len(highs) < len(lows)
    samples = [sample for item in found.rounds for sample in item.latencies if sample.in_time]
    return Estimate(
        count=None if reason else min(lows) if at_least else statistics.median_low(lows),
        low=None if reason else min(lows),
        high=None if reason or at_least else max(highs),
        at_least=at_least,
        reason=reason,
        error=found.error,
        streams=found.streams,
        rounds=results,
        latency_ns=_medians(samples, "ended_ns"),
        latency_released_ns=_medians(samples, "released_ns"),
    )


def _refusal(results: Sequence[RoundResult], lows: Sequence[int], highs: Sequence[int]) -> str | None:
    if 2 * len(lows) < len(results) or not lows:
        reasons = [item.reason for item in results if item.reason is not None]
        return f"{len(results) - len(lows)} of {counted(len(results), 'round')} cannot be used: {reasons[0]}"
    if highs and max(lows) - min(highs) > max(1.0, FURTHEST_APART * statistics.median_low(lows)):
        return f"the rounds do not agree: {', '.join(_range(item) for item in results if item.low is not None)} queues"
    return None


def _range(found: RoundResult) -> str:
    if found.high is None:
        return f"at least {found.low}"
    return str(found.low) if found.low == found.high else f"{found.low} to {found.high}"


def _saturation(found: Round, streams: int) -> RoundResult:
    """The counts that the fewest numbers of streams contradict: with Q queues those up to Q are not held up, all above
    are. A number of streams that is not known leaves two counts as good as each other."""
    late = {sample.streams: sample.late for sample in found.latencies if sample.in_time}
    if len(late) < LEAST_KNOWN * (streams - 1):
        slow = sum(not sample.in_time for sample in found.latencies)
        return RoundResult(
            low=None,
            high=None,
            known=len(late),
            reason=f"only {len(late)} of the numbers of streams up to {streams} are known"
            + (f"; in {slow} cases launching took longer than the kernel waited for" if slow else ""),
        )
    against = {count: _against(late, count) for count in _candidates(found.controls, streams)}
    contradicting = min(against.values())
    best = [count for count, number in against.items() if number == contradicting]
    low, high = best[0], best[-1]
    if contradicting > MOST_CONTRADICTING * len(late):
        return RoundResult(
            low=None,
            high=None,
            contradicting=contradicting,
            known=len(late),
            reason=f"{contradicting} of {len(late)} numbers of streams contradict the others: more streams were not "
            "held up where fewer were (does another process use the GPU?)",
        )
    return RoundResult(low=low, high=None if high == streams else high, contradicting=contradicting, known=len(late))


def _candidates(controls: Sequence[Control], streams: int) -> range:
    """The counts that the controls leave; `streams` stands for any from there on.

    They decide between one queue and two, also where two streams say otherwise: those are a single work, launched first
    beside a sleeping stream, and with two queues half of all such work is late though the other queue is free (H200;
    two streams were never measured there). One control in which some work was done shows a second queue, since noise
    makes work late and never early.
    """
    shares = [control.late / control.others for control in controls if control.in_time and control.others]
    if not shares:
        return range(1, streams + 1)
    return range(1, 2) if min(shares) >= SINGLE_LATE else range(2, streams + 1)


def _against(late: Mapping[int, bool], count: int) -> int:
    """How many numbers of streams are held up or not against what so many queues would do."""
    return sum(held != (size > count) for size, held in late.items())


def _medians(samples: Sequence[Latency], name: str) -> dict[int, int]:
    return {
        streams: statistics.median_low([getattr(sample, name) for sample in samples if sample.streams == streams])
        for streams in sorted({sample.streams for sample in samples})
    }
