"""One number per run and metric, the same in `report`, `compare` and gates.

A step's time is that of its slowest rank; a run's is the median over its plain steps (`steps.by_step`). A peak is the
highest over ranks and steps after the first, which has no optimizer states before its update. Figures of traces are
means over ranks and traced steps (rule `launch`) that the trace holds whole; those are profiled steps.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, Literal

from harness.compare.measured import Measured
from harness.compare.waits import waiting

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Metric:
    """What a metric is; its name carries the unit."""

    name: str
    better: Better
    what: str

    @property
    def is_bytes(self) -> bool:
        return self.name.endswith("_bytes")


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("step_wall_ns", "lower", "time of a step's slowest rank, median over plain steps"),
        Metric("tokens_per_s", "higher", "tokens per second and device of the slowest rank, median over plain steps"),
        Metric("mfu_pct", "higher", "model FLOP/s utilisation of the slowest rank, median over plain steps"),
        Metric("peak_allocated_bytes", "lower", "highest over ranks and steps after the first"),
        Metric("peak_active_bytes", "lower", "the same with freed blocks that cannot be reused yet"),
        Metric("peak_reserved_bytes", "lower", "what the allocator held from the driver"),
        Metric("traced_span_ns", "lower", "first start to last end of a traced step's events, mean"),
        Metric("compute_ns", "lower", "computing time of a traced step, mean"),
        Metric("comm_ns", "lower", "communicating time of a traced step, mean"),
        Metric("exposed_ns", "lower", "communication of a traced step with no kernel computing, mean"),
        Metric("overlap_pct", "higher", "share of communication hidden by compute, mean of the ranks' whole files"),
        Metric("wait_pct", "lower", "share of matched collectives' time spent waiting for the last rank to arrive"),
    )
}


NO_TRACE = "no trace"
"""Why a figure is unknown that only traces tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A run's figure. `value` is None where unknown, and `reason` then says why.

    `spread` is how far steps of the run differ, in the figure's unit: None where that is not known. `source` is what
    the figure was read from; figures of different sources do not compare.
    """

    value: int | float | None
    source: str | None = None
    spread: int | float | None = None
    reason: str | None = None


def run_metrics(measured: Measured) -> dict[str, Value]:
    """Every metric of `METRICS`, in that order."""
    found = {
        "step_wall_ns": _of_plain_steps(measured, "wall_ns"),
        "tokens_per_s": _of_plain_steps(measured, "tokens_per_s"),
        "mfu_pct": _of_plain_steps(measured, "mfu_pct"),
        "traced_span_ns": _of_traced_steps(measured, "span_ns"),
        "compute_ns": _of_traced_steps(measured, "compute_ns"),
        "comm_ns": _of_traced_steps(measured, "comm_ns"),
        "exposed_ns": _of_traced_steps(measured, "exposed_ns"),
        "overlap_pct": _overlap(measured),
        "wait_pct": _waiting(measured),
    }
    found |= {name: _peak(measured, name) for name, metric in METRICS.items() if metric.is_bytes}
    return {name: found[name] for name in METRICS}


def _of_plain_steps(measured: Measured, field: str) -> Value:
    if not measured.steps:
        return Value(value=None, reason="no step rows")
    if measured.mode == "rehearsal":
        return Value(value=None, reason="a rehearsal does not communicate, so it has no times")
    values = [item[field] for item in measured.steps if item["plain"] and item[field] is not None]
    if not values:
        plain = any(item["plain"] for item in measured.steps)
        return Value(value=None, reason="not recorded" if plain else "no step but the first, traced and tracked ones")
    middle = statistics.median(values)
    value = int(middle) if field.endswith("_ns") else middle
    return Value(value=value, source="step rows", spread=max(values) - min(values))


def _peak(measured: Measured, name: str) -> Value:
    """From step rows after the first where they state it, else from snapshots and memory events."""
    per_step = [
        (item["memory_source"], max(known))
        for item in measured.steps[1:]
        if (known := [peaks[name] for peaks in item["ranks"].values() if peaks[name] is not None])
    ]
    if per_step:
        values = [value for _, value in per_step]
        spread = max(values) - min(values) if len(values) > 1 else None
        sources = sorted({str(source) for source, _ in per_step})
        return Value(value=max(values), source=f"step rows ({', '.join(sources)})", spread=spread)
    devices: list[dict[str, Any]] = [d for file in (measured.memory or {"files": []})["files"] for d in file["devices"]]
    known = [device[name] for device in devices if device[name] is not None]
    if not known:
        return Value(value=None, reason="neither step rows after the first nor a memory history state it")
    # A replayed request is the program's own; what waits for a stream, and so what is reserved, depends on timing.
    fixed = name == "peak_allocated_bytes" or all(d["stacking"]["max_pending_bytes"] == 0 for d in devices)
    return Value(value=max(known), source="memory history", spread=0 if fixed else None)


def _of_traced_steps(measured: Measured, field: str) -> Value:
    if measured.complete_overlap is None:
        return Value(value=None, reason="no complete step in the traces" if measured.overlap else NO_TRACE)
    entries = measured.complete_overlap["ranks"]
    of_ranks = []
    for entry in entries:
        values = [step[field] for step in entry["steps"] if step["rule"] == "launch"]
        if values:
            of_ranks.append(statistics.mean(values))
    if not of_ranks:
        return Value(value=None, reason="the traces name no steps (ProfilerStep#N)")
    return Value(value=round(statistics.mean(of_ranks)), source=_source(entries))


def _overlap(measured: Measured) -> Value:
    if measured.complete_overlap is None:
        return Value(value=None, reason="no complete step in the traces" if measured.overlap else NO_TRACE)
    entries = measured.complete_overlap["ranks"]
    shares = [share for entry in entries if (share := entry["window"]["overlap_pct"]) is not None]
    if not shares:
        return Value(value=None, reason="no communication in the traces")
    return Value(value=statistics.mean(shares), source=_source(entries))


def _waiting(measured: Measured) -> Value:
    """Over the collectives of the complete steps: the rest is transfer, which no rank's lateness lengthens."""
    if measured.complete_overlap is None:
        return Value(value=None, reason="no complete step in the traces" if measured.overlap else NO_TRACE)
    cross_rank = measured.complete_overlap["cross_rank"]
    if cross_rank["aligned"] is None:
        return Value(value=None, reason="no collective that two ranks recorded")
    if cross_rank["aligned"] is False:
        return Value(value=None, reason="the ranks' clocks do not agree")
    wait_ns, transfer_ns = waiting(cross_rank["collectives"])
    if not wait_ns + transfer_ns:
        return Value(value=None, reason="collectives took no time")
    return Value(value=100 * wait_ns / (wait_ns + transfer_ns), source=_source(measured.complete_overlap["ranks"]))


def _source(entries: list[dict[str, Any]]) -> str:
    return f"traces ({' and '.join(sorted({str(entry['source']) for entry in entries}))} time)"
