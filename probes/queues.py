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
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage  # type: ignore[import-untyped]
from scipy.spatial.distance import squareform  # type: ignore[import-untyped]

from harness.text import counted

Floats = NDArray[np.float64]

INCONSISTENT = "sharing a queue is no consistent relation"
# Pairs that contradict the classes, of those that share a queue by any sign and of all: above it a round says nothing.
MOST_CONTRADICTING, MOST_OF_ALL = 0.25, 0.1
# Rows of a round that must be usable, else it says nothing.
LEAST_ROWS = 0.8
# The interval may be this share of the count; rounds further apart do not measure one thing.
WIDEST_INTERVAL = 0.25
# Streams that the kernel waited for holds up are late in this share of the rows at least, whoever waits.
LEAST_HELD = 0.95
# Of the streams that were late while one waited, the share that were not confirmed when they waited in their turn; and
# of all streams, since a single one is noise that the other pairs outvote.
MOST_UNCONFIRMED, STALL = 1 / 3, 0.1
# A stream of which fewer pairs are known belongs to no class; with fewer of all pairs, a round says nothing.
LEAST_KNOWN, LEAST_PAIRS = 0.5, 0.95


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
    directions agree and contradict the classes; `sharing_pairs`: those that share a queue by any sign; `stalled_rows`:
    waits left out, in which others were late for another reason."""

    count: int | None
    reason: str | None = None
    classes: list[list[int]] = field(default_factory=list)
    asymmetric_pairs: int = 0
    nontransitive_pairs: int = 0
    sharing_pairs: int = 0
    stalled_rows: int = 0


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
    """What one round says, once rows that say nothing are left out."""
    controls = [row for row in found.rows if row.stream is None and row.in_time]
    rows = [row for row in found.rows if row.stream is not None and row.in_time and _waited(row)]
    if not controls or len(rows) < max(2, LEAST_ROWS * streams):
        late = sum(not row.in_time for row in found.rows)
        return RoundResult(
            count=None,
            reason=f"{len(rows)} of {streams} streams can be used"
            + (f"; in {late} cases launching took longer than the kernel waited for" if late else ""),
        )
    held, known = _held(controls, rows)
    votes = _votes(rows, held, streams)
    stalled = _stalled(votes)
    if stalled.sum() > (1 - LEAST_ROWS) * streams:
        return RoundResult(
            count=None,
            stalled_rows=int(stalled.sum()),
            reason=f"{INCONSISTENT}: in {stalled.sum()} of {streams} cases streams were held up by one that they do "
            "not hold up (does another process use the GPU?)",
        )
    votes[stalled] = np.nan
    votes[np.ix_(held, held)] = 1
    votes[~known, :] = votes[:, ~known] = np.nan
    np.fill_diagonal(votes, np.nan)
    return replace(_classify(_agreed(votes)), stalled_rows=int(stalled.sum()))


def _classify(agreed: Floats) -> RoundResult:
    """The classes of pairs that share a queue, by average linkage: two groups are one if most pairs between them say
    so, so that a single pair joins nothing."""
    streams = len(agreed)
    placed = np.flatnonzero(np.isfinite(agreed).sum(axis=1) >= LEAST_KNOWN * (streams - 1))
    if len(placed) < max(2, LEAST_ROWS * streams):
        return RoundResult(count=None, reason=f"the queue of {streams - len(placed)} of {streams} streams is not known")
    agreed = agreed[np.ix_(placed, placed)]
    upper = np.triu_indices(len(placed), 1)
    known = np.isfinite(agreed[upper])
    if known.mean() < LEAST_PAIRS:
        return RoundResult(count=None, reason=f"only {100 * known.mean():.0f} % of the pairs of streams are known")
    distance = np.where(np.isfinite(agreed), 1 - agreed, 0.5)
    np.fill_diagonal(distance, 0)
    labels = fcluster(linkage(squareform(distance), "average"), np.nextafter(0.5, 0), "distance")
    votes, same = agreed[upper][known], (labels[:, None] == labels[None, :])[upper][known]
    asymmetric = votes == 0.5
    nontransitive = ~asymmetric & ((votes == 1) != same)
    classes = sorted([int(number) for number in placed[labels == label]] for label in np.unique(labels))
    result = RoundResult(
        count=len(classes),
        classes=classes,
        asymmetric_pairs=int(asymmetric.sum()),
        nontransitive_pairs=int(nontransitive.sum()),
        sharing_pairs=int(((votes > 0) | same).sum()),
    )
    contradicting = result.asymmetric_pairs + result.nontransitive_pairs
    if contradicting <= min(MOST_CONTRADICTING * result.sharing_pairs, MOST_OF_ALL * len(votes)):
        return result
    reason = (
        f"{INCONSISTENT}: of {result.sharing_pairs} pairs of streams that do by any sign, {result.asymmetric_pairs} do "
        f"in one direction only and {result.nontransitive_pairs} contradict the other pairs (does another process use "
        "the GPU?)"
    )
    return replace(result, count=None, classes=[], reason=reason)


def _waited(row: Row) -> bool:
    """Whether the stream that had to wait did."""
    own = None if row.stream is None else row.ended_ns[row.stream]
    return own is not None and own >= row.released_ns


def _held(controls: Sequence[Row], rows: Sequence[Row]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Streams that were held up in most of the controls and, as the same kernel is waited for, in nearly all rows; and
    those of which the controls say anything."""
    without, beside = _share_late(controls), _share_late(rows)
    return (without > 0.5) & (beside > LEAST_HELD), np.isfinite(without)


def _share_late(rows: Sequence[Row]) -> Floats:
    """For each stream the share of rows in which it was held up, of those that know; NaN where none does."""
    late = np.array([_late(row) for row in rows])
    known = np.isfinite(late).sum(axis=0)
    share: Floats = np.where(known > 0, np.nansum(late, axis=0) / np.maximum(known, 1), np.nan)
    return share


def _late(row: Row) -> list[float]:
    """For each stream 1 if its work ended after the kernel waited for, 0 if before, NaN if that is not known."""
    return [np.nan if ended is None else float(ended >= row.released_ns) for ended in row.ended_ns]


def _votes(rows: Sequence[Row], held: NDArray[np.bool_], streams: int) -> Floats:
    """For each stream and each other: 1 that work of the other was held up while the stream waited, 0 that it was not,
    NaN not known. `held` share the queue of the kernel waited for, which holds them up whoever waits: of those, the
    controls decide."""
    votes = np.full((streams, streams), np.nan)
    for row in rows:
        assert row.stream is not None
        votes[row.stream] = _late(row)
    votes[np.isfinite(votes).any(axis=1)[:, None] & held[None, :]] = 0
    np.fill_diagonal(votes, np.nan)
    return votes


def _stalled(votes: Floats) -> NDArray[np.bool_]:
    """Streams during whose wait others were late that, in their turn, did not hold them up: something held up the
    whole GPU, or the host, for a moment."""
    late = votes == 1
    unconfirmed = (late & (votes.T == 0)).sum(axis=1)
    stalled: NDArray[np.bool_] = unconfirmed > np.maximum(MOST_UNCONFIRMED * late.sum(axis=1), STALL * len(votes))
    return stalled


def _agreed(votes: Floats) -> Floats:
    """For each pair of streams the mean of both directions: 1 share a queue, 0 do not, NaN not known."""
    both = np.stack([votes, votes.T])
    known = np.isfinite(both)
    total = np.where(known, both, 0).sum(axis=0)
    agreed: Floats = np.where(known.any(axis=0), total / np.maximum(known.sum(axis=0), 1), np.nan)
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
