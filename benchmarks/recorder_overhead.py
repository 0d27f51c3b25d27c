"""What recording costs a training step with its windows off: `python benchmarks/recorder_overhead.py [--json]`.

Two figures. `ratio`: the same training step alone and recorded, in interleaved pairs whose order alternates, so that
drift of the machine hits both; median of the paired ratios with a 95 % interval (order statistics of the median).
On CUDA the plain loop does not wait for the device, so the recorder's one synchronisation per step is in the ratio.
`own_ns`: the time inside the recorder's calls during real steps, when its code is cold in the caches: several times
that of an empty loop, and not hidden by the noise of the step.
On CPU both are CPU time of one thread, which other processes disturb least; on CUDA they are wall time.
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

    def timed(self, steps: int, recorder: Recorder | None = None) -> int:
        """Nanoseconds for `steps` steps, the device idle before and after."""
        self.synchronise()
        started = self.clock_ns()
        for _ in range(steps):
            if recorder:
                with recorder.step():
                    self.run(recorder)
            else:
                self.run()
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


def interleaved(step: TrainingStep, recorder: Recorder, pairs: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Nanoseconds per step of (plain, recorded) for each pair."""
    plain, recorded = np.empty(pairs), np.empty(pairs)
    arms: list[tuple[np.ndarray, Callable[[], int]]] = [
        (plain, lambda: step.timed(steps)),
        (recorded, lambda: step.timed(steps, recorder)),
    ]
    for pair in range(pairs):
        for times, measure in arms if pair % 2 == 0 else reversed(arms):
            times[pair] = measure() / steps
    return plain, recorded


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
    with tempfile.TemporaryDirectory() as folder, Recorder(Path(folder) / "run", config=OFF, device=device) as recorder:
        interleaved(step, recorder, 3, arguments.steps)  # warm-up
        gc.collect()
        plain, recorded = interleaved(step, recorder, arguments.pairs, arguments.steps)
        own = np.array([step.inside_recorder(recorder) for _ in range(arguments.pairs)])

    low, ratio, high = median_interval(recorded / plain)
    step_ns = float(np.median(plain))
    result = {
        "ratio": ratio,
        "ratio_ci95": [low, high],
        "plain_step_ns": round(step_ns),
        "own_ns": round(float(np.median(own))),
        "own_p95_ns": round(float(np.percentile(own, 95))),
        "own_pct_of_step": 100 * float(np.median(own)) / step_ns,
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
    own_us, own_p95_us = np.median(own) / 1e3, np.percentile(own, 95) / 1e3
    share = result["own_pct_of_step"]
    print(
        f"inside the recorder {own_us:.0f} µs a step (95th percentile {own_p95_us:.0f} µs) = {share:.2f} % of the step"
    )


if __name__ == "__main__":
    main()
