"""Findings about a pipeline: how idle its ranks are; the schedule's share of that, unequal stages', and waiting."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import TYPE_CHECKING

from harness.pipeline.timeline import bubbles
from harness.report.finding import Finding, Severity, of_time
from harness.text import milliseconds

if TYPE_CHECKING:
    from harness.compare.pipeline import Pipeline
    from harness.report.build import Report

# Idle beyond what the schedule has with equal stages, in percent of the step.
EXCESS_PCT = 5.0
EXCESS_HIGH_PCT = 20.0


def pipeline_findings(report: Report) -> Iterator[Finding]:
    """Means over ranks and traced steps."""
    pipeline = report.pipeline
    if pipeline is None or not pipeline.measured or not pipeline.expected:
        return
    measured = mean(b.pct for one in pipeline.measured for b in one.bubbles if b.pct is not None)
    schedule, expected = (
        mean(b.pct for b in bubbles(timeline) if b.pct is not None) for timeline in (pipeline.even, pipeline.expected)
    )
    excess, unequal, waiting = measured - schedule, expected - schedule, measured - expected
    severity: Severity = "high" if excess > EXCESS_HIGH_PCT else "medium" if excess > EXCESS_PCT else "info"
    host = "" if pipeline.measured[-1].source == "device" else " (host time)"
    parts = f"{schedule:.0f} % the schedule's, {max(0, unequal):.0f} % unequal stages, {max(0, waiting):.0f} % waiting"
    yield Finding(
        severity=of_time(severity, report.mode),
        title=f"Pipeline ranks are idle {measured:.0f} % of a step{host}: {parts}",
        evidence={
            "measured_bubble_pct": measured,
            "schedule_bubble_pct": schedule,
            "unequal_stages_pct": unequal,
            "waiting_pct": waiting,
        },
        where="all pipeline ranks and traced steps (means), mode " + report.mode,
        advice=_advice(pipeline, severity, unequal, waiting),
    )


def _advice(pipeline: Pipeline, severity: Severity, unequal: float, waiting: float) -> str:
    if severity == "info":
        return "More micro-batches or another schedule make the schedule's own share smaller."
    if unequal < waiting:
        return "Late transfers, or waiting in other dimensions: compare the grids of the Pipeline section."
    whole: dict[int, int] = {}
    for (stage, _), cost in pipeline.stage_costs_ns.items():
        whole[stage] = whole.get(stage, 0) + cost
    most, least = max(whole, key=lambda stage: whole[stage]), min(whole, key=lambda stage: whole[stage])
    costs = f"stage {most} takes {milliseconds(whole[most])} ms, stage {least} {milliseconds(whole[least])} ms"
    return f"Of a micro-batch {costs}: move layers (pipeline.split, first_stage_less_layers, last_stage_less_layers)."
