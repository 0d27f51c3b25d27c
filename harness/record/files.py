"""What one rank writes of a recording besides traces and snapshots: its rows, its own file, manifest and status."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from harness import recording
from harness.errors import InputError, UsageError


class RankFiles:
    """`leads` is the rank that writes the manifest: rank 0, or the only one that records.

    status.json belongs to the launcher where there is one. Else the leading rank keeps it, and any rank may turn it
    to `failed`; the first reason stays, since later ones are often its consequences.
    """

    def __init__(self, directory: Path, rank: int, *, leads: bool) -> None:
        self._directory = directory
        self._rank = rank
        self._leads = leads
        self._owns_status = os.environ.get(recording.LAUNCHED_VARIABLE) != "1"
        self._facts: dict[str, Any] = {"schema_version": recording.SCHEMA_VERSION, "rank": rank}
        path = recording.steps_path(directory, rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._rows = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            raise UsageError(f"{directory} already holds a recording of rank {rank}: choose another folder") from None
        except OSError as error:
            raise InputError(path, f"cannot be written: {error.strerror}") from None

    def start(self, manifest: Mapping[str, Any], **facts: Any) -> None:
        """What a launcher planned stays: `manifest` only fills in what is not there."""
        self.write_rank(**facts)
        if self._leads:
            path = recording.manifest_path(self._directory)
            planned = recording.read_json(path) if path.exists() else {}
            new = {name: value for name, value in manifest.items() if planned.get(name) is None}
            recording.merge_manifest(self._directory, {"run_id": uuid.uuid4().hex, **planned, **new})
            if self._owns_status:
                recording.write_status(self._directory, "running")

    def append_step(self, row: Mapping[str, Any]) -> None:
        """One line, in the file when this returns."""
        os.write(self._rows, msgspec.json.encode(row) + b"\n")

    def write_rank(self, **facts: Any) -> None:
        self._facts.update(facts)
        recording.write_json(recording.rank_path(self._directory, self._rank), self._facts)

    def fail(self, reason: str) -> None:
        if self._owns_status and self._status() != "failed":
            recording.write_status(self._directory, "failed", f"rank {self._rank}: {reason}")

    def resume(self) -> None:
        if self._owns_status and self._leads:
            recording.write_status(self._directory, "running")

    def end(self, manifest: Mapping[str, Any], *, failed: bool) -> None:
        os.close(self._rows)
        if not self._leads:
            return
        recording.merge_manifest(self._directory, manifest)
        if self._owns_status and not failed and self._status() != "failed":
            recording.write_status(self._directory, "complete")

    def _status(self) -> recording.State | None:
        try:
            return recording.read_status(self._directory).state
        except InputError:  # not written yet, by whichever rank leads
            return None
