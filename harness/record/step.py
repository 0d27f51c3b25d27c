"""What is gathered while a step runs, and the row it becomes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.errors import UsageError
from harness.record.memory import MEASURES, NOTHING_KNOWN, UNKNOWN, Bytes, Reading, larger
from harness.record.wrappers import is_wrapper

_CURRENT_FIELDS = tuple(f"{measure}_bytes" for measure in MEASURES)
_PEAK_FIELDS = tuple(f"peak_{measure}_bytes" for measure in MEASURES)

Scalar = float | int | torch.Tensor


@dataclass(slots=True)
class Phase:
    """All passages of one name within a step, such as the forwards of its micro-batches."""

    wall_ns: int = 0
    count: int = 0
    peak: Bytes = UNKNOWN

    def row(self) -> dict[str, Any]:
        return {"wall_ns": self.wall_ns, "count": self.count, **peak_fields(self.peak)}


@dataclass(slots=True)
class OpenStep:
    number: int
    tags: list[str]
    started_unix_ns: int = 0
    started_ns: int = 0
    wall_ns: int = 0
    last: Reading = NOTHING_KNOWN
    peak: Bytes = UNKNOWN
    phases: dict[str, Phase] = field(default_factory=dict)
    open_phases: list[str] = field(default_factory=list)
    failed_phase: str | None = None
    values: dict[str, Scalar] = field(default_factory=dict)
    tokens: int | None = None

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

    def memory_fields(self) -> dict[str, Any]:
        return {
            **dict(zip(_CURRENT_FIELDS, self.last.current, strict=True)),
            **peak_fields(self.peak),
            "alloc_retries": self.last.alloc_retries,
            "ooms": self.last.ooms,
        }

    def read_values(self) -> dict[str, Any]:
        """loss, grad_norm (None if not logged) and, if there are others, `scalars`. JSON has no NaN and no infinity:
        those become None and a tag `non_finite_<name>`."""
        numbers: dict[str, float | None] = {"loss": None, "grad_norm": None}
        for name, value in self.values.items():
            number = float(value)
            if not math.isfinite(number):
                self.tags.append(f"non_finite_{name}")
            numbers[name] = number if math.isfinite(number) else None
        scalars = {name: number for name, number in numbers.items() if name not in ("loss", "grad_norm")}
        fields: dict[str, Any] = {"loss": numbers["loss"], "grad_norm": numbers["grad_norm"]}
        return {**fields, "scalars": scalars} if scalars else fields


def peak_fields(peak: Bytes) -> dict[str, int | None]:
    return dict(zip(_PEAK_FIELDS, peak, strict=True))
