"""Findings about hosts: devices that wait for the next launch, and how much of that is the profiler's own doing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness.report.finding import Finding, Severity, of_time, ranks_text
from harness.text import milliseconds

if TYPE_CHECKING:
    from harness.report.build import Report

# Waiting for the host, percent of a traced step.
STARVED_HIGH_PCT = 20.0
STARVED_MEDIUM_PCT = 5.0


def host_findings(report: Report) -> Iterator[Finding]:
    """The rank whose device waits longest for its host. Plain steps tell whether they wait as well: a launch costs the
    host more under the profiler."""
    starved = [item for item in report.mean_parts if item["idle_host_ns"] and item["span_ns"]]
    if not starved:
        return
    worst = max(starved, key=share_pct)
    share = share_pct(worst)
    if share < STARVED_MEDIUM_PCT:
        return
    like = [item["rank"] for item in starved if share_pct(item) >= STARVED_MEDIUM_PCT]
    plain = report.metrics["step_wall_ns"].value
    evidence = {
        "idle_host_ns": worst["idle_host_ns"],
        "idle_host_pct": share,
        "traced_span_ns": worst["span_ns"],
        "step_wall_ns": plain,
    }
    where = f"{ranks_text([worst['rank']])}, mean of its traced steps, mode {report.mode}"
    if len(like) > 1:
        where += f"; more than {STARVED_MEDIUM_PCT:.0f} %: {ranks_text(like)}"
    if plain is not None and profilers_own(worst, plain):
        yield Finding(
            severity="low",
            title=f"The profiler's own cost on the host holds up the device, {share:.0f} % of a traced step",
            evidence=evidence,
            where=where,
            advice=f"A plain step takes {milliseconds(int(plain))} ms, a traced one {milliseconds(worst['span_ns'])}: "
            "exposed communication and waiting are larger in traces than without. Judge settings by plain steps.",
        )
        return
    severity: Severity = "high" if share > STARVED_HIGH_PCT and plain is not None else "medium"
    yield Finding(
        severity=of_time(severity, report.mode),
        title=f"The device waits for its host {share:.0f} % of a traced step: nothing is launched",
        evidence=evidence,
        where=where,
        advice="Kernels end before the host has launched the next: larger micro-batches, torch.compile, CUDA graphs, a "
        "core for each rank's thread, no .item() or print of a tensor in the step."
        + ("" if plain is not None else " The profiler adds to it, and without plain steps how much is not known."),
    )


def profilers_own(item: dict[str, Any], plain_ns: float) -> bool:
    """Whether plain steps lack most of the waiting that traced steps have."""
    return bool(plain_ns < item["span_ns"] - item["idle_host_ns"] / 2)


def why_late(item: dict[str, Any], plain_ns: float | None) -> str | None:
    """What makes a rank late whose device waits for its host; None where it hardly waits."""
    share = share_pct(item)
    if share < STARVED_MEDIUM_PCT:
        return None
    waits = f"Its device waits for its host {share:.0f} % of a traced step"
    if plain_ns is None:
        return f"{waits}; without plain steps how much of it is the profiler's cost is not known."
    if profilers_own(item, plain_ns):
        return f"{waits}, most of it the profiler's cost on that host: plain steps do not wait so."
    return f"{waits}, and most of that in plain steps too: its host launches too late, the GPU is not slow."


def share_pct(item: dict[str, Any]) -> float:
    """Waiting for the host, percent of the mean traced step."""
    return 100 * float(item["idle_host_ns"]) / float(item["span_ns"])
