"""When the actions of a schedule happen: planned for given costs, or as they were measured; and the bubble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from harness.pipeline.actions import Action
from harness.pipeline.plan import Plan

UNIT_COSTS: dict[str, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""A backward computes two gradients where a forward computes one product."""


class Span(NamedTuple):
    """One computation on a rank, [start, end) in the unit of the costs, or nanoseconds."""

    action: Action
    start: int
    end: int


class Bubble(NamedTuple):
    """Of one rank: how long it computes, of the time from the first start to the last end over all ranks."""

    rank: int
    busy: int
    span: int

    @property
    def pct(self) -> float | None:
        """100 · (span - busy) / span; None without a span."""
        return 100 * (self.span - self.busy) / self.span if self.span else None


Timeline = dict[int, list[Span]]
"""Computations of each pipeline rank in order of their starts."""


def planned(
    plan: Plan,
    costs: Mapping[str, int] = UNIT_COSTS,
    *,
    stage_costs: Mapping[tuple[int, str], int] | None = None,
    transfer: int = 0,
) -> Timeline:
    """Every computation as early as its rank's order and its inputs allow.

    `costs`: of F, B, I and W, one unit for all; `stage_costs`: the same of single stages and kinds, instead. Where B
    takes as long as I and W together, splitting it changes the order alone. `transfer`: what a tensor takes from one
    rank to another; it occupies neither. The parts of an overlapped action follow one another.
    """
    own = stage_costs or {}
    ends: dict[Action, int] = {}
    found: Timeline = {rank: [] for rank in range(plan.ranks)}
    free = [0] * plan.ranks
    waiting = [[part for action in row for part in action.steps] for row in plan.computation]
    at = [0] * plan.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(waiting):
            while at[rank] < len(row):
                action = row[at[rank]]
                ready = _ready(action, plan, ends, transfer)
                if ready is None:
                    break
                start = max(free[rank], ready)
                free[rank] = ends[action] = start + own.get((action.stage, action.kind), costs[action.kind])
                found[rank].append(Span(action, start, free[rank]))
                at[rank] += 1
                moved = True
    return found


def _ready(action: Action, plan: Plan, ends: Mapping[Action, int], transfer: int) -> int | None:
    """When the input of `action` is on its rank; None as long as that is not known."""
    stage, number = action.stage, action.micro_batch
    if action.kind == "F":
        sources = [Action(stage - 1, "F", number)] if stage else []
    elif action.kind in ("B", "I") and stage + 1 < len(plan.parts):
        sources = [Action(stage + 1, "B", number), Action(stage + 1, "I", number)]
    else:
        return 0
    if not sources:
        return 0
    known = [source for source in sources if source in ends]
    if not known:
        return None
    crosses = plan.rank_of[known[0].stage] != plan.rank_of[stage]
    return ends[known[0]] + (transfer if crosses else 0)


def bubbles(timeline: Timeline) -> list[Bubble]:
    """One per rank of the timeline; overlapping spans of a rank count once."""
    spans = [span for row in timeline.values() for span in row]
    span = max((s.end for s in spans), default=0) - min((s.start for s in spans), default=0)
    return [Bubble(rank, _covered(row), span) for rank, row in sorted(timeline.items())]


def _covered(row: Sequence[Span]) -> int:
    busy, reach = 0, None
    for _, start, end in sorted(row, key=lambda s: s.start):
        begin = start if reach is None else max(start, reach)
        busy += max(0, end - begin)
        reach = end if reach is None else max(reach, end)
    return busy
