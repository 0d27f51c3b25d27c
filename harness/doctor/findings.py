"""What `meshscope doctor` says, as data: the same for the terminal and for `--json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from harness.nvml import Gpu
from harness.variables import Variable

Group = Literal["software", "torch", "GPUs", "host", "environment", "optional"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line: `fix` is the command or step that turns `missing` or `warning` into `ok`.

    `missing` keeps a mode from running, `warning` distorts what a run measures, `optional` is neither.
    """

    group: Group
    name: str
    state: Literal["ok", "missing", "warning", "optional"]
    value: str
    fix: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A GPU and the CUDA devices (`cuda:0`, …) that this environment makes of it: none if it hides it."""

    gpu: Gpu
    cuda_devices: list[int]

    def to_json(self) -> dict[str, Any]:
        return {"cuda_devices": self.cuda_devices, **msgspec.to_builtins(self.gpu)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeState:
    """Whether runs of a mode can start here.

    `max_ranks` is None if nothing but memory limits their number, or if none can start; `reason` says why none can.
    """

    available: bool
    max_ranks: int | None = None
    reason: str | None = None


@dataclass(kw_only=True, slots=True)
class Report:
    checks: list[Check] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    modes: dict[str, ModeState] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def mode(self) -> str | None:
        """The mode that `meshscope run` picks for one rank if none is asked for."""
        return next((mode for mode in ("real", "cpu") if self.modes[mode].available), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "mode": self.mode,
            "checks": msgspec.to_builtins(self.checks),
            "variables": msgspec.to_builtins(self.variables),
            "gpus": [device.to_json() for device in self.devices],
            "modes": msgspec.to_builtins(self.modes),
            "errors": self.errors,
        }
