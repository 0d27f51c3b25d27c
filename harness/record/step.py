"""What is gathered while a step runs, and the row it becomes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import UNSET

from harness.errors import UsageError
from harness.record.memory import MEASURES, NOTHING_KNOWN, UNKNOWN, Bytes, Reading, larger
from harness.record.throughput import Throughput
from harness.record.timing import Scalar, StepClock
from harness.record.wrappers import is_wrapper
from harness.recording import PhaseRow, StepRow

_CURRENT_FIELDS = tuple(f"{measure}_bytes" for measure in MEASURES)
_PEAK_FIELDS = tuple(f"peak_{measure}_bytes" for measure in MEASURES)

UNFINISHED = "unfinished"


@dataclass(slots=True)
class Phase:
    """All passages of one name within a step, such as the forwards of its micro-batches."""

    wall_ns: int = 0
    count: int = 0
    peak: Bytes = UNKNOWN


@dataclass(slots=True)
class Step:
    """A step while it runs and until its row is written; the fields after `tokens` are set at its end."""

    number: int
    tags: list[str]
    clock: StepClock
    started_unix_ns: int = 0
    last: Reading = NOTHING_KNOWN
    peak: Bytes = UNKNOWN
    phases: dict[str, Phase] = field(default_factory=dict)
    open_phases: list[str] = field(default_factory=list)
    failed_phase: str | None = None
    values: dict[str, Scalar] = field(default_factory=dict)
    tokens: int | None = None
    memory_source: str = ""
    rss_bytes: int | None = None
    peak_rss_bytes: int | None = None
    nvml_process_bytes: int | None = None
    nvml_device_bytes: int | None = None
    peak_composition: list[dict[str, Any]] | None = None

    def take(self, reading: Reading) -> None:
        """Counts a reading's peaks for the step and for every phase that was open since the reading before."""
        self.last = reading
        if reading.peak is UNKNOWN:
            return
        self.peak = larger(self.peak, reading.peak)
        for name in self.open_phases:
            phase = self.phases[name]
            phase.peak = larger(phase.peak, reading.peak)

    def log(self, values: Mapping[str, Scalar | None]) -> None:
        """Keeps scalars for the row; tensors are read when the step has ended, without their graph until then."""
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                if is_wrapper(type(value)):
                    raise UsageError(f"recorder.log({name}=…) got a {type(value).__name__}: pass {name}.full_tensor()")
                if value.numel() != 1:
                    raise UsageError(f"recorder.log({name}=…) takes one number, got shape {tuple(value.shape)}")
                value = value.detach()
            if value is not None:
                self.values[name] = value

    def forget(self, names: Collection[str]) -> None:
        """Lets logged numbers go that mean nothing."""
        self.values = {name: value for name, value in self.values.items() if name not in names}

    def stop_clock(self) -> None:
        self.clock.stop(self.values)
        self.values = {}  # tensors must not live longer than the step

    def row(self, throughput: Throughput, *, finished: bool = True) -> StepRow:
        """The step's row; without `finished`, the device never said that it was done, and what only it knows is
        None."""
        wall_ns = self.clock.wall_ns() if finished else None
        numbers = self._finite(self.clock.numbers()) if finished else {}
        if not finished:
            self.tags.append(UNFINISHED)
        last, peak = self.last, self.peak
        return StepRow(
            step=self.number,
            started_unix_ns=self.started_unix_ns,
            wall_ns=wall_ns,
            wall_source=self.clock.source,
            tokens=self.tokens,
            **throughput.of_step(self.tokens, wall_ns),
            loss=numbers.pop("loss", None),
            grad_norm=numbers.pop("grad_norm", None),
            scalars=numbers or UNSET,
            memory_source=self.memory_source,
            allocated_bytes=last.current[0],
            active_bytes=last.current[1],
            reserved_bytes=last.current[2],
            requested_bytes=last.current[3],
            peak_allocated_bytes=peak[0],
            peak_active_bytes=peak[1],
            peak_reserved_bytes=peak[2],
            peak_requested_bytes=peak[3],
            alloc_retries=last.alloc_retries,
            ooms=last.ooms,
            phases={name: PhaseRow(phase.wall_ns, phase.count, *phase.peak) for name, phase in self.phases.items()},
            nvml_process_bytes=self.nvml_process_bytes,
            nvml_device_bytes=self.nvml_device_bytes,
            rss_bytes=self.rss_bytes,
            peak_rss_bytes=self.peak_rss_bytes,
            tags=self.tags,
            peak_composition=UNSET if self.peak_composition is None else self.peak_composition,
        )

    def memory_fields(self) -> dict[str, Any]:
        """Those of a step that failed and has no row."""
        return {
            **dict(zip(_CURRENT_FIELDS, self.last.current, strict=True)),
            **dict(zip(_PEAK_FIELDS, self.peak, strict=True)),
            "alloc_retries": self.last.alloc_retries,
            "ooms": self.last.ooms,
        }

    def _finite(self, logged: Mapping[str, float]) -> dict[str, float | None]:
        """JSON has no NaN and no infinity: those become None and a tag `non_finite_<name>`."""
        numbers: dict[str, float | None] = {}
        for name, number in logged.items():
            finite = math.isfinite(number)
            numbers[name] = number if finite else None
            if not finite:
                self.tags.append(f"non_finite_{name}")
        return numbers
