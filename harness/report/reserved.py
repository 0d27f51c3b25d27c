"""Reserved bytes that nothing could use: how many, where, and what another setting would have reserved."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.allocator import Settings
from harness.allocator.conf import describe
from harness.errors import InputError
from harness.memory import DeviceSummary, Timeline, read_snapshot
from harness.report.finding import Finding, ranks_text
from harness.report.findings_memory import STACKED_BYTES, devices
from harness.sources import SourceFile
from harness.text import MIB, counted, size
from harness.whatif.analyse import UNANSWERABLE, DeviceAnswer, Question, answer
from harness.whatif.measure import PoolBytes
from harness.whatif.recorded import recorded_settings
from harness.whatif.text import pool_text

if TYPE_CHECKING:
    from harness.report.build import Report

# Unused at the reserved peak and worth a word: percent of what is reserved then, and bytes.
UNUSED_PCT = 5.0
UNUSED_BYTES = 256 * MIB
UNUSED_MEDIUM_PCT = 20.0
# What another setting saves of what was reserved and is worth trying, percent.
SAVED_PCT = 1.0
SAVED_MEDIUM_PCT = 5.0
# Without a history: reserved above the active peak, percent of that.
ABOVE_ACTIVE_PCT = 20.0

EVENTS_REPLAYED = 40_000
"""Of a history: about 30 µs each, reading the snapshot again included; twice that where blocks wait for a stream."""
BEGINNING_PCT = 3.3
"""How far off expandable segments came out where a history starts in the middle (docs/whatif.md)."""
POOLS_SHOWN = 3
USUAL_CONF = "expandable_segments:True"
NOT_WAITING = "freed blocks reusable at once"


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """The reserved peak (bytes) under another `condition`, and its change. `doubt_bytes`: how far off both may be for
    want of the history's beginning, 0 with a complete one. `name`: of the condition, in evidence."""

    name: str
    condition: str
    reserved_bytes: int
    change_bytes: int
    doubt_bytes: int

    @property
    def is_told(self) -> bool:
        """Whether the change is beyond doubt."""
        return not self.doubt_bytes or abs(self.change_bytes) > self.doubt_bytes

    @property
    def saved_pct(self) -> float:
        """Of what was reserved; 0 in doubt."""
        return -100 * self.change_bytes / (self.reserved_bytes - self.change_bytes) if self.is_told else 0.0

    def words(self) -> str:
        about = "about " if self.doubt_bytes else ""
        return f"with {self.condition} {about}{size(self.reserved_bytes)} would have been reserved"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unused:
    """What the device of a snapshot had reserved at its peak, and what of that was unused (bytes). `pools`: those of
    that moment; `predicted`: what was tried instead, with `conf` first. Both are empty where the history was not
    replayed. `snapshots`: how many were compared."""

    rank: int | None
    file: Path
    events: int
    reserved_bytes: int
    unused_bytes: int
    snapshots: int = 1
    conf: str = USUAL_CONF
    pools: list[PoolBytes] = field(default_factory=list)
    predicted: list[Predicted] = field(default_factory=list)

    @property
    def is_clear(self) -> bool:
        return self.unused_bytes >= UNUSED_BYTES and 100 * self.unused_bytes >= UNUSED_PCT * self.reserved_bytes

    @property
    def pending_bytes(self) -> int | None:
        return sum(pool.pending_bytes for pool in self.pools) if self.pools else None


def unused_of(report: Report) -> Unused | None:
    """Of the snapshot with the most unused bytes at its reserved peak; None where that is little.

    Reads that snapshot again and replays it, unless its history is longer than `EVENTS_REPLAYED`.
    """
    found = [
        (_as_recorded(source, item.timeline), item)
        for source, item in (report.snapshots.devices if report.snapshots else ())
        if item.timeline is not None
    ]
    clear = [pair for pair in found if pair[0].is_clear]
    if not clear:
        return None
    unused, device = max(clear, key=lambda pair: pair[0].unused_bytes)
    if unused.events <= EVENTS_REPLAYED:
        unused = _replayed(unused, device)
    return replace(unused, snapshots=len(found)) if unused.is_clear else None


def _as_recorded(source: SourceFile, timeline: Timeline) -> Unused:
    """At the fullest of equal peaks; what blocks are rounded up by counts as unused."""
    reserved = timeline.peak("reserved").bytes
    levels = [int(level) for level in timeline.allocated[timeline.reserved == reserved]]
    if timeline.base_reserved == reserved:
        levels.append(timeline.base_allocated)
    return Unused(
        rank=source.rank,
        file=source.path,
        events=len(timeline.reserved),
        reserved_bytes=reserved,
        unused_bytes=reserved - max(levels),
    )


def _replayed(recorded: Unused, device: DeviceSummary) -> Unused:
    """With pools and predictions; as it was where the model does not reproduce it."""
    try:
        snapshot = read_snapshot(recorded.file)
        snapshot.devices = [one for one in snapshot.devices if one.index == device.index]
        settings = recorded_settings(snapshot)
        if settings.memory_fraction != 1:
            return recorded  # a fraction of a memory that only the user can state
        conf, other = _other(settings)
        (found,) = answer(snapshot, Question(confs=[(conf, other)]))
        itself = found.rows[0].outcome
        name = "expandable_segments" if other.expandable_segments else "without_expandable_segments"
        predicted = [_predicted(name, conf, found)]
        if (device.stacking.max_pending_bytes or 0) >= STACKED_BYTES:
            (reusable,) = answer(snapshot, Question(without_pending=True))
            predicted.append(_predicted("without_pending", NOT_WAITING, reusable))
    except (InputError, *UNANSWERABLE):
        return recorded
    if not found.fidelity.exact:
        return recorded
    return replace(recorded, conf=conf, unused_bytes=itself.unused_bytes, pools=itself.pools, predicted=predicted)


