"""What `meshscope memory` prints: one block per file and device, then the table that `--by` asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from harness.memory.analyse import Analysis
from harness.memory.composition import Share
from harness.memory.device import DeviceSummary
from harness.memory.steps import RangePeaks
from harness.text import size

By = Literal["step", "phase", "category", "site"]
_SITES_SHOWN = 10


def report(analysis: Analysis, by: By | None) -> str:
    """The whole text: sizes as `harness.text.size` writes them, n/a where a value is unknown."""
    replayed = {(str(source.path), item.index): item for source, item in analysis.devices}
    lines: list[str] = []
    for file in analysis.files:
        rank = "rank unknown" if file["rank"] is None else f"rank {file['rank']}"
        lines += [f"{file['file']}  ({rank}, {analysis.mode})"]
        if not file["devices"]:
            lines += ["  holds neither segments nor events"]
        for device in file["devices"]:
            lines += _device_lines(device, replayed.get((file["file"], device["device"])), by)
        lines += [""]
    if by in (None, "step"):
        lines += _range_table("peaks per step", "step", [(r, str(s), p) for (r, s), p in analysis.steps.items()])
    if by in (None, "phase"):
        rows = [(rank, phase, peaks) for (rank, phase), peaks in analysis.phases.items()]
        lines += _range_table("peaks per phase", "phase", rows)
    if by in ("step", "phase") and not (analysis.steps if by == "step" else analysis.phases):
        lines += [f"no {by} is named in this input"]
    return "\n".join(lines).rstrip()


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
    for note in device["notes"]:
        yield f"    note: {note}"


def _stacking_lines(stacking: dict[str, Any], item: DeviceSummary | None) -> Iterator[str]:
    if stacking["blocks"] is None:
        at_end = stacking["pending_at_end_bytes"]
        yield f"    stacking  n/a{'' if at_end is None else f', {size(at_end)} pending at the end'}"
        return
    seconds = stacking["byte_seconds"]
    yield (
        f"    stacking  {stacking['blocks']} blocks, at most {size(stacking['max_pending_bytes'])} pending at an "
        f"allocation, {size(stacking['pending_at_end_bytes'])} at the end, "
        f"{'n/a' if seconds is None else f'{seconds / (1 << 30):.4f}'} GiB·s"
    )
    if item is None or not item.stacking.sites:
        return
    sites = item.stacking.sites
    for site in sites[:_SITES_SHOWN]:
        yield f"      {size(site.bytes):>14} {site.blocks:>7} blocks  {site.site}  (stream {site.stream})"
    yield from _omitted(len(sites) - _SITES_SHOWN, "sites")


def _shares(title: str, shares: Sequence[Share], limit: int | None) -> Iterator[str]:
    yield f"    {title}"
    for share in shares[:limit]:
        yield f"      {size(share.bytes):>14} {share.blocks:>7} blocks  {share.name}"
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
