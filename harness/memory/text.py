"""What `meshscope memory` prints: one block per file and device, then the table that `--by` asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from harness.memory.analyse import Analysis
from harness.memory.composition import Share
from harness.memory.device import DeviceSummary
from harness.memory.steps import RangePeaks
from harness.text import byte_seconds, counted, printable, size, table

By = Literal["step", "phase", "category", "site"]
_SITES_SHOWN = 10
_RANKS_SHOWN = 8


def report(analysis: Analysis, by: By | None) -> str:
    """The whole text: sizes as `harness.text.size` writes them, n/a where a value is unknown, each note once."""
    replayed = {(str(source.path), item.index): item for source, item in analysis.devices}
    lines: list[str] = []
    notes: dict[str, list[str]] = {}
    for file in analysis.files:
        rank = "rank unknown" if file["rank"] is None else f"rank {file['rank']}"
        lines += [f"{file['file']}  ({rank}, {analysis.mode})"]
        if not file["devices"]:
            lines += ["  holds neither segments nor events"]
        for device in file["devices"]:
            lines += _device_lines(device, replayed.get((file["file"], device["device"])), by)
            for note in device["notes"]:
                notes.setdefault(note, []).append("?" if file["rank"] is None else str(file["rank"]))
        lines += [""]
    if notes:
        lines += [*_notes(notes, sum(len(file["devices"]) for file in analysis.files)), ""]
    if by in (None, "category"):
        lines += _recorded_categories(analysis)
    if by in (None, "step"):
        lines += _range_table("peaks per step", "step", [(r, str(s), p) for (r, s), p in analysis.steps.items()])
    if by in (None, "phase"):
        rows = [(rank, phase, peaks) for (rank, phase), peaks in analysis.phases.items()]
        lines += _range_table("peaks per phase", "phase", rows)
    lines += _missing(analysis, by)
    return "\n".join(map(printable, lines)).rstrip()


def _missing(analysis: Analysis, by: By | None) -> Iterator[str]:
    """Says that what `by` asks for is not there, and what would state it."""
    replayed = any(item.timeline is not None for _, item in analysis.devices)
    if by in ("step", "phase") and not (analysis.steps if by == "step" else analysis.phases):
        yield f"no {by} is named in this input"
    if by == "category" and not (replayed or analysis.compositions):
        yield "no category is known: neither an allocator snapshot with a history nor a tracked step row is there"
    if by == "site" and not replayed:
        yield "no allocation site is known: only allocator snapshots with a history (CUDA) tell where memory came from"


def _notes(notes: dict[str, list[str]], devices: int) -> Iterator[str]:
    """Each note once; with the ranks that it is about where there are several devices."""
    for note, ranks in notes.items():
        where = "all" if len(ranks) == devices else f"rank {', '.join(dict.fromkeys(ranks))}"
        yield f"note: {note}" if devices == 1 else f"note ({where}): {note}"


def _recorded_categories(analysis: Analysis) -> Iterator[str]:
    """What step rows say of each rank's highest peak, ranks beside each other."""
    highest: dict[int | None, int] = {}
    for rank, step in analysis.compositions:
        peak = analysis.steps[rank, step].allocated_bytes or 0
        if rank not in highest or peak > (analysis.steps[rank, highest[rank]].allocated_bytes or 0):
            highest[rank] = step
    if not highest:
        return
    shown = list(highest.items())[:_RANKS_SHOWN]
    shares = {rank: {i["category"]: i["bytes"] for i in analysis.compositions[rank, step]} for rank, step in shown}
    names = sorted({name for found in shares.values() for name in found}, key=lambda n: -_total(shares, n))
    rows = [[name, *(size(shares[rank].get(name, 0)) for rank, _ in shown)] for name in names]
    yield "allocated peak by category, of the step with each rank's highest (step rows)"
    yield from table(["category", *(f"rank {rank}, step {step}" for rank, step in shown)], rows)
    if len(highest) > len(shown):
        yield f"  … and {counted(len(highest) - len(shown), 'more rank')}: --json"
    yield ""


