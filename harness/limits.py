"""Numbers that no run can have, whatever the rest of its configuration says. Free of torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from harness.errors import UsageError

LARGEST = 10**12
"""More than any size, count or time in a configuration; products of a few still fit what counts bytes."""
LARGEST_OF = {"world_size": 131_072, "model.n_layers": 10_000, "training.accumulation_steps": 10_000}
"""What is looped over, one by one, to predict memory; larger than any cluster, model and step."""
SEEDS = range(-(2**63), 2**64)
"""What torch.manual_seed takes."""
MAY_BE_INFINITE = frozenset({"training.max_norm"})  # gradients are then not clipped
AT_LEAST_0 = frozenset({"optimizer.eps", "optimizer.weight_decay", "model.norm_eps"})
BELOW_1 = frozenset({"optimizer.beta1", "optimizer.beta2"})  # torch.optim.AdamW: 0 <= beta < 1
ABOVE_0 = frozenset({"model.rope_theta", "recorder.peak_tflops"})


def require_possible(config: Any) -> None:
    """Raises `UsageError` naming the field for a number that is not finite, absurdly large, or outside its domain."""
    for name, value in _numbers(config, ""):
        if name == "training.seed":
            _require(value in SEEDS, name, value, "a 64-bit number")
        elif isinstance(value, int):
            most = LARGEST_OF.get(name, LARGEST)
            _require(abs(value) <= most, name, value, f"at most {most:,}")
        else:
            _require(math.isfinite(value) or name in MAY_BE_INFINITE, name, value, "a finite number")
        _require(name not in AT_LEAST_0 or value >= 0, name, value, "0 or above")
        _require(name not in BELOW_1 or 0 <= value < 1, name, value, "in [0, 1)")
        _require(name not in ABOVE_0 or value > 0, name, value, "above 0")


def _numbers(config: Any, prefix: str) -> Iterator[tuple[str, int | float]]:
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def _require(holds: bool, name: str, value: float, what: str) -> None:
    if not holds:
        raise UsageError(f"{name}={value} must be {what}")
