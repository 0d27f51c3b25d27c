"""What else went on while a trial ran: clocks, throttling, temperature and other processes of its GPUs, by NVML.

Read from the probe's own process, so that nothing is added to the ranks; kept beside the trial's recording.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import InputError
from harness.nvml import SLOWING_REASONS, Gpu, NvmlError, read_machine, visible_gpus
from harness.recording import read_json, write_json

PERIOD_S = 2.0
ANSWER_S = 15.0
# A power cap is how a GPU under load works by design: it is recorded, and voids nothing.
VOIDING_REASONS = SLOWING_REASONS - {"software power cap"}
MPS = "nvidia-cuda-mps"


class _Gpu(msgspec.Struct):
    """A GPU at one moment; clocks in MHz, power in W, None where NVML does not tell."""

    uuid: str
    index: int
    sm_clock_mhz: float | None
    clock_reasons: list[str] | None
    temperature_c: float | None
    power_w: float | None
    processes: list[int] | None


class _Sample(msgspec.Struct):
    unix_ns: int
    gpus: list[_Gpu]


class _Surroundings(msgspec.Struct):
    """What is read of surroundings.json."""

    samples: list[_Sample] | None = None


class Watch:
    """Samples the GPUs of a trial every `PERIOD_S` on a thread of its own, which a driver that hangs takes with it."""

    def __init__(self, gpus: int) -> None:
        self.samples: list[dict[str, Any]] = []
        self.reason: str | None = None
        self._gpus = gpus
        self._ended = threading.Event()
        self._answered = threading.Event()
        if self._gpus == 0:
            self.reason = "no GPU is used"
            return
        threading.Thread(target=self._watch, name="meshscope-surroundings", daemon=True).start()
        if not self._answered.wait(ANSWER_S):
            self.reason = f"NVML did not answer within {ANSWER_S:g} s"

    def end(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.is_set():
            try:
                gpus = visible_gpus(read_machine(), os.environ.get("CUDA_VISIBLE_DEVICES"))[: self._gpus]
                self.samples.append({"unix_ns": time.time_ns(), "gpus": [_facts(gpu) for gpu, _ in gpus]})
                self.reason = None
            except NvmlError as error:
                self.reason = f"NVML: {error}"
            self._answered.set()
            self._ended.wait(PERIOD_S)


def _facts(gpu: Gpu) -> dict[str, Any]:
    processes = gpu.processes
    return {
        "uuid": gpu.uuid,
        "index": gpu.index,
        "sm_clock_mhz": gpu.sm_clock_mhz,
        "clock_reasons": gpu.clock_reasons,
        "temperature_c": gpu.temperature_c,
        "power_w": gpu.power_w,
        "processes": None
        if processes is None
        else sorted({p.pid for p in processes if not (p.name or "").startswith(MPS)}),
    }


def others(sample: Mapping[str, Any], *, allowed: int) -> str | None:
    """Which GPU has more processes than the trial itself, in words."""
    for gpu in sample["gpus"]:
        if gpu["processes"] is not None and len(gpu["processes"]) > allowed:
            return f"another process uses GPU {gpu['index']}"
    return None


def throttled(samples: list[dict[str, Any]], started_ns: int, ended_ns: int) -> str | None:
    """Why a GPU was slowed down between two times (unix ns), in words."""
    for sample in samples:
        if started_ns <= sample["unix_ns"] <= ended_ns:
            for gpu in sample["gpus"]:
                if reasons := VOIDING_REASONS & set(gpu["clock_reasons"] or ()):
                    return f"GPU {gpu['index']} was slowed down: {', '.join(sorted(reasons))}"
    return None


def path_of(trial: Path) -> Path:
    return trial / "surroundings.json"


def write(trial: Path, watch: Watch) -> None:
    write_json(
        path_of(trial), {"reason": watch.reason, "load_average": list(os.getloadavg()), "samples": watch.samples}
    )


def read(trial: Path) -> dict[str, Any]:
    """Raises `InputError` if they were not written, since the trial did not come to its end, or are none."""
    path = path_of(trial)
    document = read_json(path)
    try:
        msgspec.convert(document, _Surroundings)
    except msgspec.ValidationError as error:
        raise InputError(path, f"is not what a probe saw of its GPUs: {error}") from None
    return document


@contextmanager
def without(names: list[str]) -> Iterator[None]:
    """Takes variables out of this process's environment, which a launch hands on, for a while."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