def _other(recorded: Settings) -> tuple[str, Settings]:
    """The recorded settings with expandable segments, or without where they had them; as text, too."""
    expandable = f"expandable_segments:{not recorded.expandable_segments}"
    rest = replace(recorded, expandable_segments=False)
    conf = expandable if rest == Settings() else f"{describe(rest)},{expandable}"
    return conf, replace(rest, expandable_segments=not recorded.expandable_segments)


def _predicted(name: str, condition: str, found: DeviceAnswer) -> Predicted:
    """The last row, by its difference to the recorded settings from the same beginning."""
    recorded, last = found.rows[0].outcome.peak_reserved_bytes, found.rows[-1]
    base = found.rows[last.against or 0].outcome.peak_reserved_bytes
    change = last.outcome.peak_reserved_bytes - base
    doubt = max(abs(base - recorded), int(BEGINNING_PCT * recorded / 100)) if last.start == "afresh" else 0
    return Predicted(
        name=name,
        condition=condition,
        reserved_bytes=recorded + change,
        change_bytes=change,
        doubt_bytes=doubt,
    )


def reserved_findings(report: Report) -> Iterator[Finding]:
    """Memory that the allocator holds and cannot give out: where a history shows it, else by the peaks of steps."""
    if report.unused is not None:
        yield of_snapshot(report.unused)
    else:
        yield from above_active(report)


def of_snapshot(unused: Unused) -> Finding:
    title = f"{size(unused.unused_bytes)} of {size(unused.reserved_bytes)} reserved were unused at the peak"
    if (unused.pending_bytes or 0) >= STACKED_BYTES:
        title += f", {size(unused.pending_bytes)} of it freed and waiting for a stream"
    told = sorted((item for item in unused.predicted if item.is_told), key=lambda item: item.reserved_bytes)
    if told:
        title += f"; {told[0].words()} (predicted)"
    doubt = max((item.doubt_bytes for item in unused.predicted), default=0)
    pools = [pool_text(pool) for pool in unused.pools if pool.unused_bytes][:POOLS_SHOWN]
    where = ranks_text([unused.rank])
    if unused.snapshots > 1:
        where += f", the most of {unused.snapshots} snapshots"
    much = 100 * unused.unused_bytes >= UNUSED_MEDIUM_PCT * unused.reserved_bytes
    return Finding(
        severity="medium" if much or any(item.saved_pct >= SAVED_MEDIUM_PCT for item in told) else "low",
        title=title,
        evidence={
            "peak_reserved_bytes": unused.reserved_bytes,
            "unused_bytes": unused.unused_bytes,
            "pending_bytes": unused.pending_bytes,
            **{f"{one.name}_reserved_bytes": one.reserved_bytes for one in told},
            **({"doubt_bytes": doubt} if doubt else {}),
        },
        where="; ".join([where, *pools]),
        advice=" ".join(_advice(unused, told)),
    )


def _advice(unused: Unused, told: list[Predicted]) -> Iterator[str]:
    for one in told[1:]:
        yield f"{one.words()[0].upper()}{one.words()[1:]}."
    worth = [one for one in told if one.saved_pct >= SAVED_PCT]
    if any(one.condition == unused.conf for one in worth):
        yield f"Set PYTORCH_ALLOC_CONF={unused.conf}."
    elif unused.predicted and not worth and len(told) == len(unused.predicted):
        yield "No setting tried would reserve less."
    for one in unused.predicted:
        if not (worth or one.is_told):
            yield (
                f"The history starts in the middle, which leaves a doubt of {size(one.doubt_bytes)}, more than "
                f"{one.condition} would change: record it from the start (--recorder.memory.start 0)."
            )
    command = f"meshscope whatif {shlex.quote(str(unused.file))} --alloc-conf {shlex.quote(unused.conf)}"
    if unused.predicted:
        yield f"{command} has every pool, and other settings."
    else:
        yield f"{command} says what another setting would have reserved ({counted(unused.events, 'event')})."


def above_active(report: Report) -> Iterator[Finding]:
    """By peaks, which need not be of one moment."""
    source = [
        (item["rank"], item["peak_active_bytes"], item["peak_reserved_bytes"])
        for item in report.ranks
        if item["peak_active_bytes"] and item["peak_reserved_bytes"]
    ] or [
        (rank, device["peak_active_bytes"], device["peak_reserved_bytes"])
        for rank, device in devices(report)
        if device["peak_active_bytes"] and device["peak_reserved_bytes"]
    ]
    wasted = [
        item
        for item in source
        if item[2] - item[1] >= UNUSED_BYTES and 100 * (item[2] - item[1]) >= ABOVE_ACTIVE_PCT * item[1]
    ]
    if not wasted:
        return
    _, active, held = max(wasted, key=lambda item: item[2] - item[1])
    yield Finding(
        severity="medium" if 100 * (held - active) >= 1.5 * ABOVE_ACTIVE_PCT * active else "low",
        title=f"{size(held - active)} are reserved above the peak in use (fragmentation)",
        evidence={
            "peak_active_bytes": active,
            "peak_reserved_bytes": held,
            "reserved_above_active_bytes": held - active,
            "reserved_above_active_pct": 100 * (held - active) / active,
        },
        where=ranks_text([item[0] for item in wasted]),
        advice=(
            "PYTORCH_ALLOC_CONF=expandable_segments:True takes some of it back in many runs and adds to it in others: "
            "meshscope probe alloc_conf --mode rehearsal says which it is here, and meshscope whatif from a snapshot."
        ),
    )
