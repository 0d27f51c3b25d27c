"""Collects what every analysis says about one path. No figure is computed here that an analysis computes."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness import compare, memory
from harness.config import Trainer
from harness.errors import InputError
from harness.ledger import Prediction, predict
from harness.recording import Recording, is_recording, read_recording
from harness.sources import Sources, find_sources
from harness.trace import analyse_captures, read_captures

SCHEMA_VERSION = 1

PEAKS = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes", "peak_requested_bytes", "peak_rss_bytes")


@dataclass(kw_only=True, slots=True)
class Report:
    """`overlap` and `memory` are the objects that those commands print with --json; None where there is no input."""

    path: Path
    mode: str
    recording: Recording | None = None
    config: Trainer.Config | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    overlap: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    prediction: Prediction | None = None
    communication: list[compare.Communication] = field(default_factory=list)
    errors: list[InputError] = field(default_factory=list)

    @property
    def read(self) -> int:
        """How many inputs were readable."""
        files = len(self.overlap["ranks"]) if self.overlap else 0
        files += len(self.memory["files"]) if self.memory else 0
        return files + len(self.ranks)

    def to_json(self) -> dict[str, Any]:
        """The object of `meshscope report --json`; bytes and nanoseconds are integers, unknown is null."""
        status = self.recording.status if self.recording else None
        return {
            "schema_version": SCHEMA_VERSION,
            "mode": self.mode,
            "path": str(self.path),
            "status": {"state": status.state, "reason": status.reason} if status else None,
            "missing_ranks": self.recording.missing_ranks if self.recording else [],
            "steps": self.steps,
            "ranks": self.ranks,
            "overlap": self.overlap,
            "memory": self.memory,
            "ledger": self.prediction.to_json() if self.prediction else None,
            "communication": [asdict(row) for row in self.communication],
            "errors": [error.to_json() for error in self.errors],
        }


def build(path: Path) -> Report:
    """Everything about `path`; raises `InputError` if it holds nothing that can be read."""
    recording = read_recording(path) if path.is_dir() and is_recording(path) else None
    try:
        sources = find_sources(path)
    except InputError:
        # A recording whose windows never opened, or that has just begun, has step rows only.
        if recording is None or not any(recording.steps.values()):
            raise
        sources = Sources(root=path, recording=True, mode=recording.mode or "imported")
    report = Report(path=path, mode=sources.mode, recording=recording)
    if recording is not None:
        report.errors += recording.errors
        report.steps, report.ranks = by_step(recording), by_rank(recording)
        report.config = compare.recorded_config(recording)
    captures, errors = read_captures(sources) if sources.traces or sources.errors else ([], [])
    report.errors += [error for error in errors if error.to_json() not in [e.to_json() for e in report.errors]]
    if captures:
        report.overlap = analyse_captures(captures, errors, sources.mode)
    if sources.snapshots:
        report.memory = memory.analyse(sources)
        report.errors += [InputError(e["file"], e["reason"], e["offset"]) for e in report.memory["errors"]]
    if recording is not None and report.config is not None:
        target = compare.recorded_target(recording) or ("cpu" if recording.mode == "cpu" else "cuda")
        report.prediction = predict(report.config, target)
        compare.put_beside(report.prediction, recording)
    report.communication = compare.communication(report.prediction, captures)
    report.errors = unique(report.errors)
    return report


def unique(errors: list[InputError]) -> list[InputError]:
    """The analyses read the same folder, and each says what it could not read."""
    return list({(error.file, error.reason, error.offset): error for error in errors}.values())


def by_step(recording: Recording) -> list[dict[str, Any]]:
    """One item per step: the slowest rank's time, the values that all ranks share, peaks per rank (bytes)."""
    numbers = sorted({row["step"] for rows in recording.steps.values() for row in rows if "step" in row})
    items = []
    for number in numbers:
        rows = {
            rank: row for rank, rows in sorted(recording.steps.items()) for row in rows if row.get("step") == number
        }
        first = next(iter(rows.values()))
        items.append(
            {
                "step": number,
                "wall_ns": max((row["wall_ns"] for row in rows.values() if row.get("wall_ns")), default=None),
                "loss": first.get("loss"),
                "grad_norm": first.get("grad_norm"),
                "tokens_per_s": first.get("tokens_per_s"),
                "tflops_per_s": first.get("tflops_per_s"),
                "mfu_pct": first.get("mfu_pct"),
                "memory_source": first.get("memory_source"),
                "ranks": {rank: {peak: row.get(peak) for peak in PEAKS} for rank, row in rows.items()},
                "tags": first.get("tags", []),
            }
        )
    return items


def by_rank(recording: Recording) -> list[dict[str, Any]]:
    """One item per rank: the median time of its steps without the first and the profiled ones, its highest peaks."""
    items = []
    for rank, rows in sorted(recording.steps.items()):
        plain = [
            row["wall_ns"]
            for row in rows[1:]
            if row.get("wall_ns") and not {"profiled", "memory_history"} & set(row.get("tags") or ())
        ]
        peaks = {peak: max((row[peak] for row in rows if row.get(peak) is not None), default=None) for peak in PEAKS}
        phases: dict[str, int] = {}
        for row in rows:
            for name, phase in (row.get("phases") or {}).items():
                if phase.get("peak_allocated_bytes") is not None:
                    phases[name] = max(phases.get(name, 0), phase["peak_allocated_bytes"])
        items.append(
            {
                "rank": rank,
                "steps": len(rows),
                "median_step_wall_ns": int(statistics.median(plain)) if plain else None,
                **peaks,
                "peak_allocated_bytes_by_phase": phases,
            }
        )
    return items
