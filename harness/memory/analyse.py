"""Everything `meshscope memory` says, as one object: see `analyse`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.memory.device import DeviceSummary, analyse_device, device_json, summarise, trace_device_json
from harness.memory.snapshot import Snapshot, read_snapshot
from harness.memory.steps import (
    RangePeaks,
    phase_peaks,
    recorded_composition,
    recorded_peaks,
    recorded_phases,
    step_peaks,
)
from harness.memory.trace_events import TraceMemory, read_trace_memory
from harness.recording import is_recording, read_recording
from harness.sources import SourceFile, Sources
from harness.text import counted

SCHEMA_VERSION = 1


@dataclass(slots=True)
class Analysis:
    """What was read from a path: `files` are the JSON items, the rest what text, report and dashboard draw from.

    `compositions`: what the allocated peak of a rank's step consists of, where its row says so (CPU).
    """

    mode: str
    files: list[dict[str, Any]] = field(default_factory=list)
    devices: list[tuple[SourceFile, DeviceSummary]] = field(default_factory=list)
    steps: dict[tuple[int | None, int], RangePeaks] = field(default_factory=dict)
    phases: dict[tuple[int | None, str], RangePeaks] = field(default_factory=dict)
    compositions: dict[tuple[int | None, int], list[dict[str, Any]]] = field(default_factory=dict)
    errors: list[InputError] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The `memory --json` object; a step has a `peak_composition` where its row states one."""
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
                | ({"peak_composition": self.compositions[rank, step]} if (rank, step) in self.compositions else {})
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
    captured: dict[tuple[int, int], Path] = {}
    silent = 0
    for source in sources.traces:
        if source.rank is not None and source.rank in with_snapshot:
            continue
        try:
            memory = read_trace_memory(source.path)
        except InputError as error:
            analysis.errors.append(error)
            continue
        if memory.devices:
            _add_trace(source, memory, analysis, stepped, captured)
        silent += not memory.devices
    if not (analysis.files or analysis.steps):
        analysis.errors += _nothing_found(sources, silent, failed=bool(analysis.errors))
    return analysis


def _nothing_found(sources: Sources, silent: int, *, failed: bool) -> list[InputError]:
    """Says that what was read, `silent` traces among it, holds no memory data; nothing if all that is there failed."""
    if failed and not silent:
        return []
    traces = f"{counted(silent, 'trace')} without [memory] events (profile_memory=True)" if silent else "no trace"
    rows = "no step row that states an allocated peak" if sources.recording else "no step rows"
    if failed:
        return [InputError(sources.root, f"what else is there holds no memory data: {traces}")]
    return [InputError(sources.root, f"holds no memory data: no snapshot, {rows} and {traces}")]


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
            if (composition := recorded_composition(row)) is not None:
                analysis.compositions[rank, step] = composition
            for phase, phase_peaks_ in recorded_phases(row).items():
                _merge(analysis.phases, (rank, phase), phase_peaks_)
    return ranks


def _merge(into: dict[Any, RangePeaks], key: Any, peaks: RangePeaks) -> None:
    into[key] = peaks.union(into[key]) if key in into else peaks


def _add_snapshot(source: SourceFile, snapshot: Snapshot, analysis: Analysis, *, with_steps: bool) -> None:
    found = [analyse_device(device) for device in snapshot.devices]
    analysis.devices += [(source, summarise(item)) for item in found]
    analysis.files.append(
        {"rank": source.rank, "file": str(source.path), "devices": [device_json(item) for item in found]}
    )
    timelines = [item.timeline for item in found if item.timeline is not None]
    if with_steps:
        for step, peaks in step_peaks(snapshot, timelines).items():
            _merge(analysis.steps, (source.rank, step), peaks)
        for phase, peaks in phase_peaks(snapshot, timelines).items():
            _merge(analysis.phases, (source.rank, phase), peaks)


def _add_trace(
    source: SourceFile,
    memory: TraceMemory,
    analysis: Analysis,
    stepped: set[int | None],
    captured: dict[tuple[int, int], Path],
) -> None:
    rank = source.rank if memory.rank is None else memory.rank
    devices = [trace_device_json(events, memory.dropped) for events in memory.devices]
    analysis.files.append({"rank": rank, "file": str(source.path), "devices": devices})
    if rank is not None:
        # Two captures of one rank follow each other in time; the same step in both means one is not that rank.
        same = [captured[rank, step] for step in memory.steps if (rank, step) in captured]
        if same:
            analysis.errors.append(InputError(source.path, f"is rank {rank}, as is {same[0]}; both are listed"))
        captured.update({(rank, step): source.path for step in memory.steps})
    if rank not in stepped or rank is None:
        for step, peaks in memory.steps.items():
            _merge(analysis.steps, (rank, step), peaks)
