"""One device's entry of the `memory --json` object, from a snapshot or from a trace's memory events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.memory.composition import Share, composition_by_category, composition_by_site, pending_by_site
from harness.memory.frames import allocation_site
from harness.memory.labels import place_blocks
from harness.memory.ranges import phase_of_range, ranges_of, step_of_range
from harness.memory.replay import Lives, Timeline, final_levels, follow_blocks, history_state, records_requests, replay
from harness.memory.snapshot import Action, Device
from harness.memory.stacking import Stacking, measure_stacking
from harness.memory.trace_events import DeviceEvents
from harness.memory.units import UnitBytes, held_bytes, unit_bytes
from harness.text import counted, size

UNITS_NOTE = (
    "base and the allocated and active peaks are in requested bytes (a history records no others); "
    "final allocated, active and reserved are rounded to the allocator's blocks"
)


@dataclass(slots=True)
class DeviceAnalysis:
    """One device of a snapshot, replayed."""

    device: Device
    timeline: Timeline | None
    lives: Lives
    stacking: Stacking
    pending: list[Share]
    """What waited for a stream when most did, by allocation site, at `pending_us`."""
    pending_us: int | None


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """What is worth keeping of a replayed device once its history, hundreds of bytes an event, is let go.

    `holders_known`: the recorder wrote which blocks hold parameters, gradients, optimizer states and buffers.
    `pending`: what waited for a stream when most did, at `pending_us`. `ranges`: (step's number or phase's name, start,
    end in µs; end None for one still open) of the named ranges, in order of their starts.
    """

    index: int
    timeline: Timeline | None
    stacking: Stacking
    by_category: list[Share]
    by_site: list[Share]
    holders_known: bool
    pending: list[Share]
    pending_us: int | None
    ranges: list[tuple[int | str, int, int | None]]
    unit_bytes: UnitBytes
    held_bytes: dict[tuple[str, str], int]


def analyse_device(device: Device) -> DeviceAnalysis:
    """Replays one device of a snapshot."""
    timeline = replay(device)
    lives = follow_blocks(device)
    place_blocks(device, lives)
    stacking = measure_stacking(device, timeline, lives)
    pending, pending_us = pending_by_site(device, timeline, lives) if timeline else ([], None)
    return DeviceAnalysis(device, timeline, lives, stacking, pending, pending_us)


def summarise(item: DeviceAnalysis) -> DeviceSummary:
    """The curves, the stacking and what the allocated peak and most pending consisted of (empty without a history)."""
    device, timeline, lives = item.device, item.timeline, item.lives
    by_category = composition_by_category(device, timeline, lives) if timeline else []
    by_site = composition_by_site(device, timeline, lives) if timeline else []
    steps = ranges_of(device.annotations, step_of_range)
    phases = ranges_of(device.annotations, phase_of_range)
    return DeviceSummary(
        index=device.index,
        timeline=timeline,
        stacking=item.stacking,
        by_category=by_category,
        by_site=by_site,
        holders_known=bool(device.holders),
        pending=item.pending,
        pending_us=item.pending_us,
        ranges=sorted([*steps, *phases], key=lambda found: found[1]),
        unit_bytes=unit_bytes(device, lives),
        held_bytes=held_bytes(device),
    )


def device_json(item: DeviceAnalysis) -> dict[str, Any]:
    device, timeline, stacking = item.device, item.timeline, item.stacking
    final = final_levels(device)
    active = timeline.peak("active").bytes if timeline else None
    composition = composition_by_category(device, timeline, item.lives) if timeline else None
    return {
        "device": device.index,
        "history": history_state(timeline, item.lives),
        "base_allocated_bytes": timeline.base_allocated if timeline else None,
        # torch counts requested bytes over a block's active life, which is this curve to the byte.
        "peak_requested_bytes": active,
        "peak_allocated_bytes": timeline.peak("allocated").bytes if timeline else None,
        "peak_active_bytes": active,
        "peak_reserved_bytes": timeline.peak("reserved").bytes if timeline else None,
        "final_requested_bytes": final.requested_allocated,
        "final_allocated_bytes": final.allocated,
        "final_active_bytes": final.active,
        "final_reserved_bytes": final.reserved,
        "stacking": stacking_json(stacking, item.pending),
        "peak_composition": None
        if composition is None
        else [{"category": share.name, "bytes": share.bytes} for share in composition],
        "oom": _ooms(device, timeline),
        "notes": _notes(item),
    }


def stacking_json(stacking: Stacking, pending: Sequence[Share]) -> dict[str, Any]:
    """The `stacking` item: `sites` of the blocks that stacked over all streams, and `pending_sites` of what was pending
    when most was, blocks included that nothing in the history shows to have become reusable; largest first."""
    sites: dict[str, tuple[int, int]] = {}
    for site in stacking.sites:
        blocks, total = sites.get(site.site, (0, 0))
        sites[site.site] = (blocks + site.blocks, total + site.bytes)
    ordered = sorted(sites.items(), key=lambda item: (-item[1][1], item[0]))
    return {
        "blocks": stacking.blocks,
        "max_pending_bytes": stacking.max_pending_bytes,
        "pending_at_end_bytes": stacking.pending_at_end_bytes,
        "byte_seconds": stacking.byte_seconds,
        "sites": [{"site": site, "blocks": blocks, "bytes": total} for site, (blocks, total) in ordered],
        "pending_sites": [{"site": share.name, "blocks": share.blocks, "bytes": share.bytes} for share in pending],
    }


def _ooms(device: Device, timeline: Timeline | None) -> list[dict[str, Any]]:
    """Failed allocations: the size asked for, what the driver had free, where, and the levels at that moment."""
    history = device.history
    return [
        {
            "size_bytes": history.size[index],
            "device_free_bytes": history.device_free.get(index),
            "site": allocation_site(history.frames[index]),
            "stream": history.stream[index],
            "time_us": None if history.time_us is None else history.time_us[index],
            "allocated_bytes": int(timeline.allocated[index]) if timeline else None,
            "active_bytes": int(timeline.active[index]) if timeline else None,
            "reserved_bytes": int(timeline.reserved[index]) if timeline else None,
        }
        for index, action in enumerate(history.action)
        if action == Action.OOM
    ]


def _notes(item: DeviceAnalysis) -> list[str]:
    device, timeline, lives, history = item.device, item.timeline, item.lives, item.device.history
    if timeline is None:
        notes = ["no history was recorded: peaks, their composition and stacking are unknown"]
    else:
        notes = [UNITS_NOTE, "peak_composition is that of the allocated peak"]
        if history_state(timeline, lives) == "truncated":
            notes.append(
                f"the history begins with {size(timeline.base_allocated)} allocated and "
                f"{size(timeline.base_reserved)} reserved: what was before it, higher peaks too, is not in it"
            )
        pending = timeline.base_active - timeline.base_allocated
        if pending > 0 and records_requests(history):
            notes.append(
                f"{size(pending)} were pending when the history began, freed before it and not reusable yet: part of "
                "active, but what is pending at an allocation is only the part that was left at one in the history"
            )
        if lives.unknown_frees:
            notes.append(f"{counted(lives.unknown_frees, 'free')} of blocks allocated before the history")
        if not records_requests(history):
            notes.append("no free requests are recorded: allocated follows completed frees, stacking is unknown")
        if history.time_us is None:
            notes.append("the events carry no times: byte-seconds and peaks per step are unknown")
        notes += _contradictions(timeline, lives)
    if history.unknown_actions:
        named = ", ".join(f"{name} ({count})" for name, count in sorted(history.unknown_actions.items()))
        notes.append(f"events of unknown kind, not replayed: {named}")
    private = [segment.total_size for segment in device.segments if segment.private_pool]
    if private:
        notes.append(
            f"{counted(len(private), 'segment')} ({size(sum(private))}) in private pools (CUDA graphs, MemPool): "
            "replaying a graph records no events"
        )
    if any(segment.expandable for segment in device.segments) or Action.SEGMENT_MAP in history.action:
        notes.append("expandable segments: reserved follows what is mapped")
    return notes


def _contradictions(timeline: Timeline, lives: Lives) -> list[str]:
    found = []
    if min(timeline.base_allocated, timeline.base_active, timeline.base_reserved) < 0:
        found.append("the level before the history comes out negative: its events and the final segments disagree")
    if lives.unfreed_reuses:
        found.append(
            f"{counted(lives.unfreed_reuses, 'allocation')} of an address that was not freed: frees are missing"
        )
    if lives.missing_at_end:
        found.append(
            f"{counted(lives.missing_at_end, 'block')} never freed in the history, and not in the final segments"
        )
    return found


def trace_device_json(events: DeviceEvents, dropped: int = 0) -> dict[str, Any]:
    """The item of a trace with memory events; allocated and reserved are rounded bytes, active is unknown there.

    Without totals (torch before 1.10) every level is null and the peak above the start is in a note.
    """
    notes = ["from the trace's [memory] events: allocated and reserved as the allocator counts them (rounded)"]
    if dropped:
        notes.append(f"{counted(dropped, 'memory event')} of this file left out: malformed")
    known = len(events.allocated) > 0
    base = int(events.allocated[0]) - events.change_of_first_total if known else None
    if events.without_total:
        notes.append(
            f"{counted(events.without_total, 'event')} without a total: absolute peaks n/a for them; relative peak "
            f"{events.relative_peak_bytes} B above the level at the start"
        )
    has_reserved = known and events.has_reserved
    return {
        "device": events.device,
        "history": "complete" if base == 0 else "truncated",
        "base_allocated_bytes": base,
        "peak_requested_bytes": None,
        "peak_allocated_bytes": int(events.allocated.max()) if known else None,
        "peak_active_bytes": None,
        "peak_reserved_bytes": int(events.reserved.max()) if has_reserved else None,
        "final_requested_bytes": None,
        "final_allocated_bytes": int(events.allocated[-1]) if known else None,
        "final_active_bytes": None,
        "final_reserved_bytes": int(events.reserved[-1]) if has_reserved else None,
        "stacking": {
            "blocks": None,
            "max_pending_bytes": None,
            "pending_at_end_bytes": None,
            "byte_seconds": None,
            "sites": [],
            "pending_sites": [],
        },
        "peak_composition": None,
        "oom": [],
        "notes": notes,
    }
