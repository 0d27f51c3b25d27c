"""The steps that are looked at closely: trace and memory windows, opened and closed around steps."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from harness.config import Recorder
from harness.record.collectives import CommRanges
from harness.record.held import Watched
from harness.record.memory import CudaAllocator, MemorySource, NoAllocator
from harness.record.snapshot import MemoryHistory
from harness.record.storages import OTHER, StorageTracker
from harness.record.trace import TraceWindow


class Windows:
    """What differs between devices: on CUDA the allocator tells memory and its history makes snapshots; on CPU live
    storages are tracked, and collectives get ranges in the trace."""

    def __init__(
        self,
        config: Recorder.Config,
        directory: Path,
        rank: int,
        world_size: int,
        device: torch.device,
        watched: Watched,
    ) -> None:
        cuda = device.type == "cuda"
        self._memory_window = config.memory
        self._watched = watched
        self._trace = TraceWindow(config.trace, directory, rank, world_size, cuda=cuda)
        self._history: MemoryHistory | None = None
        if cuda:
            self._history = MemoryHistory(
                config.memory, directory, rank, watched, max_entries=config.max_history_entries
            )
        self._allocator: MemorySource = CudaAllocator(device) if cuda else NoAllocator()
        self._tracker: StorageTracker | None = None
        self.memory: MemorySource = self._allocator
        """The source of memory figures now; it changes only between steps."""
        self.annotating = False
        """Whether ranges opened now end up in a file."""
        self.labelling = False
        """Whether labels are kept now."""
        self._comm_ranges = None if cuda else CommRanges()
        self._after_export = False
        self._step = ExitStack()

    def _refresh(self) -> None:
        """After a window opened or closed."""
        remembering = self._history is not None and self._history.active
        self.annotating = self._trace.active or remembering
        self.labelling = self._tracker is not None or remembering

    def enter_loop(self, first_step: int) -> None:
        """A memory window of the first step opens with the recorder."""
        if self._history is not None:
            self._history.before_step(first_step)
            self._refresh()

    def enter(self, step: int) -> list[str]:
        """Opens what `step` needs; returns the tags for its row. `leave_step` closes what lasts one step."""
        self._trace.before_step(step)
        if self._history is not None:
            self._history.before_step(step)
        elif step in self._memory_window:
            self._tracker = self._tracker or StorageTracker()
            self._tracker.adopt_existing(self._watched)
            self.memory = self._tracker
        self._refresh()

        if self.annotating:
            self._step.enter_context(record_function(f"ProfilerStep#{step}"))
        # Modes leave in the reverse order of their entry, whatever the windows, so each step enters them anew.
        if self._tracker is not None:
            self._step.enter_context(self._tracker)
            self._tracker.start_step()
        if self._comm_ranges is not None and self._trace.active:
            self._step.enter_context(self._comm_ranges)

        tags = []
        if self._trace.active:
            tags.append("profiled")
        if self._trace.warming_up:
            tags.append("profiler_warmup")
        if self.labelling:
            tags.append("memory_history")
        if self._after_export:
            tags.append("after_export")
            self._after_export = False
        return tags

    def leave_step(self) -> None:
        """Closes what lasts one step, however it ended."""
        self._step.close()

    def leave(self, completed_steps: int) -> None:
        """Ends the windows that end here. Their export falls between two steps; the next one is tagged
        `after_export`, since other ranks may reach it earlier and wait."""
        trace = self._trace.after_step(completed_steps)
        snapshot = self._history.after_step(completed_steps) if self._history is not None else None
        if self._tracker is not None and completed_steps not in self._memory_window:
            self._stop_tracking()
        self._refresh()
        self._after_export = trace is not None or snapshot is not None

    def finish(self, completed_steps: int, *, failed: bool = False, out_of_memory: bool = False) -> None:
        """Writes what open windows hold; after running out of memory a snapshot in any case."""
        try:
            self._trace.finish(completed_steps)
        finally:
            try:
                if self._history is not None:
                    self._history.finish(completed_steps, at_exit=failed, without_history=out_of_memory)
            finally:
                self._stop_tracking()
                self._refresh()

    def label(self, category: str | None, phase: str | None, step: int | None) -> None:
        """Says what is allocated from now on."""
        if self._tracker is not None:
            self._tracker.category = category or OTHER
        if self._history is not None:
            self._history.label(category=category, phase=phase, step=step)

    def peak_composition(self) -> list[dict[str, Any]] | None:
        """Categories at the step's peak where storages are tracked."""
        return None if self._tracker is None else self._tracker.peak_composition()

    def _stop_tracking(self) -> None:
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None
            self.memory = self._allocator