def _total(shares: dict[int | None, dict[str, int]], name: str) -> int:
    return sum(found.get(name, 0) for found in shares.values())


def _device_lines(device: dict[str, Any], item: DeviceSummary | None, by: By | None) -> Iterator[str]:
    yield f"  device {device['device']}   history {device['history']}, base {size(device['base_allocated_bytes'])}"
    yield f"    {'':10}{'allocated':>14}{'active':>14}{'reserved':>14}{'requested':>14}"
    for when in ("peak", "final"):
        sizes = [size(device[f"{when}_{what}_bytes"]) for what in ("allocated", "active", "reserved", "requested")]
        yield f"    {when:10}" + "".join(f"{each:>14}" for each in sizes)
    yield from _stacking_lines(device["stacking"], item)
    for oom in device["oom"]:
        yield (
            f"    OOM: {size(oom['size_bytes'])} asked, {size(oom['device_free_bytes'])} free on the device, "
            f"{size(oom['reserved_bytes'])} reserved, at {oom['site']}"
        )
    if item is not None and item.timeline is not None:
        if by in (None, "category"):
            yield from _shares("allocated peak by category", item.by_category, limit=None)
        if by == "site":
            yield from _shares("allocated peak by allocation site", item.by_site, limit=_SITES_SHOWN)


def _stacking_lines(stacking: dict[str, Any], item: DeviceSummary | None) -> Iterator[str]:
    if stacking["blocks"] is None:
        at_end = stacking["pending_at_end_bytes"]
        yield f"    stacking  n/a{'' if at_end is None else f', {size(at_end)} pending at the end'}"
        return
    if not (stacking["blocks"] or stacking["max_pending_bytes"] or stacking["pending_at_end_bytes"]):
        yield "    stacking  none"
        return
    yield (
        f"    stacking  {counted(stacking['blocks'], 'block')}, at most {size(stacking['max_pending_bytes'])} pending "
        f"at an allocation, {size(stacking['pending_at_end_bytes'])} at the end, "
        f"{byte_seconds(stacking['byte_seconds'])}"
    )
    if item is None:
        return
    sites = item.stacking.sites
    for site in sites[:_SITES_SHOWN]:
        yield f"      {size(site.bytes):>14} {counted(site.blocks, 'block'):>14}  {site.site}  (stream {site.stream})"
    yield from _omitted(len(sites) - _SITES_SHOWN, "sites")
    if not sites and item.pending:  # nothing in the history shows that any of it became reusable
        yield from _shares("pending when most was, by allocation site", item.pending, limit=_SITES_SHOWN)


def _shares(title: str, shares: Sequence[Share], limit: int | None) -> Iterator[str]:
    yield f"    {title}"
    for share in shares[:limit]:
        yield f"      {size(share.bytes):>14} {counted(share.blocks, 'block'):>14}  {share.name}"
    if limit is not None:
        yield from _omitted(len(shares) - limit, "sites")


def _omitted(count: int, what: str) -> Iterator[str]:
    if count > 0:
        yield f"      … and {count} more {what}"


def _range_table(title: str, column: str, rows: Sequence[tuple[int | None, str, RangePeaks]]) -> Iterator[str]:
    if not rows:
        return
    yield title
    yield f"  {'rank':>6}{column:>12}{'allocated':>14}{'active':>14}{'reserved':>14}"
    ordered = sorted(rows, key=lambda row: (row[0] or 0, int(row[1]) if row[1].isdecimal() else -1))
    for rank, name, peaks in ordered:
        sizes = (peaks.allocated_bytes, peaks.active_bytes, peaks.reserved_bytes)
        yield f"  {'?' if rank is None else rank:>6}{name:>12}" + "".join(f"{size(each):>14}" for each in sizes)
    yield ""
