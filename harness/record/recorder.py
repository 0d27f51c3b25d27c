"""`Recorder`: attaches to any training loop and writes a recording (see `harness.recording`) as it runs."""

from __future__ import annotations

import atexit
import gc
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch

from harness import config as harness_config
from harness.errors import UsageError
from harness.record import provenance
from harness.record.ending import one_line, unwind
from harness.record.files import RankFiles
from harness.record.held import Watched
from harness.record.memory import ProcessMemory
from harness.record.nvml import DeviceMemory
from harness.record.place import plain_mesh, rank_and_world, this_device
from harness.record.rows import Rows
from harness.record.spans import CategorySpan, PhaseSpan, StepSpan
from harness.record.step import Step
from harness.record.throughput import Throughput, device_peak
from harness.record.timing import CudaClock, HostClock, Scalar, StepClock
from harness.record.windows import Windows
from harness.recording import MODES, Mode

# What a phase allocates, unless `Recorder.category` says otherwise.
PHASE_CATEGORIES = {"forward": "activation", "backward": "gradient", "optimizer": "optimizer_state"}

# What follows from values that other ranks would have sent: a rehearsal has none of them.
NOT_REHEARSED = ("loss", "grad_norm")

NOT_CLOSED = "the program ended without closing its recorder"


class Recorder(harness_config.Recorder):
    """Records every step of this rank; inside the configured windows also a trace and the memory history.

    Around any loop, three lines:

        with Recorder("out/run") as recorder:
            for batch in data:
                with recorder.step():
                    loss = train(batch)

    More, where the loop can say more: `with recorder.phase("forward")` (also backward, optimizer, any name) for
    peaks per phase, `recorder.log(loss=loss)`, `with recorder.category("parameter")` to label allocations,
    `recorder.watch(model, optimizer)` to name what was allocated before a memory window. Without `with`, call
    `close()`.

    On CUDA no step waits for the device: the row of a step is written once the device has ended it, at the latest
    while the next one ends.

    directory: the recording; each rank writes its own files in it, so it is the same on all of them.
    device: the one this rank trains on; None takes the current CUDA device, else the CPU.
    run_config: what ran, any JSON object, for the manifest.
    mesh: axis -> global ranks of this rank's group along it.
    mode: real | cpu | shared-gpu | rehearsal; None is `cpu` or `real` by the device. A rehearsal is one rank of a world
    whose others are not there: loss, gradient norm and rates are not recorded.
    tokens_per_step: tokens of this rank's data in a step, those that all devices of its model-parallel group share.
    devices_per_token: how many devices (tp · pp · cp) share these tokens; tokens/s, TFLOP/s and MFU are per device.
    flops_per_token: of the model, forward and backward, without recomputation.
    no_peak: why the device's datasheet peak is none for this program; MFU is then null unless `peak_tflops` is set.
    first_step: the number of the first step: how many a training that goes on from a checkpoint has completed.

    On an exception inside `with Recorder` or `step()` (out of memory, interruption and SIGTERM included) it writes
    the open trace, the memory snapshot and the exception's line, and lets the exception go on.

    Raises `UsageError` for a folder that already holds a recording of this rank, or an unknown mode; `InputError`
    for a folder that cannot be written.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        config: harness_config.Recorder.Config | None = None,
        device: torch.device | str | None = None,
        run_config: dict[str, Any] | None = None,
        mesh: Mapping[str, Sequence[int]] | None = None,
        mode: Mode | None = None,
        tokens_per_step: int | None = None,
        flops_per_token: int | None = None,
        devices_per_token: int = 1,
        first_step: int = 0,
        no_peak: str | None = None,
    ) -> None:
        if mode is not None and mode not in MODES:
            raise UsageError(f"recorder mode {mode!r} is none of {', '.join(MODES)}")
        config = config or Recorder.Config()
        self.config = config
        self.directory = Path(directory)
        self.device = this_device(device)
        self.rank, self.world_size = rank_and_world()
        self.completed_steps = first_step

        cuda = self.device.type == "cuda"
        alone = mode == "rehearsal"
        self._rehearses = alone
        self._files = RankFiles(self.directory, self.rank, leads=self.rank == 0 or alone)
        self._tokens_per_step = tokens_per_step
        peak = device_peak(self.device, config.peak_tflops, no_peak)
        self._rows = Rows(
            self._files,
            Throughput(
                peak=peak, flops_per_token=flops_per_token, devices_per_token=devices_per_token, known=not alone
            ),
        )
        self._nvml = DeviceMemory(self.device)
        self._process = ProcessMemory()
        self._watched = Watched()
        self._windows = Windows(config, self.directory, self.rank, self.world_size, self.device, self._watched)
        # Two, since the row of a step may be written while the next one runs.
        self._clocks: tuple[StepClock, StepClock] = (
            (CudaClock(self.device), CudaClock(self.device)) if cuda else (HostClock(), HostClock())
        )
        self._collections = gc.get_stats()[2]["collections"]

        self._step: Step | None = None
        self._has_begun = False
        self._categories: list[str] = []
        self._notes: list[str] = []
        self._failure: str | None = None
        self._environment_after: dict[str, str] | None = None
        self._closed = False
        self._handles_sigterm = False
        self._warnings = provenance.WarningLog()
        self._warnings_written = 0
        now = time.time_ns()
        process = provenance.process()
        self._files.start(
            {
                "mode": mode or ("real" if cuda else "cpu"),
                "config": run_config,
                "recorder": msgspec.to_builtins(config),
                "world_size": self.world_size,
                "recorded_ranks": [self.rank] if alone else list(range(self.world_size)),
                "mesh": plain_mesh(mesh),
                "tokens_per_step": tokens_per_step,
                "flops_per_token": flops_per_token,
                "devices_per_token": devices_per_token,
                "peak_tflops": peak.tflops,
                "peak_tflops_source": peak.source,
                "argv": process["argv"],
                "git": provenance.git_state(Path.cwd()),
                "versions": provenance.versions(self._nvml.driver_version),
                "started_unix_ns": now,
            },
            **process,
            world_size=self.world_size,
            mesh=plain_mesh(mesh),
            device=provenance.device_facts(self.device, self._nvml.uuid),
            clock=provenance.clock(),
            environment_before=provenance.environment(),
            environment_after=None,
            started_unix_ns=now,
            ended_unix_ns=None,
            end_state=None,
            exception=None,
            failed_unix_ns=None,
        )
        atexit.register(self._close_at_exit)

    def __enter__(self) -> Self:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, unwind)
            self._handles_sigterm = True
        self._windows.enter_loop(self.completed_steps)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_well = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        if not ended_well and self._failure is None and error is not None:
            self._fail(error)
        self.close()

    def step(self, tags: Sequence[str] = ()) -> AbstractContextManager[None]:
        """One training step; `tags` go into its row. On CUDA only steps inside a window wait for the device."""
        return StepSpan(lambda: self._open_step(tags), self._close_step)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A part of the step, measured on the host; passages of one name within a step are summed.

        Phases may nest: an inner peak counts for the outer phase too. Outside a step this does nothing.
        """
        return PhaseSpan(name, self._step, self._windows, self._relabel)

    def category(self, name: str) -> AbstractContextManager[None]:
        """Labels what is allocated inside (parameter, activation, gradient, optimizer_state, …) in memory windows."""
        return CategorySpan(name, self._categories, self._relabel)

    def watch(self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Names the memory of a model and its optimizer in memory windows that open after it was allocated.

        To be called once both exist; again for further ones. Parameters, gradients, optimizer states and buffers
        are then known by address (DTensors by their local part) in snapshots, and by storage on CPU. Both are held
        weakly. Raises `UsageError` for anything else than a module and an optimizer.
        """
        self._watched.add(model, optimizer)

    def log(
        self,
        *,
        loss: Scalar | None = None,
        grad_norm: Scalar | None = None,
        tokens: int | None = None,
        **scalars: Scalar,
    ) -> None:
        """Numbers of the open step; tensors are read at its end, so this does not wait for the device.

        `tokens` replaces `tokens_per_step` for this step. Raises `UsageError` outside a step, for a tensor of more
        than one element, and for a DTensor (its value would need communication).
        """
        if self._step is None:
            raise UsageError("recorder.log() belongs inside `with recorder.step():`")
        self._step.tokens = tokens if tokens is not None else self._step.tokens
        self._step.log({"loss": loss, "grad_norm": grad_norm, **scalars})

    def about(self, **facts: Any) -> None:
        """What else there is to know of this rank's program, JSON values, in ranks/rank{r}.json under their names."""
        self._write_rank(**facts)

    def close(self) -> None:
        """Writes the last row, open windows and the end state. Further calls do nothing.

        Raises what the device reports of work that no call has waited for before (RuntimeError).
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        if self._handles_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            if self._failure is None:
                self._rows.finish()
            else:
                self._rescue_row()
            self._windows.finish(self.completed_steps)
        except (RuntimeError, OSError) as error:
            self._fail(error)
            raise
        finally:
            self._nvml.close()
            self._warnings.close()
            state = "failed" if self._failure else "complete"
            ended = {"ended_unix_ns": time.time_ns(), "end_state": state}
            self._write_rank(exception=self._failure, **ended)
            self._process.close()
            manifest = {"steps_completed": self.completed_steps, **ended}
            self._files.end(manifest, failed=self._failure is not None)

    def _open_step(self, tags: Sequence[str]) -> None:
        if self._closed:
            raise RuntimeError("recorder.step(): this recorder is closed")
        if self._step is not None:
            raise RuntimeError("recorder.step(): the step before is still open")
        if self._failure is not None:
            self._survive()
        number = self.completed_steps
        step = self._step = Step(number, list(tags), self._clocks[number % 2], tokens=self._tokens_per_step)
        try:
            if not self._has_begun:
                self._has_begun = True
                step.tags.append("warmup")
            step.tags += self._windows.enter(number)
            self._relabel()
            self._process.start()
            self._windows.memory.reset()
            step.started_unix_ns = time.time_ns()
            step.clock.start()
        except BaseException as error:
            self._abort_step(error)
            raise

    def _close_step(self, error: BaseException | None) -> None:
        if error is not None:
            self._abort_step(error)
            return
        try:
            self._end_step()
        except BaseException as own:
            self._abort_step(own)
            raise
        self._step = None
        self.completed_steps += 1
        self._windows.leave(self.completed_steps)
        if self._environment_after is None:
            self._environment_after = provenance.environment()
            self._write_rank(environment_after=self._environment_after)
        elif self._warnings_written != len(self._warnings):
            self._write_rank()

    def _end_step(self) -> None:
        step, windows = self._step, self._windows
        assert step is not None
        if self._rehearses:
            step.forget(NOT_REHEARSED)
        step.stop_clock()
        if windows.annotating and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # so that the step's range covers its work on the device, too
        step.take(windows.memory.read())
        collections = gc.get_stats()[2]["collections"]
        if collections != self._collections:
            self._collections = collections
            step.tags += [] if "gc" in step.tags else ["gc"]
        step.rss_bytes, step.peak_rss_bytes = self._process.read()
        step.nvml_process_bytes, step.nvml_device_bytes = self._nvml.take()
        step.memory_source, step.peak_composition = windows.memory.name, windows.peak_composition()
        windows.leave_step()
        self._rows.add(step)

    def _abort_step(self, error: BaseException) -> None:
        self._windows.leave_step()
        self._fail(error)

    def _relabel(self) -> None:
        if not self._windows.labelling:
            return
        step = self._step
        phase = step.open_phases[-1] if step is not None and step.open_phases else None
        category = self._categories[-1] if self._categories else PHASE_CATEGORIES.get(phase or "")
        self._windows.label(category, phase, step.number if step else None)

    def _fail(self, error: BaseException) -> None:
        """Saves what there is; what cannot be saved any more becomes a note, so that `error` stays the error."""
        self._failure = one_line(error)
        failed_unix_ns = time.time_ns()
        step, self._step = self._step, None
        failed = None
        if step is not None:
            step.take(self._windows.memory.read())
            failed = {"step": step.number, "memory_source": self._windows.memory.name, **step.memory_fields()}
            failed |= {"phase": step.failed_phase, "tags": step.tags}
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        try:
            self._rescue_row()
            self._windows.finish(self.completed_steps, failed=True, out_of_memory=out_of_memory)
        except (RuntimeError, OSError) as second:
            self._notes.append(f"not saved after the failure: {one_line(second)}")
        self._write_rank(end_state="failed", exception=self._failure, failed_unix_ns=failed_unix_ns, failed_step=failed)
        self._files.fail()

    def _rescue_row(self) -> None:
        reason = self._rows.rescue()
        if reason is not None:
            self._notes.append(reason)

    def _survive(self) -> None:
        """The loop caught the exception of a step and goes on."""
        self._notes.append(f"step {self.completed_steps} failed and training went on: {self._failure}")
        self._failure = None
        self._write_rank(end_state=None, exception=None, failed_unix_ns=None)
        self._files.resume()

    def _write_rank(self, **facts: Any) -> None:
        found = self._warnings.items()
        self._warnings_written = len(found)
        reasons = [reason for reason in (self._process.peak_reason, self._nvml.reason) if reason]
        self._files.write_rank(
            warnings=found, notes=reasons + self._notes, steps_completed=self.completed_steps, **facts
        )

    def _close_at_exit(self) -> None:
        if self._failure is None:
            self._failure = NOT_CLOSED
        self.close()
