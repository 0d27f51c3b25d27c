"""A pipeline's schedule in a report: bubbles of every rank, and planned and measured grids."""

from __future__ import annotations

from collections.abc import Iterator

from harness.compare.pipeline import Pipeline
from harness.pipeline.grid import LEGEND, grid
from harness.pipeline.plan import Plan
from harness.pipeline.timeline import Timeline, bubbles, planned
from harness.text import counted, in_ranges, percent, table

RANKS_SHOWN = 16
"""A grid has one line a rank."""


def describe(plan: Plan, passes: int) -> str:
    """`1F1B: 2 stages on 2 pipeline ranks, 4 micro-batches`."""
    often = "" if passes == 1 else f", {passes} passes a step"
    return (
        f"{plan.name}: {counted(len(plan.parts), 'stage')} on {counted(plan.ranks, 'pipeline rank')}, "
        f"{counted(plan.micro_batches, 'micro-batch').replace('batchs', 'batches')}{often}"
    )


def modules(plan: Plan, rank: int) -> str:
    """What a pipeline rank holds, by stage: `0: tok_embeddings, layers 0–1; 2: layers 4–5`."""
    found = []
    for stage in plan.stages_of(rank):
        part = plan.parts[stage]
        ends = (["tok_embeddings"] if part.embedding else [], ["norm"] if part.norm else [])
        plural = "s" if len(part.layers) > 1 else ""
        layers = [f"layer{plural} {in_ranges(part.layers)}"] if part.layers else []
        found.append(f"{stage}: {', '.join([*ends[0], *layers, *ends[1], *(['lm_head'] if part.head else [])])}")
    return "; ".join(found)


def plan_text(plan: Plan, passes: int) -> Iterator[str]:
    """Of a prediction: what each pipeline rank holds, its bubble and the grid."""
    timeline = planned(plan)
    yield f"Pipeline, {describe(plan, passes)}; bubble of the schedule alone (a backward takes two forwards)"
    rows = [[str(b.rank), percent(b.pct), f" {modules(plan, b.rank)}"] for b in bubbles(timeline)]
    yield from table(["pp rank", "bubble", " stages"], rows, last_left=True)
    yield from _grid(timeline)


def render(pipeline: Pipeline) -> Iterator[str]:
    """Bubbles planned, with the measured costs of all stages and of each, and measured; then grids of the plan and of
    the last traced step."""
    plan = pipeline.plan
    if not pipeline.measured:
        yield from plan_text(plan, pipeline.passes) if plan is not None else ()
        return
    if plan is not None:
        yield f"Pipeline, {describe(plan, pipeline.passes)}"
        even, expected = ({b.rank: b.pct for b in bubbles(line)} for line in (pipeline.even, pipeline.expected))
        rows = [
            [str(b.rank), *map(percent, (b.pct, even.get(b.rank), expected.get(b.rank))), f" {modules(plan, b.rank)}"]
            for b in bubbles(pipeline.planned)
        ]
        headers = ["pp rank", "planned bubble", "at measured costs", "of each stage", " stages"]
        yield from table(headers, rows, last_left=True)
    else:
        yield "Pipeline, as traced"
    last = pipeline.measured[-1]
    costs = ", ".join(f"{kind} {cost / 1e6:.3f} ms" for kind, cost in pipeline.costs_ns.items())
    yield f"  measured bubble of traced steps, {last.source} time; median costs: {costs}"
    steps = list(dict.fromkeys(one.step for one in pipeline.measured))
    measured: dict[int, dict[int, float | None]] = {}
    for one in pipeline.measured:
        for bubble in one.bubbles:
            measured.setdefault(bubble.rank, {})[one.step] = bubble.pct
    rows = [[str(rank), *(percent(by.get(step)) for step in steps)] for rank, by in sorted(measured.items())]
    yield from table(["rank", *(f"step {step}" for step in steps)], rows[:RANKS_SHOWN])
    if plan is not None:
        yield "  planned, a backward as long as two forwards:"
        yield from _grid(pipeline.planned)
    yield f"  measured, step {last.step}, {max(b.span for b in last.bubbles) / 1e6:.3f} ms:"
    yield from _grid(last.timeline)


def _grid(timeline: Timeline) -> Iterator[str]:
    lines = grid(timeline)
    shown = list(lines)[:RANKS_SHOWN]
    width = max(len(str(rank)) for rank in shown)
    yield from (f"    {rank:>{width}}  {lines[rank]}" for rank in shown)
    if len(lines) > len(shown):
        yield f"    and {counted(len(lines) - len(shown), 'rank')} more: --json"
    yield f"    {LEGEND}"
