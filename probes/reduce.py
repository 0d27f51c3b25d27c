"""One number per trial and metric. Warm-up is discarded; times come from steps without profiler and memory history."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.compare.measured import Measured, measure
from harness.compare.metrics import METRICS, Metric, Value, run_metrics
from harness.compare.steps import by_step
from harness.recording import Recording

RSS = Metric("peak_rss_bytes", "lower", "highest resident set of a rank's process in plain steps")

# Tokens per second and MFU are the step time again: testing them too would only cost power.
COMPARED: dict[str, Metric] = {
    **{
        name: METRICS[name]
        for name in (
            "step_wall_ns",
            "peak_allocated_bytes",
            "peak_active_bytes",
            "peak_reserved_bytes",
            "exposed_ns",
            "overlap_pct",
            "wait_pct",
        )
    },
    RSS.name: RSS,
}


def trial_metrics(directory: Path, warmup: int) -> dict[str, Value]:
    """Every metric of `COMPARED`. Raises `InputError` if the recording cannot be read."""
    measured = after_warmup(measure(directory), warmup)
    found = run_metrics(measured)
    return {name: found[name] if name in found else _resident(measured) for name in COMPARED}


def after_warmup(measured: Measured, warmup: int) -> Measured:
    """Without the first `warmup` steps; the last of them stays as the first step of the run, which no figure is of."""
    steps = measured.steps[max(0, warmup - 1) :]
    return replace(measured, steps=[{**steps[0], "plain": False}, *steps[1:]] if steps else [])


def step_wall_ns(recording: Recording, warmup: int) -> int | None:
    """Median over plain steps of the slowest rank's time."""
    walls = [step["wall_ns"] for step in by_step(recording)[warmup:] if step["plain"] and step["wall_ns"] is not None]
    return int(statistics.median(walls)) if walls else None


def losses(recording: Recording) -> list[float | None]:
    """Of every step, in order."""
    return [step["loss"] for step in by_step(recording)]


def _resident(measured: Measured) -> Value:
    """Only where no allocator tells the memory: on CUDA the host's resident set decides nothing."""
    if measured.mode != "cpu":
        return Value(value=None, reason="the device's allocator tells")
    plain: list[dict[str, Any]] = [step for step in measured.steps if step["plain"]]
    peaks = [peak for step in plain for rank in step["ranks"].values() if (peak := rank[RSS.name]) is not None]
    if not peaks:
        return Value(value=None, reason="not recorded")
    return Value(value=max(peaks), source="step rows (resident set)", spread=max(peaks) - min(peaks))
