"""The memory window on CUDA: allocator history over some steps, one snapshot per rank at the end."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import torch

from harness.config import Window
from harness.record.held import Watched
from harness.recording import atomic_path, snapshot_path

# What builds from 2.11 on take is passed, the rest left out; nothing is skipped, stacking needs `free_requested`.
HISTORY_OPTIONS: dict[str, Any] = {
    "enabled": "all",
    "context": "all",
    "stacks": "python",  # "all" makes the dump a hundred times slower (torchtitan#3628)
    "clear_history": True,
    "compile_context": True,
    "global_record_annotations": True,  # ranges opened on the autograd thread too
}


class MemoryHistory:
    """`torch.cuda.memory._record_memory_history` over the steps of `window`.

    Labels reach the allocations of the thread that sets them: torch keeps them per thread
    (c10/cuda/CUDACachingAllocator.cpp:user_metadata), so those of the backward's own thread have none, and the
    snapshot's ranges (`backward`, `ProfilerStep#N`) say when they were made. What was allocated before the window
    has no label at all: `meshscope_labels` names those blocks by address.
    """

    def __init__(self, window: Window, directory: Path, rank: int, watched: Watched, *, max_entries: int) -> None:
        self._window = window
        self._watched = watched
        self._directory = directory
        self._rank = rank
        known = inspect.signature(torch.cuda.memory._record_memory_history).parameters
        options = {**HISTORY_OPTIONS, "max_entries": max_entries}
        self._options = {name: value for name, value in options.items() if name in known}
        self._set_label = getattr(torch.cuda.memory, "_set_memory_metadata", None)
        self.active = False

    def before_step(self, step: int) -> None:
        """Opens the window if `step` is its first; asked before the loop begins, so that the first step's holds what is
        built for it, too."""
        if self._window.steps and step == self._window.start and not self.active:
            torch.cuda.init()  # else no device has an allocator yet, and none would remember
            torch.cuda.memory._record_memory_history(**self._options)
            self.active = True

    def after_step(self, completed_steps: int) -> Path | None:
        """The snapshot, if `completed_steps` ends the window."""
        ends = self.active and completed_steps == self._window.start + self._window.steps
        return self.finish(completed_steps) if ends else None

    def label(self, **parts: str | int | None) -> None:
        """Attaches `category=activation;phase=forward;step=3` to the allocations that follow, while the window is
        open; None leaves a part out."""
        if self.active and self._set_label is not None:
            self._set_label(";".join(f"{name}={value}" for name, value in parts.items() if value is not None))

    def finish(self, completed_steps: int, *, at_exit: bool = False, without_history: bool = False) -> Path | None:
        """Writes what an open window holds and ends it.

        Without an open window None, or with `without_history` the segments and blocks as they stand: after running
        out of memory those alone tell what filled the device.
        """
        if not self.active and not without_history:
            return None
        try:
            snapshot = torch.cuda.memory._snapshot()
        finally:
            self._stop()
        # Read by harness.memory.snapshot; torch's viewer and HTA ignore keys that they do not know.
        snapshot["meshscope_labels"] = self._watched.labels("cuda")
        path = snapshot_path(self._directory, completed_steps, self._rank, at_exit=at_exit)
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            pickle.dump(snapshot, file, protocol=4)  # pytorch.org/memory_viz cannot read 5
        return path

    def _stop(self) -> None:
        if not self.active:
            return
        self.label()
        self.active = False
        torch.cuda.memory._record_memory_history(enabled=None)
