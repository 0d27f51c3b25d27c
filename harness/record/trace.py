"""The trace window: some steps under torch.profiler, one chrome trace per rank at the end."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from harness.config import Window
from harness.recording import atomic_path, trace_path

# Level 9, which torch takes, needs about three times as long for a few percent.
GZIP_LEVEL = 4


class TraceWindow:
    """torch.profiler over the steps of `window`, warmed up during the step before where there is one.

    Works on the profiler's own three calls (prepare, start, stop) instead of its schedule, so that `ProfilerStep#N`
    can carry the recorder's step numbers; the recorder opens that range.
    """

    def __init__(self, window: Window, directory: Path, rank: int, world_size: int, *, cuda: bool) -> None:
        self._window = window
        self._directory = directory
        self._rank = rank
        self._world_size = world_size
        self._activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
        self._profiler: torch.profiler.profile | None = None  # once it is prepared
        self.active = False

    @property
    def warming_up(self) -> bool:
        return self._profiler is not None and not self.active

    def before_step(self, step: int) -> None:
        window = self._window
        if window.steps == 0:
            return
        if step == max(window.start - 1, 0):
            profiler = torch.profiler.profile(activities=self._activities, record_shapes=False)
            with _one_cycle():
                profiler.prepare_trace()
            self._profiler = profiler
        if step == window.start and self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            if ProfilerActivity.CUDA in self._activities:
                # Else the device is still at the step before, whose kernels would be in the trace without a launch.
                torch.cuda.synchronize()
            with _one_cycle():
                profiler.start_trace()
            self._profiler = profiler
            if not (dist.is_available() and dist.is_initialized()):  # else torch writes the groups as well
                identity = {"rank": self._rank, "world_size": self._world_size}
                self._profiler.add_metadata_json("distributedInfo", json.dumps(identity))
            self.active = True

    def after_step(self, completed_steps: int) -> Path | None:
        """The trace, if `completed_steps` ends the window."""
        ends = completed_steps == self._window.start + self._window.steps
        return self.finish(completed_steps) if ends else None

    def finish(self, completed_steps: int) -> Path | None:
        """Writes what an open window holds; None if none is open, or if the profiler never came to run: stopping it
        then crashes the process."""
        profiler, self._profiler = self._profiler, None
        was_active, self.active = self.active, False
        if profiler is None:
            return None
        with _one_cycle():
            if not was_active:  # prepared only: the profiler can be left no other way
                profiler.start_trace()
            profiler.stop_trace()
        if not was_active:
            return None
        path = trace_path(self._directory, completed_steps, self._rank)
        with atomic_path(path) as temporary, tempfile.NamedTemporaryFile(suffix=".json") as plain:
            profiler.export_chrome_trace(plain.name)
            # Compressed as it is: a parser between would lose the space of `"rank": N`, which HTA needs.
            with open(plain.name, "rb") as source, gzip.open(temporary, "wb", compresslevel=GZIP_LEVEL) as target:
                shutil.copyfileobj(source, target, 1 << 20)
        return path


@contextmanager
def _one_cycle() -> Iterator[None]:
    """Without torch's warning that a profiler forgets its events at the end of a cycle: here each has only one.

    `acc_events=True` would silence it as well, but reads every event into Python when the trace stops
    (torch/autograd/profiler.py:profile.__exit__), which takes minutes for a large one.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
        yield
