"""Everything that was measured at one path, read once: step rows, traces and snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import memory
from harness.compare.against_ledger import config_errors
from harness.compare.standing import Standing, standing
from harness.compare.steps import by_rank, by_step
from harness.errors import InputError
from harness.recording import Recording, is_recording, read_recording, steps_path
from harness.sources import Sources, find_sources
from harness.trace import Capture, analyse_captures, complete, read_captures

Reader = Callable[[Sources], tuple[list[Capture], list[InputError]]]


@dataclass(kw_only=True, slots=True)
class Measured:
    """`overlap` and `memory` are the objects that those commands print with --json, None where there is no input;
    `captures` and `snapshots` are what they were made of. `complete_captures` and `complete_overlap` are the same
    without the steps that a trace holds in part: means are made of these. `steps` and `ranks` are empty without step
    rows."""

    path: Path
    mode: str
    recording: Recording | None = None
    standing: Standing | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    complete_captures: list[Capture] = field(default_factory=list)
    snapshots: memory.Analysis | None = None
    overlap: dict[str, Any] | None = None
    complete_overlap: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    errors: list[InputError] = field(default_factory=list)

    @property
    def read(self) -> int:
        """How many inputs were readable."""
        files = len(self.overlap["ranks"]) if self.overlap else 0
        files += len(self.memory["files"]) if self.memory else 0
        return files + len(self.ranks)


def measure(path: Path, read: Reader = read_captures) -> Measured:
    """Reads a recording, a folder of traces and snapshots, or one file; `read` reads the traces.

    Raises `InputError` if there is nothing to read; files that cannot be read are in `errors`. A recording in which
    nothing was measured is returned, with its `standing` and an error that says it.
    """
    recording = read_recording(path) if path.is_dir() and is_recording(path) else None
    try:
        sources = find_sources(path)
    except InputError:
        # A recording whose windows never opened, or that has just begun, has step rows at most.
        if recording is None:
            raise
        sources = Sources(root=path, recording=True, mode=recording.mode or "imported")
    found = Measured(path=path, mode=sources.mode, recording=recording)
    if recording is not None:
        found.standing = standing(recording)
        found.errors += recording_errors(recording, found.standing) + config_errors(recording)
        found.steps = by_step(recording)
        found.ranks = by_rank(recording, found.steps)
    errors = sources.errors
    if sources.traces and found.mode != "rehearsal":  # what they show of communication did not happen
        found.captures, errors = read(sources)
    found.errors += errors
    if found.captures:
        found.overlap = found.complete_overlap = analyse_captures(found.captures, errors, sources.mode)
        found.complete_captures = complete(found.captures)
        if any(capture.incomplete for capture in found.captures):
            whole = found.complete_captures
            found.complete_overlap = analyse_captures(whole, errors, sources.mode) if whole else None
    if sources.snapshots:
        found.snapshots = memory.analyse_sources(sources)
        found.memory = found.snapshots.to_json()
        found.errors += found.snapshots.errors
    found.errors = unique(found.errors)
    return found


def recording_errors(recording: Recording, stands: Standing) -> list[InputError]:
    """What could not be read. Where no rank has a step, one line says why instead of one for each rank."""
    if not stands.before_first_step:
        return recording.errors
    rows = {str(steps_path(recording.directory, rank)) for rank in recording.missing_ranks}
    others = [error for error in recording.errors if error.file not in rows or error.offset is not None]
    return [InputError(recording.directory, "; ".join([stands.headline(), *stands.details()])), *others]


def unique(errors: list[InputError]) -> list[InputError]:
    """The analyses read the same folder, and each says what it could not read."""
    return list({(error.file, error.reason, error.offset): error for error in errors}.values())
