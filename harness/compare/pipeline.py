"""The schedule of a pipeline as it was planned and as its traced steps carried it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from harness.config import Trainer
from harness.pipeline.plan import Plan, plan
from harness.pipeline.timeline import UNIT_COSTS, Bubble, Span, Timeline, bubbles, planned
from harness.trace import Capture, complete


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSchedule:
    """One traced step of the ranks that form one pipeline: `timeline` by global rank, unix ns. `source`: device, or
    host, whose times are no device's. `stride`: ranks of a pipeline rank, None where no plan says."""

    step: int
    source: str
    timeline: Timeline
    stride: int | None = None

    @property
    def bubbles(self) -> list[Bubble]:
        return bubbles(self.timeline)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """`plan` is None for traces of another trainer. `costs_ns` are the median measured durations of each kind,
    `stage_costs_ns` those of each stage and kind. `even` is planned with the former: the bubble of the schedule alone;
    `expected` with the latter: what unequal stages add. Both let transfers take no time."""

    plan: Plan | None
    planned: Timeline
    costs_ns: Mapping[str, int]
    stage_costs_ns: Mapping[tuple[int, str], int]
    even: Timeline
    expected: Timeline
    measured: Sequence[MeasuredSchedule]
    passes: int

    def to_json(self) -> dict[str, Any]:
        """`pipeline` of `report --json`; times of `planned` in units of a forward, all others in ns."""
        whole = self.plan
        return {
            "schedule": whole.name if whole else None,
            "micro_batches": whole.micro_batches if whole else None,
            "passes": self.passes,
            "stages": [
                {"stage": stage, "pipeline_rank": whole.rank_of[stage], "modules": part.names}
                for stage, part in enumerate(whole.parts)
            ]
            if whole
            else [],
            "planned": {"costs": UNIT_COSTS, "ranks": _ranks(self.planned, "pipeline_rank", "")},
            "costs_ns": dict(self.costs_ns),
            "stage_costs_ns": [
                {"stage": stage, "kind": kind, "ns": cost} for (stage, kind), cost in self.stage_costs_ns.items()
            ],
            "even": {"ranks": _ranks(self.even, "pipeline_rank", "_ns")},
            "expected": {"ranks": _ranks(self.expected, "pipeline_rank", "_ns")},
            "measured": [
                {"step": one.step, "source": one.source, "ranks": _measured_ranks(one)} for one in self.measured
            ],
        }


def pipeline_of(config: Trainer.Config | None, captures: Sequence[Capture]) -> Pipeline | None:
    """None where neither the configuration nor a trace has a pipeline. Steps that a trace holds in part are left
    out."""
    whole = plan(config) if config is not None and config.parallelism.pp > 1 else None
    measured = _measured(whole, config, captures)
    if whole is None and not measured:
        return None
    costs, stage_costs = _costs(measured)
    known = whole is not None and all(a.kind in costs for row in whole.computation for p in row for a in p.steps)
    return Pipeline(
        plan=whole,
        planned=planned(whole) if whole else {},
        costs_ns=costs,
        stage_costs_ns=stage_costs,
        even=planned(whole, costs) if whole and known else {},
        expected=planned(whole, costs, stage_costs=stage_costs) if whole and known else {},
        measured=measured,
        passes=config.training.accumulation_steps if config else 1,
    )


def _measured(whole: Plan | None, config: Trainer.Config | None, captures: Sequence[Capture]) -> list[MeasuredSchedule]:
    """By step and pipeline; ranks of one pipeline are as far apart as a pipeline rank has ranks."""
    apart = config.world_size // whole.ranks if whole and config else None
    found: dict[tuple[int, int], dict[int, list[Span]]] = {}
    sources: dict[tuple[int, int], str] = {}
    for capture in complete(captures):
        if capture.rank is None:
            continue
        for one in capture.pipeline:
            if one.step >= 0:
                key = capture.steps[one.step].number, capture.rank % apart if apart else 0
                span = Span(one.action, capture.base_ns + one.start_ns, capture.base_ns + one.end_ns)
                found.setdefault(key, {}).setdefault(capture.rank, []).append(span)
                sources[key] = capture.devices[0].activity.source
    return [
        MeasuredSchedule(step=step, source=sources[step, number], timeline=dict(sorted(rows.items())), stride=apart)
        for (step, number), rows in sorted(found.items())
    ]


def _costs(measured: Sequence[MeasuredSchedule]) -> tuple[dict[str, int], dict[tuple[int, str], int]]:
    """Medians of each kind, and of each stage and kind: 0 for what a traced stage never computed, such as the I of the
    first one, which has no input to differentiate and leaves all to W."""
    kinds: dict[str, list[int]] = {}
    stages: dict[tuple[int, str], list[int]] = {}
    for one in measured:
        for row in one.timeline.values():
            for action, start, end in row:
                kinds.setdefault(action.kind, []).append(end - start)
                stages.setdefault((action.stage, action.kind), []).append(end - start)
    traced = sorted({stage for stage, _ in stages})
    return (
        {kind: int(median(values)) for kind, values in sorted(kinds.items())},
        {(stage, kind): int(median(stages.get((stage, kind), [0]))) for stage in traced for kind in sorted(kinds)},
    )


def _measured_ranks(one: MeasuredSchedule) -> list[dict[str, Any]]:
    ranks = _ranks(one.timeline, "rank", "_ns")
    return [{**entry, "pipeline_rank": entry["rank"] // one.stride if one.stride else None} for entry in ranks]


def _ranks(timeline: Timeline, name: str, unit: str) -> list[dict[str, Any]]:
    return [
        {
            name: bubble.rank,
            f"busy{unit}": bubble.busy,
            f"span{unit}": bubble.span,
            "bubble_pct": bubble.pct,
            "actions": [
                {"action": str(action), f"start{unit}": start, f"end{unit}": end}
                for action, start, end in timeline[bubble.rank]
            ],
        }
        for bubble in bubbles(timeline)
    ]
