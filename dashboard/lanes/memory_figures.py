"""Tables of memory: those of `meshscope memory --json`, and what only a recording's step rows know."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from harness.memory.steps import recorded_composition
from harness.recording import Recording

Row = dict[str, Any]
PEAKS = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes")


def step_rows(memory: Row | None, steps: Sequence[Row], ranks: Collection[int | None]) -> list[Row]:
    """Peaks of each rank and step: of `memory --json`, else of the recording's rows (`harness.compare` `steps`)."""
    if memory is not None:
        rows = [{name: row[name] for name in ("rank", "step", *PEAKS)} for row in memory["steps"]]
    else:
        rows = [
            {"rank": rank, "step": step["step"], **peaks} for step in steps for rank, peaks in step["ranks"].items()
        ]
    return [row for row in rows if row["rank"] in ranks and any(row[name] is not None for name in PEAKS)]


def as_series(rows: Sequence[Row]) -> list[Row]:
    """Step rows as `charts.peaks_per_step` takes them."""
    found: dict[int, Row] = {}
    for row in rows:
        of_step = found.setdefault(row["step"], {"step": row["step"], "ranks": {}})
        of_step["ranks"][row["rank"]] = {name: row[name] for name in PEAKS}
    return [found[step] for step in sorted(found)]


def phase_rows(phases: Sequence[Row], ranks_of_run: Sequence[Row], ranks: Collection[int | None]) -> list[Row]:
    """Peaks of each rank's phases: of its snapshots, else the allocated ones of its step rows."""
    known = {row["rank"] for row in phases}
    rows = [
        {"rank": rank["rank"], "phase": phase, "peak_allocated_bytes": size}
        for rank in ranks_of_run
        if rank["rank"] not in known
        for phase, size in rank["peak_allocated_bytes_by_phase"].items()
    ]
    return [row for row in (*phases, *rows) if row["rank"] in ranks]


def device_rows(memory: Row, files: Collection[str]) -> list[Row]:
    """The peaks and final levels of each device of each file."""
    names = ("device", "history", *PEAKS, "final_allocated_bytes", "final_active_bytes", "final_reserved_bytes")
    return [
        {"rank": file["rank"], **{name: device[name] for name in names}}
        for file in memory["files"]
        if file["file"] in files
        for device in file["devices"]
    ]


def stacking_rows(memory: Row, files: Collection[str]) -> list[Row]:
    names = ("blocks", "max_pending_bytes", "pending_at_end_bytes", "byte_seconds")
    return [
        {"rank": file["rank"], "device": device["device"], **{name: device["stacking"][name] for name in names}}
        for file in memory["files"]
        if file["file"] in files
        for device in file["devices"]
    ]


def site_rows(memory: Row, files: Collection[str]) -> list[Row]:
    return [
        {"rank": file["rank"], **site}
        for file in memory["files"]
        if file["file"] in files
        for device in file["devices"]
        for site in device["stacking"]["sites"]
    ]


def oom_rows(memory: Row, files: Collection[str]) -> list[Row]:
    return [
        {"rank": file["rank"], "device": device["device"], **oom}
        for file in memory["files"]
        if file["file"] in files
        for device in file["devices"]
        for oom in device["oom"]
    ]


def notes_of(memory: Row, files: Collection[str]) -> dict[str, list[int | None]]:
    """What a reader of the figures has to know -> the ranks that it is about."""
    said: dict[str, list[int | None]] = {}
    for file in memory["files"]:
        if file["file"] in files:
            for note in dict.fromkeys(note for device in file["devices"] for note in device["notes"]):
                said.setdefault(note, []).append(file["rank"])
    return said


def residual_rows(recording: Recording, ranks: Collection[int | None]) -> list[Row]:
    """What the driver counts for a rank's process beyond what its allocator reserves, at the step where that is most:
    CUDA context, NCCL's buffers, libraries. A sample is of any moment since the row before, so only steps count that
    reserved the same at their begin, peak and end: the driver's bytes are then beside those that were reserved."""
    found = []
    for rank, rows in sorted(recording.steps.items()):
        known = [
            row
            for before, row in pairwise(rows)
            if whole(row, "nvml_process_bytes")
            and whole(row, "reserved_bytes")
            and before.get("reserved_bytes") == row["reserved_bytes"] == row.get("peak_reserved_bytes")
        ]
        if rank not in ranks or not known:
            continue
        most = max(known, key=lambda row: row["nvml_process_bytes"] - row["reserved_bytes"])
        found.append(
            {
                "rank": rank,
                "step": most["step"],
                "nvml_process_bytes": most["nvml_process_bytes"],
                "reserved_bytes": most["reserved_bytes"],
                "residual_bytes": most["nvml_process_bytes"] - most["reserved_bytes"],
            }
        )
    return found


def recorded_compositions(recording: Recording, ranks: Collection[int | None]) -> list[Row]:
    """Per rank the step with the highest allocated peak of which a row says what it consisted of (CPU): `rank`, `step`,
    `bytes` and `parts`, category -> bytes."""
    found = []
    for rank, rows in sorted(recording.steps.items()):
        known = [
            (row["peak_allocated_bytes"], row["step"], shares)
            for row in rows
            if whole(row, "peak_allocated_bytes") and whole(row, "step") and (shares := recorded_composition(row))
        ]
        if rank in ranks and known:
            peak, step, shares = max(known, key=lambda one: one[0])
            parts = {share["category"]: share["bytes"] for share in shares}
            found.append({"rank": rank, "step": step, "bytes": peak, "parts": parts})
    return found


def whole(row: Mapping[str, Any], name: str) -> bool:
    return type(row.get(name)) is int
