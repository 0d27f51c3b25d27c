"""The same collective on several ranks: how long it took to transfer, and how long each rank waited for the last."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from harness.trace.capture import Capture, CollectiveRecord
from harness.trace.classify import NO_GROUP
from harness.trace.host import GLOO

# Clocks count as aligned if the ends of a collective agree within this, or within 5 % of its duration if that is more.
ALIGNED_NS = 50_000
ALIGNED_SHARE = 0.05
POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})
WAITED_LATER = "sends and receives waited for later are not matched: gloo does not say when they were transferred"


class Matched(NamedTuple):
    """One collective on the ranks that recorded it."""

    group: str | None
    dimension: str
    records: tuple[CollectiveRecord, ...]

    @property
    def transfer_ns(self) -> int:
        """The shortest duration over the ranks: the last rank to arrive does not wait."""
        return min(record.dur_ns for record in self.records)

    @property
    def end_spread_ns(self) -> int:
        ends = [record.start_ns + record.dur_ns for record in self.records]
        return max(ends) - min(ends)


def cross_rank(captures: Sequence[Capture]) -> dict[str, Any]:
    """Transfer and waiting time of every collective that at least two ranks recorded, in ns.

    The k-th collective of a process group is matched over its ranks (by torch's sequence number where the trace has
    it): transfer = the shortest duration, wait = a rank's duration − transfer, last_rank = the one that started last.
    `aligned` says whether the clocks agree (median spread of ends ≤ max(50 µs, 5 % of the median shortest duration)),
    None without a match; if they do not, waits and last ranks are None.
    """
    matched, notes = match(captures)
    on_host = any(device.activity.source == "host" for capture in captures for device in capture.devices)
    if on_host and not all(record.raw_kind.startswith(GLOO) for one in matched for record in one.records):
        notes.append("where gloo's work is not known, durations are those of the calls, not of the transfers")
    aligned = clocks_aligned(matched)
    if aligned is False:
        spread = median(collective.end_spread_ns for collective in matched)
        notes.append(
            f"clocks are not aligned (collectives end {spread / 1e3:.0f} us apart in the median): "
            "waits and last ranks are unknown"
        )
    return {"aligned": aligned, "collectives": [item(one, aligned is True) for one in matched], "notes": notes}


def clocks_aligned(matched: Sequence[Matched]) -> bool | None:
    """Whether ends agree over the ranks; None without a match."""
    if not matched:
        return None
    spread = median(collective.end_spread_ns for collective in matched)
    shortest = median(collective.transfer_ns for collective in matched)
    return spread <= max(ALIGNED_NS, ALIGNED_SHARE * shortest)


def item(collective: Matched, aligned: bool) -> dict[str, Any]:
    transfer = collective.transfer_ns
    last = max(collective.records, key=lambda record: record.start_ns)
    return {
        "kind": common_kind(collective.records),
        "group": collective.group,
        "dimension": collective.dimension,
        "transfer_ns": transfer,
        "wait_ns": {str(r.rank): r.dur_ns - transfer for r in collective.records} if aligned else None,
        "last_rank": last.rank if aligned else None,
    }


def match(captures: Sequence[Capture]) -> tuple[list[Matched], list[str]]:
    """Matched collectives in order of time, and what could not be matched."""
    notes: list[str] = []
    by_group: dict[tuple[Any, ...], dict[int, list[CollectiveRecord]]] = {}
    for capture in captures:
        if capture.rank is None:
            continue
        # Captures of different times hold different collectives.
        time = (capture.file.iteration, capture.order)
        seen: set[tuple[Any, ...]] = set()
        on_host = any(device.activity.source == "host" for device in capture.devices)
        for record in capture.records():
            if on_host and record.kind in POINT_TO_POINT and not record.raw_kind.startswith(GLOO):
                notes.append(f"group {record.group or NO_GROUP}: {WAITED_LATER}")
                continue
            key = (time, record.group, record.ranks)
            ranks = by_group.setdefault(key, {})
            if key not in seen and capture.rank in ranks:
                notes.append(f"rank {capture.rank} has two files of one time: only the first is matched")
                break
            seen.add(key)
            ranks.setdefault(capture.rank, []).append(record)
    matched = []
    for (_, group, members), ranks in by_group.items():
        name = group or NO_GROUP
        if group is None and len(ranks) > 1:
            notes.append("collectives without group data are matched by their order, as if of one group")
        if members is not None and 1 < len(ranks) < len(members):
            notes.append(f"group {name}: {len(ranks)} of its {len(members)} ranks have a trace here")
        known = {record.kind for records in ranks.values() for record in records}
        # An all-to-all without metadata is a send_recv too, on all ranks.
        if max(len(ranks), len(members or ())) > 2 and known & {"send", "recv"}:
            notes.append(f"group {name}: its sends and receives are not matched: no trace says between which ranks")
            ranks = {rank: [r for r in records if r.kind not in POINT_TO_POINT] for rank, records in ranks.items()}
        if len(ranks) > 1:
            matched += match_group(name, group, ranks, notes)
    return sorted(matched, key=lambda one: one.records[0].start_ns), list(dict.fromkeys(notes))


def match_group(
    name: str, group: str | None, ranks: dict[int, list[CollectiveRecord]], notes: list[str]
) -> list[Matched]:
    numbered = all(record.sequence is not None for records in ranks.values() for record in records)
    if numbered:
        by_number = [{(r.sequence, r.kind): r for r in records} for records in ranks.values()]
        numbered = all(len(n) == len(records) for n, records in zip(by_number, ranks.values(), strict=True))
    if numbered:
        shared = [number for number in by_number[0] if all(number in other for other in by_number[1:])]
        rows = [tuple(numbers[number] for numbers in by_number) for number in shared]
    else:
        rows = list(zip(*ranks.values(), strict=False))
    counts = [len(records) for records in ranks.values()]
    if len(rows) < max(counts):
        notes.append(f"group {name}: {len(rows)} collectives are matched of {min(counts)} to {max(counts)} per rank")
    agreeing = [Matched(group, row[0].dimension, row) for row in rows if common_kind(row) is not None]
    if len(agreeing) < len(rows):
        notes.append(f"group {name}: {len(rows) - len(agreeing)} positions hold different kinds of collectives")
    return agreeing


def common_kind(records: Sequence[CollectiveRecord]) -> str | None:
    """The kind all ranks agree on; a send on one rank and a receive on another are a send_recv."""
    kinds = {record.kind for record in records}
    if len(kinds) == 1:
        return kinds.pop()
    return "send_recv" if kinds <= POINT_TO_POINT else None
