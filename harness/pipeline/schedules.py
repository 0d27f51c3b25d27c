"""The computation of every named schedule, as a table.

Each is the published schedule as torch runs it (torch/distributed/pipelining/schedules.py, class in the docstring);
tests hold every table against torch's, but for 1F1B, whose table in torch 2.13 counts the last stage's forwards from 1.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from harness.pipeline.actions import Action, Kind

Placement = Literal["loop", "v"]
"""Stages of rank r of R: loop r, r + R, r + 2R, …; v r and 2R - 1 - r."""


def gpipe(ranks: int, stages: int, micro_batches: int) -> list[list[Action]]:
    """All forwards, then all backwards (arXiv 1811.06965; ScheduleGPipe)."""
    every = range(micro_batches)
    return [[*_all(rank, "F", every), *_all(rank, "B", every)] for rank in range(ranks)]


def one_f_one_b(ranks: int, stages: int, micro_batches: int) -> list[list[Action]]:
    """A forward follows each backward after a warm-up of min(micro-batches, stages - stage) forwards
    (arXiv 1806.03377; Schedule1F1B._step_microbatches)."""
    table = []
    for rank in range(ranks):
        warmup = min(micro_batches, stages - rank)
        row = _all(rank, "F", range(warmup))
        for backward in range(micro_batches):
            row.append(Action(rank, "B", backward))
            row += _all(rank, "F", range(warmup + backward, min(warmup + backward + 1, micro_batches)))
        table.append(row)
    return table


def looped_bfs(ranks: int, stages: int, micro_batches: int) -> list[list[Action]]:
    """Breadth first: every micro-batch through one stage before the next (arXiv 2211.05953; ScheduleLoopedBFS)."""
    table = []
    for rank in range(ranks):
        own = range(rank, stages, ranks)
        forward = [action for stage in own for action in _all(stage, "F", range(micro_batches))]
        backward = [a for stage in reversed(own) for a in _all(stage, "B", range(micro_batches - 1, -1, -1))]
        table.append(forward + backward)
    return table


def interleaved_1f1b(ranks: int, stages: int, micro_batches: int) -> list[list[Action]]:
    """Depth first over several stages of a rank (arXiv 2104.04473; ScheduleInterleaved1F1B)."""
    return [_interleaved(rank, ranks, stages // ranks, micro_batches, zero_bubble=False) for rank in range(ranks)]


def interleaved_zero_bubble(ranks: int, stages: int, micro_batches: int) -> list[list[Action]]:
    """The same with the backward in two, the weights' later (ZB1P, arXiv 2401.10241; ScheduleInterleavedZeroBubble)."""
    return [_interleaved(rank, ranks, stages // ranks, micro_batches, zero_bubble=True) for rank in range(ranks)]


def _interleaved(rank: int, ranks: int, local: int, micro_batches: int, *, zero_bubble: bool) -> list[Action]:
    """`local` stages take rounds of micro-batches in turns, forwards from the first stage on, backwards from the
    last."""
    per_round = micro_batches // max(1, micro_batches // ranks)
    total = local * micro_batches
    hops = ranks - 1 - rank
    warmup = min((local - 1) * per_round + (1 if zero_bubble else 2) * hops, total)

    def forward_stage(turn: int) -> int:
        return turn // per_round % local * ranks + rank

    def backward_stage(turn: int) -> int:
        return (local - 1 - turn // per_round % local) * ranks + rank

    row = _Row()
    for turn in range(warmup):
        row.add(forward_stage(turn), "F")
    weights: deque[int] = deque()
    for turn in range(total):
        if warmup + turn < total:
            row.add(forward_stage(warmup + turn), "F")
        stage = backward_stage(turn)
        if not zero_bubble:
            row.add(stage, "B")
            continue
        row.add(stage, "I")
        weights.append(stage)
        if turn >= rank:
            row.add(weights.popleft(), "W")
    while weights:
        row.add(weights.popleft(), "W")
    return row.actions


def zbv(ranks: int, stages: int, micro_batches: int) -> list[list[Action]]:
    """Two stages a rank in a V, no bubble if F, I and W cost the same (arXiv 2401.10241 section 6;
    ScheduleZBVZeroBubble). With fewer than 2R - 1 micro-batches the missing ones are left out."""
    table = []
    count = max(2 * ranks - 1, micro_batches)
    for rank in range(ranks):
        down, up = rank, stages - 1 - rank
        row = _Row()

        def backward(stage: int, row: _Row = row) -> None:
            row.add(stage, "I")
            row.add(stage, "W")

        for _ in range(2 * (ranks - rank) - 1):
            row.add(down, "F")
        for _ in range(rank):
            row.add(up, "F")
            row.add(down, "F")
        for _ in range(ranks - rank):
            row.add(up, "F")
            backward(up)
        while row.done(up, "F") < row.done(down, "F") or row.done(down, "F") < count:
            if row.done(down, "F") < count:
                row.add(down, "F")
            backward(down)
            row.add(up, "F")
            backward(up)
        for _ in range(rank):
            row.add(down, "I")
            row.add(up, "I")
        for _ in range(ranks - rank):
            backward(down)
        for stage in (up, down):
            while row.done(stage, "W") < row.done(stage, "I"):
                row.add(stage, "W")
        table.append([a for a in row.actions if a.micro_batch is not None and a.micro_batch < micro_batches])
    return table


def dual_pipe_v(ranks: int, stages: int, micro_batches: int) -> list[list[Action]]:
    """Forward of one direction of a V together with backward of the other (arXiv 2412.19437; ScheduleDualPipeV)."""
    return [_dual_pipe_v(rank, ranks, micro_batches) for rank in range(ranks)]


def _dual_pipe_v(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    down, up = rank, 2 * ranks - 1 - rank
    hops = ranks - 1 - rank
    row = _Row()
    pending: deque[int] = deque()

    def inputs(stage: int) -> None:
        row.add(stage, "I")
        pending.append(stage)

    def weights() -> None:
        if pending:
            row.add(pending.popleft(), "W")

    for _ in range(2 * hops):
        row.add(down, "F")
    for _ in range(rank + 1):
        row.add(down, "F")
        row.add(up, "F")
    for _ in range(hops):
        inputs(up)
        weights()
        row.add(up, "F")
    for turn in range(micro_batches - 2 * ranks + rank + 1):
        if turn == 0 and hops == 0:  # apart, for a smaller bubble
            row.add(down, "F")
            row.add(up, "B")
        else:
            row.overlap(down, up)
        row.overlap(up, down)
    for _ in range(hops):
        row.add(up, "B")
        row.overlap(up, down)
    middle, splits = (rank + 1) // 2, False
    for turn in range(rank + 1):
        splits = splits or (turn == middle and rank % 2 == 1)
        inputs(up) if splits else row.add(up, "B")
        splits = splits or (turn == middle and rank % 2 == 0)
        inputs(down) if splits else row.add(down, "B")
    for _ in range(hops):
        weights()
        inputs(down) if splits else row.add(down, "B")
    for _ in range(rank + 1):
        weights()
    return row.actions


class _Row:
    """A rank's actions; each stage takes its micro-batches in order, a whole backward counts as I and W."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: Counter[tuple[int, str]] = Counter()

    def done(self, stage: int, kind: Kind) -> int:
        return self._next[stage, kind]

    def add(self, stage: int, kind: Kind) -> None:
        self.actions.append(self._take(stage, kind))

    def overlap(self, forward: int, backward: int) -> None:
        parts = (self._take(forward, "F"), self._take(backward, "B"))
        self.actions.append(Action(-1, "OVERLAP_F_B", None, parts))

    def _take(self, stage: int, kind: Kind) -> Action:
        number = self._next[stage, "I" if kind == "B" else kind]
        for part in "IW" if kind == "B" else kind:
            self._next[stage, part] += 1
        return Action(stage, kind, number)


def _all(stage: int, kind: Kind, micro_batches: range) -> list[Action]:
    return [Action(stage, kind, number) for number in micro_batches]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """`stages_per_rank`: as many as it takes, None for any number. `table(ranks, stages, micro_batches)`."""

    table: Callable[[int, int, int], list[list[Action]]]
    stages_per_rank: int | None
    placement: Placement = "loop"
    rounds: bool = False
    """Micro-batches go in equal rounds of at least as many as there are ranks."""


SCHEDULES: dict[str, Schedule] = {
    "GPipe": Schedule(table=gpipe, stages_per_rank=1),
    "1F1B": Schedule(table=one_f_one_b, stages_per_rank=1),
    "Interleaved1F1B": Schedule(table=interleaved_1f1b, stages_per_rank=None, rounds=True),
    "LoopedBFS": Schedule(table=looped_bfs, stages_per_rank=None),
    "InterleavedZeroBubble": Schedule(table=interleaved_zero_bubble, stages_per_rank=None, rounds=True),
    "ZBVZeroBubble": Schedule(table=zbv, stages_per_rank=2, placement="v"),
    "DualPipeV": Schedule(table=dual_pipe_v, stages_per_rank=2, placement="v"),
}
"""By torch's names (get_schedule_class)."""
