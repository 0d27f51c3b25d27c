"""What a report means, in plain words: pure functions from a report to findings."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.report.compilation import compilation_findings
from harness.report.finding import NOT_A_CLUSTER, SEVERITIES, Finding, of_time, ranks_text
from harness.report.findings_communication import communication_findings
from harness.report.findings_host import host_findings
from harness.report.findings_memory import memory_findings
from harness.report.findings_pipeline import pipeline_findings
from harness.report.findings_settings import setting_findings
from harness.report.float8 import float8_findings
from harness.report.reserved import reserved_findings
from harness.text import counted, milliseconds

if TYPE_CHECKING:
    from harness.report.build import Report

# A prediction off by less is as good as it says it is; by more than the second, something is not as configured.
PREDICTION_PCT = 2.0
PREDICTION_HIGH_PCT = 10.0
# Steps with the garbage collector that take this much longer are worth a word.
GC_PCT = 5.0


def find(report: Report) -> list[Finding]:
    """All findings, the gravest first; within a severity in the order in which a run is read."""
    found = [
        *run_state(report),
        *memory_findings(report),
        *reserved_findings(report),
        *setting_findings(report),
        *float8_findings(report),
        *compilation_findings(report),
        *communication_findings(report),
        *host_findings(report),
        *pipeline_findings(report),
        *prediction(report),
        *steps(report),
        *mode(report),
    ]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def run_state(report: Report) -> Iterator[Finding]:
    """A run that did not end well, and ranks or files that are not there."""
    recording, stands = report.recording, report.standing
    if recording is not None and stands is not None and (stands.abandoned or stands.state in ("failed", "invalid")):
        figures = "nothing was measured" if stands.before_first_step else "figures are those of the steps before"
        yield Finding(
            severity="high",
            title={"failed": "The run ", "invalid": "The run is "}.get(str(stands.state), "") + stands.headline(),
            evidence={"steps": len(report.steps)},
            where=ranks_text(list(recording.failed_ranks)) if recording.failed_ranks else "the run",
            advice=f"logs/ holds the output of each rank; {figures}.",
        )
    if recording is not None and recording.missing_ranks and stands is not None and not stands.before_first_step:
        missing: list[int | None] = [*recording.missing_ranks]
        yield Finding(
            severity="high",
            title=f"{counted(len(missing), 'rank')} that should have recorded without a step",
            evidence={"missing_ranks": len(missing), "recorded_ranks": len(report.ranks)},
            where=ranks_text(missing),
            advice="Figures over ranks are over those that are there; the slowest rank may be a missing one.",
        )
    if recording is None and report.overlap is not None:
        traced = {entry["rank"] for entry in report.overlap["ranks"]}
        worlds = {capture.world_size for capture in report.captures} - {None}
        if len(worlds) == 1 and None not in traced and len(traced) < (world := worlds.pop() or 0):
            yield Finding(
                severity="low",
                title=f"{len(traced)} of {world} ranks {'has' if len(traced) == 1 else 'have'} a trace here",
                evidence={"traced_ranks": len(traced), "world_size": world},
                where=ranks_text(list(traced)),
                advice="Means are over these ranks; waiting for a rank without a trace cannot be told from transfer.",
            )


def prediction(report: Report) -> Iterator[Finding]:
    """How far the ledger's peak is from the measured one, and collectives that are not as configured."""
    if report.prediction is not None:
        measured = [rank for rank in report.prediction.ranks if rank.error_pct is not None]
        if measured:
            worst = max(measured, key=lambda rank: abs(rank.error_pct or 0))
            error = abs(worst.error_pct or 0)
            off = error > PREDICTION_PCT
            yield Finding(
                severity="high" if error > PREDICTION_HIGH_PCT else "medium" if off else "info",
                title=f"Measured peak memory is {error:.2f} % off the prediction"
                if off
                else f"Peak memory is as predicted, within {error:.2f} %",
                evidence={
                    "predicted_peak_allocated_bytes": worst.peak_allocated_bytes,
                    "measured_peak_allocated_bytes": worst.measured_peak_allocated_bytes,
                    "error_pct": worst.error_pct,
                },
                where=f"rank {worst.rank}, predicted at {worst.at}",
                advice="Something holds memory that the configuration does not explain (or frees earlier): compare "
                "the ledger's lines with the peak's composition."
                if off
                else "Other settings can be sized with meshscope ledger before they are run.",
            )
    differing = [row for row in report.communication if row.agree is False]
    if differing:
        first = differing[0]
        yield Finding(
            severity="medium",
            title="One kind of collective is not what the configuration says"
            if len(differing) == 1
            else f"{len(differing)} kinds of collectives are not what the configuration says",
            evidence={
                "predicted_count": first.predicted_count,
                "measured_count": first.measured_count,
                "predicted_bytes": first.predicted_bytes,
                "measured_bytes": first.measured_bytes,
            },
            where=", ".join(
                f"{row.kind} on {row.dimension}"
                + ("" if row.pipeline_rank is None else f" of pipeline rank {row.pipeline_rank}")
                for row in differing
            ),
            advice="A trace that begins or ends within a step lacks some; otherwise the run does not do what its "
            "configuration says.",
        )


def steps(report: Report) -> Iterator[Finding]:
    """The first step, steps with the garbage collector, and what is left out of the median."""
    plain = [item["wall_ns"] for item in report.steps if item["plain"] and item["wall_ns"]]
    if not plain:
        if report.steps and report.mode != "rehearsal":
            yield Finding(
                severity="low",
                title="No step tells the time of training alone",
                evidence={"steps": len(report.steps)},
                where="steps",
                advice="All are the first one or were traced, tracked or exported; run a few steps more.",
            )
        return
    median = statistics.median(plain)
    collected = [i["wall_ns"] for i in report.steps if i["plain"] and i["wall_ns"] and "gc" in i["tags"]]
    others = [i["wall_ns"] for i in report.steps if i["plain"] and i["wall_ns"] and "gc" not in i["tags"]]
    if collected and others:
        slower = 100 * (statistics.median(collected) / statistics.median(others) - 1)
        if slower > GC_PCT:
            yield Finding(
                severity=of_time("medium" if slower > 20 else "low", report.mode),
                title=f"Steps with Python's garbage collector take {slower:.0f} % longer",
                evidence={
                    "gc_step_wall_ns": int(statistics.median(collected)),
                    "step_wall_ns": int(statistics.median(others)),
                    "gc_steps": len(collected),
                },
                where="steps tagged gc",
                advice="Collect more rarely; all ranks wait for the slowest, so let them collect in the same step.",
            )
    first = report.steps[0]
    if first["wall_ns"]:
        left_out = len(report.steps) - len(plain)
        yield Finding(
            severity="info",
            title=f"The first step took {first['wall_ns'] / median:.1f} times the median and is not counted",
            evidence={"first_step_wall_ns": first["wall_ns"], "step_wall_ns": int(median), "left_out_steps": left_out},
            where=f"step {first['step']}",
            advice=f"Median {milliseconds(int(median))} ms of {len(plain)} plain steps; the first, traced, tracked and "
            "following steps are left out. Its peak lacks the optimizer's states and is left out, too.",
        )


def mode(report: Report) -> Iterator[Finding]:
    if why := NOT_A_CLUSTER.get(report.mode):
        yield Finding(
            severity="info",
            title=f"Mode {report.mode}: {why}",
            evidence={},
            where="all times",
            advice="Take times from a run with a GPU per rank.",
        )
