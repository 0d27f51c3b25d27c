"""What a schedule's computation needs around it: parameters gathered and freed, gradients reduced, tensors sent.

The rules are those of torch's lowering (torch/distributed/pipelining/schedules.py: _add_unshard_reshard,
_add_reduce_grad, _add_send_recv), held against it by tests; torch's runtime then carries the table out as it is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from harness.errors import UsageError
from harness.pipeline.actions import Action, Kind, Table, each_step

ACTIVE_STAGES = 3
"""Stages of a rank whose parameters are gathered at a time (torch's default)."""


def lower(table: Table, rank_of: Mapping[int, int], micro_batches: int) -> list[list[Action]]:
    """The complete table of one that holds computation only; `rank_of` maps a stage to its rank.

    Raises `UsageError` where actions that overlap wait for each other; `harness.pipeline.check` finds what else
    dead-locks.
    """
    whole = [_with_reductions(_with_gathers(row), micro_batches) for row in table]
    return _with_transfers(whole, rank_of)


def _with_gathers(row: Sequence[Action]) -> list[Action]:
    """Before each action the next stages that compute are gathered, and others freed to make room."""
    gathered: list[int] = []
    lowered: list[Action] = []
    for action, wanted in zip(row, _next_stages(row), strict=True):
        for stage in [s for s in gathered if s not in wanted]:
            gathered.remove(stage)
            lowered.append(Action(stage, "RESHARD"))
        for stage in [s for s in wanted if s not in gathered]:
            gathered.append(stage)
            lowered.append(Action(stage, "UNSHARD"))
        lowered.append(action)
    return lowered + [Action(stage, "RESHARD") for stage in gathered]


def _next_stages(row: Sequence[Action]) -> list[list[int]]:
    """For every action the stages that compute from it on, the soonest first."""
    found: list[list[int]] = []
    soonest: list[int] = []
    for action in reversed(row):
        for part in reversed(action.steps):
            soonest = [part.stage, *(stage for stage in soonest if stage != part.stage)]
        found.append(soonest[:ACTIVE_STAGES])
    return found[::-1]


def _with_reductions(row: Sequence[Action], micro_batches: int) -> list[Action]:
    """A stage's gradients are reduced once, after its last backward."""
    done: Counter[int] = Counter()
    lowered: list[Action] = []
    for action in row:
        lowered.append(action)
        for part in action.steps:
            if part.kind in ("B", "W"):
                done[part.stage] += 1
                if done[part.stage] == micro_batches:
                    lowered.append(Action(part.stage, "REDUCE_GRAD"))
    return lowered


def _with_transfers(table: Table, rank_of: Mapping[int, int]) -> list[list[Action]]:
    """Each tensor is sent as soon as it is there, and the receiver's action is placed at the same moment, so that
    both sides of every pair of ranks see one order."""
    lowered: list[list[Action]] = [[] for _ in table]
    there: list[set[Action]] = [set() for _ in table]
    waiting = [deque(row) for row in table]
    while any(waiting):
        progress = False
        for rank, row in enumerate(waiting):
            if not row or not all(_has_inputs(part, there[rank], len(rank_of)) for part in row[0].steps):
                continue
            action = row.popleft()
            lowered[rank].append(action)
            for part in action.steps:
                there[rank].add(part)
                if (pair := transfer(part, rank_of)) is not None:
                    sent, received = pair
                    receiver = rank_of[received.stage]
                    lowered[rank].append(sent)
                    lowered[receiver].append(received)
                    there[receiver].add(received)
            progress = True
        if not progress:
            stuck = [f"row {rank + 1} (rank {rank}) at `{row[0]}`" for rank, row in enumerate(waiting) if row]
            raise UsageError(
                f"pipeline.csv: the schedule dead-locks: {'; '.join(stuck)}: actions that overlap begin together, with "
                "all that they take from other ranks"
            )
    return lowered


def transfer(action: Action, rank_of: Mapping[int, int]) -> tuple[Action, Action] | None:
    """Send and receive that follow a computation; None where the next stage is on the same rank or there is none."""
    if action.kind == "F":
        neighbour, kinds = action.stage + 1, ("SEND_F", "RECV_F")
    elif action.kind in ("B", "I"):
        neighbour, kinds = action.stage - 1, ("SEND_B", "RECV_B")
    else:
        return None
    if neighbour not in rank_of or rank_of[neighbour] == rank_of[action.stage]:
        return None
    send, receive = kinds
    return _on(action.stage, send, action), _on(neighbour, receive, action)


def _on(stage: int, kind: str, action: Action) -> Action:
    named: Kind = kind  # type: ignore[assignment]
    return Action(stage, named, action.micro_batch)


def _has_inputs(action: Action, there: set[Action], stages: int) -> bool:
    """Whether what `action` computes on is on its rank: received, or computed there."""
    stage, number = action.stage, action.micro_batch
    if action.kind == "F" and stage > 0:
        return bool(there & {Action(stage, "RECV_F", number), Action(stage - 1, "F", number)})
    if action.kind in ("B", "I") and stage < stages - 1:
        before = (Action(stage, "RECV_B", number), Action(stage + 1, "B", number), Action(stage + 1, "I", number))
        return any(one in there for one in before)
    return True


def sends_and_receives(row: Sequence[Action]) -> Counter[str]:
    """How many of SEND_F, RECV_F, SEND_B and RECV_B a rank carries out."""
    return Counter(a.kind for a in each_step(row) if a.kind.startswith(("SEND", "RECV")))
