"""For whom a rank waited in each of its collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
