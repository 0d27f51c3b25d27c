"""What one rank writes of a recording besides traces and snapshots: its rows, its own file, manifest and status."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from harness import recording
from harness.errors import InputError, UsageError


class RankFiles:
    """`leads` is the rank that writes the manifest: rank 0, or the only one that records.

    status.json belongs to the launcher where there is one. Else it follows from ranks/*.json, and any rank that
    changes its file there brings it up to date: `failed` if any rank says so, with the line of the one that failed
    first, since later failures are often its consequences; `complete` once the leading rank is.
    """

    def __init__(self, directory: Path, rank: int, *, leads: bool) -> None:
        self._directory = directory
        self._rank = rank
        self._leads = leads
        self._owns_status = os.environ.get(recording.LAUNCHED_VARIABLE) != "1"
        self._facts: dict[str, Any] = {"schema_version": recording.SCHEMA_VERSION, "rank": rank}
        self._encode = msgspec.json.Encoder().encode
        path = recording.steps_path(directory, rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._rows = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            raise UsageError(
                f"{directory} already holds a recording of rank {rank}, and none is overwritten: "
                "give each run a new folder, the same for all its ranks, or delete this one"
            ) from None
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
            self._settle()

    def append_step(self, row: recording.StepRow) -> None:
        """One line, in the file when this returns."""
        os.write(self._rows, self._encode(row) + b"\n")

    def write_rank(self, **facts: Any) -> None:
        self._facts.update(facts)
        recording.write_json(recording.rank_path(self._directory, self._rank), self._facts)

    def fail(self) -> None:
        """After `write_rank` said that this rank failed, and why."""
        self._settle()

    def resume(self) -> None:
        """After `write_rank` said that this rank goes on."""
        self._settle()

    def end(self, manifest: Mapping[str, Any], *, failed: bool) -> None:
        """After `write_rank` said how this rank ended."""
        os.close(self._rows)
        if self._leads:
            recording.merge_manifest(self._directory, manifest)
        if self._leads or failed:
            self._settle()

    def _settle(self) -> None:
        """Writes the status that follows from ranks/*.json, and looks again: another rank may have changed its file
        meanwhile, and written a newer status before this one. So whoever writes last has seen the last change."""
        written = None
        while self._owns_status and (status := self._status()) != written:
            recording.write_status(self._directory, *status)
            written = status

    def _status(self) -> tuple[recording.State, str | None]:
        ranks, _ = recording.read_ranks(self._directory)
        failed = [document for document in ranks.values() if document.get("end_state") == "failed"]
        if failed:
            first = min(failed, key=lambda document: document.get("failed_unix_ns") or sys.maxsize)
            return "failed", f"rank {first['rank']}: {first.get('exception')}"
        leading = ranks.get(self._rank if self._leads else 0, {})
        return ("complete" if leading.get("end_state") == "complete" else "running"), None
