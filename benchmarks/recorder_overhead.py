"""What recording costs a training step with its windows off: `python benchmarks/recorder_overhead.py [--json]`.

Three figures.
`ratio`: the same training step alone and recorded, in interleaved pairs whose order alternates, so that drift of the
machine hits both; median of the paired ratios with a 95 % interval (order statistics of the median). `ratio_reading`
is the same for a loop that reads its loss after every step (`loss.item()`), as most do: there the device runs dry once
a step, alone and recorded.
`own_ns`: the time inside the recorder's calls during real steps, when its code is cold in the caches: several times
that of an empty loop, and not hidden by the noise of the step. On CUDA this is host time, which costs the step only
where the host is what it waits for.
`components`: medians of the single parts, each called once after a real step, cold as well.
On CPU all are CPU time of one thread, which other processes disturb least; on CUDA wall time.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from scipy.stats import binom  # type: ignore[import-untyped]
from torch import nn

from harness.config import Window
from harness.record import Recorder
from harness.record.files import RankFiles
from harness.record.memory import CudaAllocator, MemorySource, NoAllocator, ProcessMemory
from harness.record.nvml import DeviceMemory
from harness.record.step import Phase, Step
from harness.record.throughput import Peak, Throughput
from harness.record.timing import CudaClock, HostClock, StepClock
from harness.recording import StepRow

OFF = Recorder.Config(trace=Window(), memory=Window())
PHASES = ("forward", "backward", "optimizer")


class TrainingStep:
    """An MLP whose depth is chosen so that a step takes about `target_ms` on this device."""

    def __init__(self, device: torch.device, target_ms: float) -> None:
        self.device = device
        self.clock_ns = time.perf_counter_ns if device.type == "cuda" else time.thread_time_ns
        self.width, self.batch = (4096, 4096) if device.type == "cuda" else (512, 256)
        self._build(layers=4)
        one_ns = min(self.timed(5) for _ in range(3)) / 5
        self._build(layers=max(1, round(4 * target_ms * 1e6 / one_ns)))

    def _build(self, layers: int) -> None:
        blocks = [nn.Linear(self.width, self.width) for _ in range(layers)]
        self.model = nn.Sequential(*blocks).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.data = torch.randn(self.batch, self.width, device=self.device)
        self.run()

    def forward(self) -> None:
        self.loss = self.model(self.data).square().mean()

    def backward(self) -> None:
        self.loss.backward()

    def optimize(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, recorder: Recorder | None = None) -> None:
        for name, body in zip(PHASES, (self.forward, self.backward, self.optimize), strict=True):
            with recorder.phase(name) if recorder else nullcontext():
                body()
        if recorder:
            recorder.log(loss=self.loss)

    def timed(self, steps: int, recorder: Recorder | None = None, *, reading: bool = False) -> int:
        """Nanoseconds for `steps` steps, the device idle before and after; `reading` the loss of each."""
        self.synchronise()
        started = self.clock_ns()
        for _ in range(steps):
            if recorder:
                with recorder.step():
                    self.run(recorder)
            else:
                self.run()
            if reading:
                self.loss.item()
        self.synchronise()
        return self.clock_ns() - started

    def inside_recorder(self, recorder: Recorder) -> int:
        """Nanoseconds that one recorded step spends in the recorder, waiting for the device not included."""
        marks = [self.clock_ns()]
        with recorder.step():
            marks.append(self.clock_ns())
            bodies = (self.forward, self.backward, self.optimize)
            for name, body in zip(PHASES, bodies, strict=True):
                with recorder.phase(name):
                    marks.append(self.clock_ns())
                    body()
                    marks.append(self.clock_ns())
            recorder.log(loss=self.loss)
            marks.append(self.clock_ns())
            self.synchronise()
            marks.append(self.clock_ns())
        marks.append(self.clock_ns())
        enter, before_forward, _, between, _, again, _, log, _, leave = np.diff(marks)
        return int(enter + before_forward + between + again + log + leave)

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def interleaved(
    step: TrainingStep, recorder: Recorder, pairs: int, steps: int, *, reading: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Nanoseconds per step of (plain, recorded) for each pair."""
    plain, recorded = np.empty(pairs), np.empty(pairs)
    arms: list[tuple[np.ndarray, Callable[[], int]]] = [
        (plain, lambda: step.timed(steps, reading=reading)),
        (recorded, lambda: step.timed(steps, recorder, reading=reading)),
    ]
    for pair in range(pairs):
        for times, measure in arms if pair % 2 == 0 else reversed(arms):
            times[pair] = measure() / steps
    return plain, recorded


