"""Everything `meshscope memory` says, as one object: see `analyse`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.memory.composition import composition_by_category
from harness.memory.frames import allocation_site
from harness.memory.replay import Lives, Timeline, final_levels, follow_blocks, history_state, records_requests, replay
from harness.memory.snapshot import Action, Device, Snapshot, read_snapshot
from harness.memory.stacking import Stacking, measure_stacking
from harness.memory.steps import RangePeaks, phase_peaks, recorded_peaks, recorded_phases, step_peaks
from harness.memory.trace_events import DeviceEvents, TraceMemory, read_trace_memory
from harness.recording import is_recording, read_recording
from harness.sources import SourceFile, Sources

SCHEMA_VERSION = 1
_GIB = 1 << 30


@dataclass(slots=True)
class DeviceAnalysis:
    """One device of a snapshot, replayed."""

    device: Device
    timeline: Timeline | None
    lives: Lives
    stacking: Stacking


@dataclass(slots=True)
class Analysis:
    """What was read from a path: `files` are the JSON items, the rest what text, report and dashboard draw from."""

    mode: str
    files: list[dict[str, Any]] = field(default_factory=list)
    devices: list[tuple[SourceFile, DeviceAnalysis]] = field(default_factory=list)
    steps: dict[tuple[int | None, int], RangePeaks] = field(default_factory=dict)
    phases: dict[tuple[int | None, str], RangePeaks] = field(default_factory=dict)
    errors: list[InputError] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The `memory --json` object."""
        return {
            "schema_version": SCHEMA_VERSION,
            "mode": self.mode,
            "files": self.files,
            "steps": [
                {
                    "rank": rank,
                    "step": step,
                    "peak_allocated_bytes": peaks.allocated_bytes,
                    "peak_active_bytes": peaks.active_bytes,
                    "peak_reserved_bytes": peaks.reserved_bytes,
                }
                for (rank, step), peaks in sorted(self.steps.items(), key=lambda item: (item[0][0] or 0, item[0][1]))
            ],
            "errors": [error.to_json() for error in self.errors],
        }


def analyse(sources: Sources) -> dict[str, Any]:
    """The `memory --json` object for snapshots, a recording's step rows and traces with memory events.

    Bytes are integers; what is unknown is null. From a snapshot, base values and the peaks of allocated and active
    are in requested bytes, `final_*` (but `final_requested_bytes`) rounded. Files that cannot be read are in
    `errors`; nothing is raised for them.
    """
    return analyse_sources(sources).to_json()


def analyse_sources(sources: Sources) -> Analysis:
    """`analyse`, with the replayed devices. Per rank, steps come from the recording's rows where there are any,
    else from the ranges of its snapshots, else from the memory events of its traces."""
    analysis = Analysis(sources.mode, errors=list(sources.errors))
    _report_doubles(sources.snapshots, analysis.errors)
    stepped = _add_step_rows(sources.root, analysis)
    with_snapshot = set()
    for source in sources.snapshots:
        try:
            snapshot = read_snapshot(source.path)
        except InputError as error:
            analysis.errors.append(error)
            continue
        with_snapshot.add(source.rank)
        _add_snapshot(source, snapshot, analysis, with_steps=source.rank not in stepped)
    for source in sources.traces:
        if source.rank is not None and source.rank in with_snapshot:
            continue
        try:
            memory = read_trace_memory(source.path)
        except InputError as error:
            analysis.errors.append(error)
            continue
        if memory.devices:
            _add_trace(source, memory, analysis, stepped)
    if not (analysis.files or analysis.steps or analysis.errors):
        reason = "holds no memory data: no snapshot, no step rows and no [memory] events (profile_memory=True)"
        analysis.errors.append(InputError(sources.root, reason))
    return analysis


def _report_doubles(files: list[SourceFile], errors: list[InputError]) -> None:
    """Two captures of one rank at the same moment: one of them is probably not what its name says."""
    seen: dict[tuple[int, int | None, bool], Path] = {}
    for file in files:
        if file.rank is None:
            continue
        key = (file.rank, file.iteration, file.path.parent.name.endswith("_exit"))
        if key in seen:
            errors.append(InputError(file.path, f"is rank {file.rank}, as is {seen[key]}; both are listed"))
        seen.setdefault(key, file.path)


def _add_step_rows(root: Path, analysis: Analysis) -> set[int | None]:
    """Peaks a recording's own rows state; returns the ranks that have some."""
    if not (root.is_dir() and is_recording(root)):
        return set()
    recording = read_recording(root)
    analysis.errors += recording.errors
    ranks: set[int | None] = set()
    for rank, rows in recording.steps.items():
        for row in rows:
            step = row.get("step")
            peaks = recorded_peaks(row)
            if type(step) is not int or peaks == RangePeaks(None, None, None):
                continue
            ranks.add(rank)
            _merge(analysis.steps, (rank, step), peaks)
            for phase, phase_peaks_ in recorded_phases(row).items():
                _merge(analysis.phases, (rank, phase), phase_peaks_)
    return ranks


def _merge(into: dict[Any, RangePeaks], key: Any, peaks: RangePeaks) -> None:
    into[key] = peaks.union(into[key]) if key in into else peaks


def analyse_device(device: Device) -> DeviceAnalysis:
    """Replays one device of a snapshot."""
    timeline = replay(device)
    lives = follow_blocks(device)
    return DeviceAnalysis(device, timeline, lives, measure_stacking(device, timeline, lives))


def _add_snapshot(source: SourceFile, snapshot: Snapshot, analysis: Analysis, *, with_steps: bool) -> None:
    found = [analyse_device(device) for device in snapshot.devices]
    analysis.devices += [(source, item) for item in found]
    analysis.files.append(
        {"rank": source.rank, "file": str(source.path), "devices": [_device_json(item) for item in found]}
    )
    timelines = [item.timeline for item in found if item.timeline is not None]
    if with_steps:
        for step, peaks in step_peaks(snapshot, timelines).items():
            _merge(analysis.steps, (source.rank, step), peaks)
        for phase, peaks in phase_peaks(snapshot, timelines).items():
            _merge(analysis.phases, (source.rank, phase), peaks)


def _device_json(item: DeviceAnalysis) -> dict[str, Any]:
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
        "stacking": stacking_json(stacking),
        "peak_composition": None
        if composition is None
        else [{"category": share.name, "bytes": share.bytes} for share in composition],
        "oom": _ooms(device, timeline),
        "notes": _notes(item),
    }


def stacking_json(stacking: Stacking) -> dict[str, Any]:
    """The `stacking` item: sites over all streams, largest first."""
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
