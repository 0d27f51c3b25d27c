"""`Recorder`: attaches to any training loop and writes a recording (see `harness.recording`) as it runs."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import msgspec
import torch
import torch.distributed as dist
from torch.profiler import record_function

from harness import config as harness_config
from harness.errors import MeshscopeError, UsageError
from harness.record import provenance
from harness.record.files import RankFiles
from harness.record.memory import ProcessMemory
from harness.record.nvml import DeviceMemory
from harness.record.step import OpenStep, Phase, Scalar
from harness.record.throughput import Throughput, device_peak
from harness.record.windows import Windows
from harness.recording import MODES, Mode

# What a phase allocates, unless `Recorder.category` says otherwise.
PHASE_CATEGORIES = {"forward": "activation", "backward": "gradient", "optimizer": "optimizer_state"}

EXIT_TERMINATED = 128 + signal.SIGTERM
NOT_CLOSED = "the program ended without closing its recorder"


class Recorder(harness_config.Recorder):
    """Records every step of this rank; inside the configured windows also a trace and the memory history.

    Around any loop, three lines:

        with Recorder("out/run") as recorder:
            for batch in data:
                with recorder.step():
                    loss = train(batch)

    More, where the loop can say more: `with recorder.phase("forward")` (also backward, optimizer, any name) for
    peaks per phase, `recorder.log(loss=loss)`, `with recorder.category("parameter")` to label allocations. Without
    `with`, call `close()`.

    directory: the recording; each rank writes its own files in it, so it is the same on all of them.
    device: the one this rank trains on; None takes the current CUDA device, else the CPU.
    run_config: what ran, any JSON object, for the manifest.
    mesh: axis -> global ranks of this rank's group along it.
    mode: real | cpu | shared-gpu | rehearsal; None is `cpu` or `real` by the device.
    tokens_per_step: tokens of this rank's data in a step, those that all devices of its model-parallel group share.
    devices_per_token: how many devices (tp · pp · cp) share these tokens; tokens/s, TFLOP/s and MFU are per device.
    flops_per_token: of the model, forward and backward, without recomputation.

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
    ) -> None:
        if mode is not None and mode not in MODES:
            raise UsageError(f"recorder mode {mode!r} is none of {', '.join(MODES)}")
        config = config or Recorder.Config()
        self.config = config
        self.directory = Path(directory)
        self.device = _device(device)
        self.rank, self.world_size = _rank_and_world()
        self.completed_steps = 0

        cuda = self.device.type == "cuda"
        alone = mode == "rehearsal"
        self._files = RankFiles(self.directory, self.rank, leads=self.rank == 0 or alone)
        self._tokens_per_step = tokens_per_step
        peak = device_peak(self.device, config.peak_tflops)
        self._throughput = Throughput(peak=peak, flops_per_token=flops_per_token, devices_per_token=devices_per_token)
        self._nvml = DeviceMemory(self.device)
        self._process = ProcessMemory()
        self._windows = Windows(config, self.directory, self.rank, self.world_size, self.device)

        self._step: OpenStep | None = None
        self._categories: list[str] = []
        self._notes: list[str] = []
        self._failure: str | None = None
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
                "mesh": _plain_mesh(mesh),
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
            mesh=_plain_mesh(mesh),
            device=provenance.device_facts(self.device, self._nvml.uuid),
            clock=provenance.clock(),
            environment_before=provenance.environment(),
            environment_after=None,
            started_unix_ns=now,
            ended_unix_ns=None,
            end_state=None,
            exception=None,
        )
        atexit.register(self._close_at_exit)

    def __enter__(self) -> Self:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _unwind)
            self._handles_sigterm = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_well = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        if not ended_well and self._failure is None and error is not None:
            self._fail(error)
        self.close()

    @contextmanager
    def step(self, tags: Sequence[str] = ()) -> Iterator[None]:
        """One training step. The device is synchronised once, at its end; `tags` go into the row."""
        if self._closed:
            raise RuntimeError("recorder.step(): this recorder is closed")
        if self._step is not None:
            raise RuntimeError("recorder.step(): the step before is still open")
        if self._failure is not None:
            self._survive()
        step = self._step = OpenStep(self.completed_steps, list(tags))
        try:
            with ExitStack() as windows:
                step.tags += ["warmup"] if step.number == 0 else []
                step.tags += self._windows.enter(step.number, windows)
                self._relabel()
                self._process.start()
                self._windows.memory.read()
                collections = gc.get_stats()[2]["collections"]
                step.started_unix_ns = time.time_ns()
                step.started_ns = time.perf_counter_ns()
                yield
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                step.wall_ns = time.perf_counter_ns() - step.started_ns
                step.take(self._windows.memory.read())
                if gc.get_stats()[2]["collections"] > collections:
                    step.tags.append("gc")
            self._write_row(step)
        except BaseException as error:
            self._fail(error)
            raise
        self._step = None
        self.completed_steps += 1
        self._windows.leave(self.completed_steps)
        if self.completed_steps == 1 or self._warnings_written != len(self._warnings):
            self._write_rank()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step, measured on the host; passages of one name within a step are summed.

        Phases may nest: an inner peak counts for the outer phase too. Outside a step this does nothing.
        """
        step = self._step
        if step is None:
            yield
            return
        step.take(self._windows.memory.read())
        phase = step.phases.setdefault(name, Phase())
        with record_function(name) if self._windows.annotating else nullcontext():
            step.open_phases.append(name)
            self._relabel()
            started_ns = time.perf_counter_ns()
            try:
                yield
            except BaseException:
                step.failed_phase = step.failed_phase or name
                raise
            finally:
                phase.wall_ns += time.perf_counter_ns() - started_ns
                phase.count += 1
                step.take(self._windows.memory.read())
                step.open_phases.pop()
                self._relabel()

    @contextmanager
    def category(self, name: str) -> Iterator[None]:
        """Labels what is allocated inside (parameter, activation, gradient, optimizer_state, …) in memory windows."""
        self._categories.append(name)
        self._relabel()
        try:
            yield
        finally:
            self._categories.pop()
            self._relabel()

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

    def close(self) -> None:
        """Writes open windows and the end state. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        if self._handles_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            self._windows.finish(self.completed_steps)
        finally:
            self._warnings.close()
            state = "failed" if self._failure else "complete"
            ended = {"ended_unix_ns": time.time_ns(), "end_state": state}
            self._write_rank(exception=self._failure, **ended)
            self._process.close()
            self._files.end({"steps_completed": self.completed_steps, **ended}, failed=bool(self._failure))

    def _relabel(self) -> None:
        if not self._windows.labelling:
            return
        step = self._step
        phase = step.open_phases[-1] if step is not None and step.open_phases else None
        category = self._categories[-1] if self._categories else PHASE_CATEGORIES.get(phase or "")
        self._windows.label(category, phase, step.number if step else None)

    def _write_row(self, step: OpenStep) -> None:
        tokens = self._tokens_per_step if step.tokens is None else step.tokens
        rss_bytes, peak_rss_bytes = self._process.read()
        process_bytes, device_bytes = self._nvml.read()
        row = {
            "step": step.number,
            "started_unix_ns": step.started_unix_ns,
            "wall_ns": step.wall_ns,
            "tokens": tokens,
            **self._throughput.of_step(tokens, step.wall_ns),
            **step.read_values(),
            "memory_source": self._windows.memory.name,
            **step.memory_fields(),
            "phases": {name: phase.row() for name, phase in step.phases.items()},
            "nvml_process_bytes": process_bytes,
            "nvml_device_bytes": device_bytes,
            "rss_bytes": rss_bytes,
            "peak_rss_bytes": peak_rss_bytes,
            "tags": step.tags,
        }
        composition = self._windows.peak_composition()
        if composition is not None:
            row["peak_composition"] = composition
        self._files.append_step(row)

    def _fail(self, error: BaseException) -> None:
        """Saves what there is; what cannot be saved any more becomes a note, so that `error` stays the error."""
        self._failure = _one_line(error)
        step, self._step = self._step, None
        failed = None
        if step is not None:
            step.take(self._windows.memory.read())
            failed = {"step": step.number, "memory_source": self._windows.memory.name, **step.memory_fields()}
            failed |= {"phase": step.failed_phase, "tags": step.tags}
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        try:
            self._windows.finish(self.completed_steps, failed=True, out_of_memory=out_of_memory)
        except (RuntimeError, OSError) as second:
            self._notes.append(f"not saved after the failure: {_one_line(second)}")
        self._write_rank(end_state="failed", exception=self._failure, failed_step=failed)
        self._files.fail(self._failure)

    def _survive(self) -> None:
        """The loop caught the exception of a step and goes on."""
        self._notes.append(f"step {self.completed_steps} failed and training went on: {self._failure}")
        self._failure = None
        self._write_rank(end_state=None, exception=None)
        self._files.resume()

    def _write_rank(self, **facts: Any) -> None:
        found = self._warnings.items()
        self._warnings_written = len(found)
        reasons = [reason for reason in (self._process.peak_reason, self._nvml.reason) if reason]
        if self.completed_steps == 1:
            facts["environment_after"] = provenance.environment()
        self._files.write_rank(
            warnings=found, notes=reasons + self._notes, steps_completed=self.completed_steps, **facts
        )

    def _close_at_exit(self) -> None:
        if self._failure is None:
            self._failure = NOT_CLOSED
            self._files.fail(NOT_CLOSED)
        self.close()


def _rank_and_world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    without_index = torch.device("cuda")
    return torch.device("cuda", torch.cuda.current_device()) if device == without_index else device


def _plain_mesh(mesh: Mapping[str, Sequence[int]] | None) -> dict[str, list[int]] | None:
    return None if mesh is None else {axis: [int(rank) for rank in ranks] for axis, ranks in mesh.items()}


def _one_line(error: BaseException) -> str:
    if isinstance(error, MeshscopeError):
        return str(error)
    if isinstance(error, SystemExit):
        return "terminated by SIGTERM" if error.code == EXIT_TERMINATED else f"SystemExit: {error.code}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__qualname__}: {lines[0]}" if lines else type(error).__qualname__


def _unwind(signal_number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the writing
    sys.exit(EXIT_TERMINATED)