def components(step: TrainingStep, folder: Path, repeats: int) -> dict[str, int]:
    """Median nanoseconds of each part of the recorder, called once after each of `repeats` steps."""
    device = step.device
    cuda = device.type == "cuda"
    memory: MemorySource = CudaAllocator(device) if cuda else NoAllocator()
    clock: StepClock = CudaClock(device) if cuda else HostClock()
    process, nvml, files = ProcessMemory(), DeviceMemory(device), RankFiles(folder, 0, leads=True)
    throughput = Throughput(peak=Peak(tflops=1.0, source="benchmark"), flops_per_token=1, devices_per_token=1)
    rows: list[StepRow] = []

    def build_row() -> None:
        ended = Step(0, [], clock, tokens=1, phases={name: Phase() for name in PHASES}, memory_source=memory.name)
        ended.take(reading)
        rows[:] = [ended.row(throughput)]

    parts: dict[str, Callable[[], object]] = {
        "memory_read": memory.read,
        "memory_reset": memory.reset,
        "clock_start": clock.start,
        "clock_stop": lambda: clock.stop({"loss": step.loss.detach()}),
        "clock_is_done": clock.is_done,
        "rss_reset": process.start,
        "rss_read": process.read,
        "gc_stats": gc.get_stats,
        "nvml_take": nvml.take,
        "row_build": build_row,
        "row_write": lambda: files.append_step(rows[0]),
    }
    if cuda:
        parts["nvml_sample (not in the step)"] = nvml.sample
    times = {name: np.empty(repeats) for name in parts}
    for repeat in range(repeats):
        step.run()
        reading = memory.read()
        for name, part in parts.items():
            if name == "row_build":
                step.synchronise()  # its figures are there then
            started = step.clock_ns()
            part()
            times[name][repeat] = step.clock_ns() - started
    process.close()
    nvml.close()
    return {name: round(float(np.median(values))) for name, values in times.items()}


def median_interval(values: np.ndarray) -> tuple[float, float, float]:
    """(low, median, high): distribution-free 95 % interval of the median, from the order statistics."""
    ordered = np.sort(values)
    lowest = int(binom.ppf(0.025, len(ordered), 0.5))
    return float(ordered[max(lowest - 1, 0)]), float(np.median(ordered)), float(ordered[len(ordered) - max(lowest, 1)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--target-ms", type=float, default=30.0, help="length of a step")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=4, help="steps of each arm in a pair")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    step = TrainingStep(device, arguments.target_ms)
    with tempfile.TemporaryDirectory() as folder:
        with Recorder(Path(folder) / "run", config=OFF, device=device) as recorder:
            interleaved(step, recorder, 3, arguments.steps, reading=False)  # warm-up
            gc.collect()
            plain, recorded = interleaved(step, recorder, arguments.pairs, arguments.steps, reading=False)
            reading = interleaved(step, recorder, arguments.pairs, arguments.steps, reading=True)
            own = np.array([step.inside_recorder(recorder) for _ in range(arguments.pairs)])
        parts = components(step, Path(folder) / "parts", arguments.pairs)

    low, ratio, high = median_interval(recorded / plain)
    low_reading, ratio_reading, high_reading = median_interval(reading[1] / reading[0])
    step_ns = float(np.median(plain))
    result = {
        "ratio": ratio,
        "ratio_ci95": [low, high],
        "ratio_reading": ratio_reading,
        "ratio_reading_ci95": [low_reading, high_reading],
        "plain_step_ns": round(step_ns),
        "plain_step_reading_ns": round(float(np.median(reading[0]))),
        "own_ns": round(float(np.median(own))),
        "own_p95_ns": round(float(np.percentile(own, 95))),
        "own_pct_of_step": 100 * float(np.median(own)) / step_ns,
        "components_ns": parts,
        "pairs": arguments.pairs,
        "steps_per_arm": arguments.steps,
        "clock": "wall" if device.type == "cuda" else "CPU time of one thread",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "python": platform.python_version(),
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"torch {result['torch']}, CUDA {result['cuda']}, {result['device']}, Python {result['python']}")
    print(f"step {step_ns / 1e6:.1f} ms; recorded/plain {ratio:.4f} (95 % {low:.4f} to {high:.4f}, {len(plain)} pairs)")
    print(
        f"reading the loss each step: {result['plain_step_reading_ns'] / 1e6:.1f} ms; recorded/plain "
        f"{ratio_reading:.4f} (95 % {low_reading:.4f} to {high_reading:.4f})"
    )
    own_us, own_p95_us = np.median(own) / 1e3, np.percentile(own, 95) / 1e3
    share = result["own_pct_of_step"]
    print(
        f"inside the recorder {own_us:.0f} µs a step (95th percentile {own_p95_us:.0f} µs) = {share:.2f} % of the step"
    )
    for name, nanoseconds in parts.items():
        print(f"  {name:30}{nanoseconds / 1e3:9.1f} µs")


if __name__ == "__main__":
    main()
