"""Findings about a pipeline: how idle its ranks are, and how much of that the schedule alone explains."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import TYPE_CHECKING

from harness.pipeline.timeline import bubbles
from harness.report.finding import Finding, Severity, of_time

if TYPE_CHECKING:
    from harness.report.build import Report

# Idle beyond what the schedule has at the measured costs, in percent of the step.
EXCESS_PCT = 5.0
EXCESS_HIGH_PCT = 20.0


def pipeline_findings(report: Report) -> Iterator[Finding]:
    """Means over ranks and traced steps."""
    pipeline = report.pipeline
    if pipeline is None or not pipeline.measured or not pipeline.expected:
        return
    measured = mean(b.pct for one in pipeline.measured for b in one.bubbles if b.pct is not None)
    expected = mean(b.pct for b in bubbles(pipeline.expected) if b.pct is not None)
    excess = measured - expected
    severity: Severity = "high" if excess > EXCESS_HIGH_PCT else "medium" if excess > EXCESS_PCT else "info"
    host = "" if pipeline.measured[-1].source == "device" else " (host time)"
    yield Finding(
        severity=of_time(severity, report.mode),
        title=f"Pipeline ranks are idle {measured:.0f} % of a step{host}, {expected:.0f} % of which is the schedule's",
        evidence={
            "measured_bubble_pct": measured,
            "expected_bubble_pct": expected,
            "excess_pct": excess,
        },
        where="all pipeline ranks and traced steps (means), mode " + report.mode,
        advice="Stages of unequal cost, late transfers or waiting in other dimensions: compare the grids of the "
        "Pipeline section, then move layers (pipeline.split, pipeline.first_stage_less_layers)."
        if severity != "info"
        else "More micro-batches or another schedule make the schedule's own share smaller.",
    )
