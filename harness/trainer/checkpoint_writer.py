"""The files of one checkpoint: written under a name that says unfinished, renamed once all ranks' are on disk."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from harness.checkpoints import PARTIAL_SUFFIX, Header, complete_checkpoints, header_path, partial_checkpoints
from harness.errors import InputError, UsageError
from harness.recording import write_json


class CheckpointWriter(FileSystemWriter):
    """Has the coordinating rank complete the checkpoint as the last part of DCP's save, whichever thread that runs in:
    so all ranks learn whether it is complete, and none is held up by what comes after.

    `header` is of the state that is saved; its `save_ns` is set here. `close` when the save has ended, however it did.
    """

    def __init__(self, final: Path, header: Header, *, keep: int | None = None) -> None:
        """keep: how many of the latest checkpoints beside `final`, and with it, stay; None: all."""
        self.partial = final.with_name(final.name + PARTIAL_SUFFIX)
        super().__init__(self.partial)
        self._final, self._header, self._keep = final, header, keep
        self._started_ns = time.perf_counter_ns()
        self._lock: int | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            self.partial.mkdir(parents=True, exist_ok=True)
            # The kernel lets go of it when this process dies, however it does.
            self._lock = os.open(self.partial, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks: the folder is then never taken for abandoned
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinating rank, when all have written and flushed their files."""
        super().finish(metadata, results)
        save_ns = time.perf_counter_ns() - self._started_ns
        write_json(header_path(self.partial), {**msgspec.to_builtins(self._header), "save_ns": save_ns})
        _flush_folder(self.partial)
        self.partial.rename(self._final)
        _flush_folder(self._final.parent)
        if self._keep is not None:
            self._remove_beyond(self._keep)

    def _remove_beyond(self, keep: int) -> None:
        for old in complete_checkpoints(self._final.parent)[:-keep]:
            old.rename(old.with_name(old.name + PARTIAL_SUFFIX))  # never a half-deleted one under a complete one's name
        remove_abandoned(self._final.parent)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_abandoned(folder: Path) -> None:
    """Deletes half-written checkpoints whose writer is dead; what cannot be deleted stays, it is never loaded."""
    for partial in partial_checkpoints(folder):
        with suppress(OSError):
            descriptor = os.open(partial, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(partial, ignore_errors=True)
            finally:
                os.close(descriptor)


@contextmanager
def one_line(checkpoint: Path, what: str) -> Iterator[None]:
    """Turns DCP's exception, the tracebacks of all ranks, into the first rank's reason."""
    try:
        yield
    except CheckpointException as error:
        _, (reason, _) = min(error.failures.items())
        if isinstance(reason, UsageError):
            raise reason from None
        line = traceback.format_exception_only(reason)[-1].strip().splitlines()[0]
        raise InputError(checkpoint, f"{what}: {line}") from None


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
