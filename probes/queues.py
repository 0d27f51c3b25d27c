"""How many hardware work queues a CUDA context has, from which of its streams waited for which. Free of torch.

A CUDA stream is mapped to one of the context's work queues (CUDA_DEVICE_MAX_CONNECTIONS of them are asked for), and a
queue starts its work in order: where the work at its head waits, the work of other streams behind it waits too, though
nothing depends on it. `queues_worker` makes one stream wait for a kernel of known length and starts work on all others,
once for each stream: those that end after that kernel share the waiting stream's queue. Over all streams that is an
equivalence relation, and its classes are the queues. Every round is one whole measurement; the rounds' counts give the
interval.

The kernel that is waited for comes from a further stream, whose queue may be held up by it. Controls, in which no
stream waits, tell who shares that queue: they are one class, and are left out of what other streams' rows say.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage  # type: ignore[import-untyped]
from scipy.spatial.distance import squareform  # type: ignore[import-untyped]

from harness.text import counted

Floats = NDArray[np.float64]

# Pairs that contradict the classes, of all that share a queue by any sign: above it a round says nothing.
MOST_CONTRADICTING = 0.25
# Rows of a round that must be usable, else it says nothing.
LEAST_ROWS = 0.8
# The interval may be this share of the count; rounds further apart do not measure one thing.
WIDEST_INTERVAL = 0.25
# A stream of which fewer pairs are known belongs to no class.
LEAST_KNOWN = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What came of one waiting stream, or of a control where `stream` is None. Nanoseconds since the start of the
    kernel waited for: when that kernel ended, and when the work of each stream did (None: not known). `in_time`:
    everything had been launched before the kernel ended."""

    stream: int | None
    released_ns: int
    in_time: bool
    ended_ns: list[int | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    rows: list[Row]


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """The simple form: of `streams` streams the first runs a kernel until `released_ns`, the last computes until
    `ended_ns`, and those between wait for the first. Nanoseconds since the first kernel's start."""

    streams: int
    released_ns: int
    ended_ns: int
    in_time: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """What `queues_worker` printed. `setting`: the variable in its environment. `error`: why it is not all there."""

    setting: str | None = None
    device: str | None = None
    streams: int = 0
    sleep_ns: int | None = None
    launch_ns: int | None = None
    rounds: list[Round] = field(default_factory=list)
    latencies: list[Latency] = field(default_factory=list)
    phase: str | None = None
    error: str | None = None


def parse(document: Mapping[str, Any]) -> Observations:
    """Raises `msgspec.ValidationError` for what the program never prints."""
    found = msgspec.convert(document, Observations)
    for row in (row for item in found.rounds for row in item.rows):
        if len(row.ended_ns) != found.streams or row.stream not in (None, *range(found.streams)):
            raise msgspec.ValidationError(f"a row is not of {found.streams} streams")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundResult:
    """What one round alone says. `count` is None where `reason` says why. `classes`: the numbers of the streams of each
    queue. `asymmetric_pairs`: of two streams one waited for the other and not the reverse; `nontransitive_pairs`: both
    directions agree and contradict the classes; `sharing_pairs`: those that share a queue by any sign."""

    count: int | None
    reason: str | None = None
    classes: list[list[int]] = field(default_factory=list)
    asymmetric_pairs: int = 0
    nontransitive_pairs: int = 0
    sharing_pairs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The queues of one context: `count`, the median of the rounds', between the smallest and the largest of them;
    None where `reason` says why.

    `at_least`: a queue with a single stream was seen, so there may be queues that no stream was mapped to (Good 1953:
    the unseen share is about the share of singletons). `error`: why the measurement ended early. `class_sizes`: streams
    in each queue, of a round with that count. `stable`: every round found the same streams together. `delayed_from`:
    the smallest number of streams in the simple form whose last one was held up. `latency_ns`: number of streams ->
    when the last one's work ended, median. `latency_released_ns`: when the kernel waited for did.
    """

    count: int | None
    low: int | None
    high: int | None
    at_least: bool
    reason: str | None
    error: str | None
    streams: int
    class_sizes: list[int]
    stable: bool | None
    rounds: list[RoundResult]
    delayed_from: int | None
    latency_ns: dict[int, int]
    latency_released_ns: dict[int, int]

    def words(self) -> str:
        """The count with its interval."""
        if self.count is None:
            return f"no number ({self.reason})"
        if self.at_least:
            return f"at least {counted(self.count, 'queue')} ({self.streams} streams)"
        known = [item.count for item in self.rounds if item.count is not None]
        interval = f"{self.low} in each" if self.low == self.high else f"{self.low} to {self.high} in each"
        return f"{counted(self.count, 'queue')} ({interval} of {counted(len(known), 'round')})"


def estimate(found: Observations) -> Estimate:
    """The number of queues with its uncertainty, or why there is none; never raises for what the GPU did."""
    results = [_partition(item, found.streams) for item in found.rounds]
    counts = [item.count for item in results if item.count is not None]
    count = statistics.median_low(counts) if counts else None
    low, high = min(counts, default=None), max(counts, default=None)
    classes = next((item.classes for item in results if count is not None and item.count == count), [])
    reason = _refusal(results, counts) if results else found.error or "no round was measured"
    if reason is not None:
        count = low = high = None
        classes = []
    partitions = {frozenset(map(frozenset, item.classes)) for item in results if item.count is not None}
    in_time = [sample for sample in found.latencies if sample.in_time]
    return Estimate(
        count=count,
        low=low,
        high=high,
        at_least=count is not None and any(len(streams) == 1 for streams in classes),
        reason=reason,
        error=found.error,
        streams=found.streams,
        class_sizes=sorted(map(len, classes), reverse=True),
        stable=len(partitions) == 1 if count is not None else None,
        rounds=results,
        delayed_from=_delayed_from(in_time),
        latency_ns=_medians(in_time, "ended_ns"),
        latency_released_ns=_medians(in_time, "released_ns"),
    )


def _refusal(results: Sequence[RoundResult], counts: Sequence[int]) -> str | None:
    if 2 * len(counts) < len(results) or not counts:
        reasons = [item.reason for item in results if item.reason is not None]
        return f"{len(results) - len(counts)} of {counted(len(results), 'round')} cannot be used: {reasons[0]}"
    if max(counts) - min(counts) > max(1.0, WIDEST_INTERVAL * statistics.median_low(counts)):
        return f"the rounds do not agree: {', '.join(map(str, counts))} queues"
    return None


def _partition(found: Round, streams: int) -> RoundResult:
    """The classes of one round, by average linkage of the pairs' votes: two groups are one if most pairs between them
    say so, so that a single pair joins nothing."""
    controls = [row for row in found.rows if row.stream is None and row.in_time]
    rows = [row for row in found.rows if row.stream is not None and row.in_time and _waited(row)]
    if not controls or len(rows) < max(2, LEAST_ROWS * streams):
        late = sum(not row.in_time for row in found.rows)
        return RoundResult(
            count=None,
            reason=f"{len(rows)} of {streams} streams can be used"
            + (f"; in {late} cases launching took longer than the kernel waited for" if late else ""),
        )
    agreed = _agreed(rows, _late(controls, streams), streams)
    placed = np.flatnonzero(np.isfinite(agreed).sum(axis=1) >= LEAST_KNOWN * (streams - 1))
    if len(placed) < max(2, LEAST_ROWS * streams):
        return RoundResult(count=None, reason=f"the queue of {streams - len(placed)} of {streams} streams is not known")
    agreed = agreed[np.ix_(placed, placed)]
    distance = np.where(np.isfinite(agreed), 1 - agreed, 0.5)
    np.fill_diagonal(distance, 0)
    labels = fcluster(linkage(squareform(distance), "average"), np.nextafter(0.5, 0), "distance")
    upper = np.triu_indices(len(placed), 1)
    known = np.isfinite(agreed[upper])
    votes, same = agreed[upper][known], (labels[:, None] == labels[None, :])[upper][known]
    asymmetric = votes == 0.5
    nontransitive = ~asymmetric & ((votes == 1) != same)
    sharing = (votes > 0) | same
    classes = [[int(number) for number in placed[labels == label]] for label in np.unique(labels)]
    result = RoundResult(
        count=len(classes),
        classes=sorted(classes),
        asymmetric_pairs=int(asymmetric.sum()),
        nontransitive_pairs=int(nontransitive.sum()),
        sharing_pairs=int(sharing.sum()),
    )
    contradicting = result.asymmetric_pairs + result.nontransitive_pairs
    if contradicting <= MOST_CONTRADICTING * result.sharing_pairs:
        return result
    return RoundResult(
        count=None,
        reason=f"sharing a queue is no consistent relation: of {result.sharing_pairs} pairs of streams that do by any "
        f"sign, {result.asymmetric_pairs} do in one direction only and {result.nontransitive_pairs} contradict the "
        "other pairs (does another process use the GPU?)",
        asymmetric_pairs=result.asymmetric_pairs,
        nontransitive_pairs=result.nontransitive_pairs,
        sharing_pairs=result.sharing_pairs,
    )


def _waited(row: Row) -> bool:
    """Whether the stream that had to wait did."""
    own = None if row.stream is None else row.ended_ns[row.stream]
    return own is not None and own >= row.released_ns


def _late(rows: Sequence[Row], streams: int) -> NDArray[np.bool_]:
    """Streams that were held up in most of the rows."""
    late = np.zeros(streams)
    for row in rows:
        late += [ended is not None and ended >= row.released_ns for ended in row.ended_ns]
    return late > len(rows) / 2


def _agreed(rows: Sequence[Row], held: NDArray[np.bool_], streams: int) -> Floats:
    """For each pair of streams the mean of both directions: 1 share a queue, 0 do not, NaN not known. `held` share
    the queue of the kernel waited for, which holds them up whoever waits."""
    votes = np.full((streams, streams), np.nan)
    for row in rows:
        assert row.stream is not None
        for other, ended in enumerate(row.ended_ns):
            if other != row.stream and ended is not None and not held[other]:
                votes[row.stream, other] = ended >= row.released_ns
    votes[np.ix_(held, held)] = 1
    both = np.stack([votes, votes.T])
    known = np.isfinite(both)
    total = np.where(known, both, 0).sum(axis=0)
    agreed: Floats = np.where(known.any(axis=0), total / np.maximum(known.sum(axis=0), 1), np.nan)
    np.fill_diagonal(agreed, np.nan)
    return agreed


def _delayed_from(samples: Sequence[Latency]) -> int | None:
    for streams in sorted({sample.streams for sample in samples}):
        held = [sample.ended_ns >= sample.released_ns for sample in samples if sample.streams == streams]
        if 2 * sum(held) > len(held):
            return streams
    return None


def _medians(samples: Sequence[Latency], name: str) -> dict[int, int]:
    return {
        streams: statistics.median_low([getattr(sample, name) for sample in samples if sample.streams == streams])
        for streams in sorted({sample.streams for sample in samples})
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmQueues:
    """The queues that an arm's context has. `value`: the variable in its environment, None where it is not set."""

    arm: str
    value: str | None
    estimate: Estimate

    @property
    def asked(self) -> int | None:
        """How many queues the arm asks for; None where the variable is not set, or no number."""
        text = (self.value or "").strip()
        return int(text) if text.isdecimal() else None


def took_effect(arms: Sequence[ArmQueues]) -> bool | None:
    """Whether the contexts of two arms differ in their queues beyond the intervals; None with fewer than two known."""
    known = [arm.estimate for arm in arms if arm.estimate.count is not None]
    if len(known) < 2:
        return None
    return any(_more(one, other) for one in known for other in known)


def _more(one: Estimate, other: Estimate) -> bool:
    """Whether `one` has more queues, beyond both intervals."""
    if one.low is None or other.high is None or other.at_least:
        return False
    return one.low > other.high


def findings(arms: Sequence[ArmQueues], default: str | None) -> list[str]:
    """What the arms' queues mean, in words: whether each got what it asked for, whether more asked for gives more, and
    which arms are alike. `default`: what an unset variable is documented to mean."""
    known = [arm for arm in arms if arm.estimate.count is not None]
    lines = [f"{arm.arm}: {arm.estimate.words()}" for arm in arms]
    for arm in known:
        if arm.value is None:
            if default and default.isdecimal() and not _gives(arm.estimate, int(default)):
                lines.append(f"{arm.arm}: not the documented default of {default}: {arm.estimate.words()}")
        elif arm.asked is None:
            lines.append(f"{arm.arm} is no number of queues")
        elif not _gives(arm.estimate, arm.asked):
            lines.append(f"asked for {arm.asked}, this context has {arm.estimate.count}")
    by_asked = sorted((arm for arm in known if arm.asked is not None), key=lambda arm: arm.asked or 0)
    lines += [
        f"{more.arm} asks for more than {fewer.arm} and has fewer: {more.estimate.count} against {fewer.estimate.count}"
        for fewer, more in pairwise(by_asked)
        if fewer.asked != more.asked and _more(fewer.estimate, more.estimate)
    ]
    lines += [line for line in [_alike(known), _effect(known)] if line]
    return lines


def _gives(found: Estimate, asked: int) -> bool:
    """Whether `asked` is within what was found."""
    if found.low is None or found.high is None:
        return False
    return found.low <= asked and (asked <= found.high or found.at_least)


def _alike(known: Sequence[ArmQueues]) -> str | None:
    groups: dict[int | None, list[str]] = {}
    for arm in known:
        if not arm.estimate.at_least:
            groups.setdefault(arm.estimate.count, []).append(arm.arm)
    alike = [
        f"{', '.join(names)} ({counted(count or 0, 'queue')})" for count, names in groups.items() if len(names) > 1
    ]
    return (
        f"alike in their queues, so that no trial can tell them apart by these: {'; '.join(alike)}" if alike else None
    )


def _effect(known: Sequence[ArmQueues]) -> str | None:
    effect = took_effect(known)
    if effect is None:
        return None
    numbers = sorted(arm.estimate.count or 0 for arm in known)
    if effect:
        return f"the setting took effect: contexts have from {numbers[0]} to {counted(numbers[-1], 'queue')}"
    return "the arms' contexts do not differ in their queues: the setting has no effect here"
