"""How long ranks waited in their collectives, and for whom."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from harness.trace import Capture
from harness.trace.cross_rank import clocks_aligned, match


class Wait(NamedTuple):
    """`wait_ns`: duration on this rank less the shortest over the ranks; `last_rank` started last."""

    wait_ns: int
    last_rank: int | None


def waits_of(captures: Sequence[Capture], capture: Capture) -> dict[tuple[int, int], Wait]:
    """(Start in unix ns, duration in ns) of each collective of `capture` that other ranks recorded too → who was waited
    for; empty where clocks do not agree, as in `harness.trace.cross_rank`."""
    matched, _ = match(captures)
    if not clocks_aligned(matched):
        return {}
    found = {}
    for one in matched:
        last = max(one.records, key=lambda record: record.start_ns).rank
        for record in one.records:
            if record.rank == capture.rank:
                found[record.start_ns, record.dur_ns] = Wait(record.dur_ns - one.transfer_ns, last)
    return found


def waiting(collectives: Iterable[dict[str, Any]]) -> tuple[float, int]:
    """Waiting (mean over a collective's ranks) and transfer of items of `harness.trace.cross_rank`, both in ns."""
    items = list(collectives)
    return sum(statistics.mean(one["wait_ns"].values()) for one in items), sum(one["transfer_ns"] for one in items)
