"""Whether a table can run: completeness of its computation, and a simulation that finds dead-locks.

Between two ranks tensors pass in the order in which either side asks for them (NCCL matches sends and receives of a
pair by order alone), and asking does not wait; computing does, for what it needs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from harness.errors import UsageError
from harness.pipeline.actions import Action, Table, each_step

WHERE = "pipeline.csv"


def stage_ranks(table: Table, micro_batches: int) -> dict[int, int]:
    """Stage -> rank, after checking that every stage is computed by one rank, forward and backward once for each
    micro-batch and in that order; raises `UsageError` with rank and action."""
    rank_of: dict[int, int] = {}
    done: Counter[tuple[int, str]] = Counter()
    seen: dict[Action, int] = {}
    for rank, row in enumerate(table):
        for place, action in _placed(row):
            at = f"{WHERE}: row {rank + 1} (rank {rank}), action {place} `{action}`"
            _require(
                rank_of.setdefault(action.stage, rank) == rank, f"{at}: the stage is rank {rank_of[action.stage]}'s"
            )
            if action in seen and action.kind not in ("UNSHARD", "RESHARD"):
                raise UsageError(f"{at} is there already, as action {seen[action]}")
            seen[action] = place
            number = action.micro_batch
            _require(
                number is None or number < micro_batches,
                f"{at}: micro-batches are numbered from 0 to {micro_batches - 1} (pipeline.micro_batches)",
            )
            before = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
            if before is not None:
                earlier = Action(action.stage, before, number)  # type: ignore[arg-type]
                _require(earlier in seen, f"{at} comes before `{earlier}`")
            done[action.stage, action.kind] += 1
    stages = max(rank_of) + 1
    for stage in range(stages):
        _require(stage in rank_of, f"{WHERE}: no row computes stage {stage} of {stages}")
        forwards = done[stage, "F"]
        backwards = done[stage, "B"] + done[stage, "W"]
        whole = forwards == micro_batches and backwards == micro_batches and done[stage, "I"] == done[stage, "W"]
        _require(
            whole,
            f"{WHERE}: row {rank_of[stage] + 1} (rank {rank_of[stage]}): stage {stage} makes {forwards} forwards and "
            f"{backwards} whole backwards of {micro_batches} micro-batches (pipeline.micro_batches)",
        )
    return rank_of


def require_peers(table: Table, rank_of: Mapping[int, int]) -> None:
    """Raises `UsageError` for a transfer to or from no other rank."""
    for rank, row in enumerate(table):
        for place, action in _placed(row):
            if action.kind.startswith(("SEND", "RECV")) and rank_of.get(_peer_stage(action)) in (None, rank):
                at = f"{WHERE}: row {rank + 1} (rank {rank}), action {place} `{action}`"
                raise UsageError(f"{at} has no other rank to send to or receive from")


def require_progress(table: Table, rank_of: Mapping[int, int]) -> None:
    """Raises `UsageError` naming rank, row and action where the table dead-locks."""
    simulation = _Simulation(table, rank_of)
    while simulation.advance():
        pass
    stuck = simulation.stuck()
    if stuck:
        raise UsageError(f"{WHERE}: the schedule dead-locks: {'; '.join(stuck)}")


class _Simulation:
    """Each rank at its next action; per pair of ranks the transfers that either side has asked for."""

    def __init__(self, table: Table, rank_of: Mapping[int, int]) -> None:
        self.rank_of, self.last_stage = rank_of, max(rank_of)
        self.rows = [list(_placed(row)) for row in table]
        self.explicit = any(a.kind.startswith(("SEND", "RECV")) for row in table for a in each_step(row))
        self.next = [0] * len(table)
        self.done: set[Action] = set()
        self.asked: dict[tuple[int, int], deque[Action]] = {}

    def advance(self) -> bool:
        """Lets every rank go as far as it can; False once none can."""
        moved = False
        for rank, row in enumerate(self.rows):
            while self.next[rank] < len(row) and self._missing(row[self.next[rank]][1]) is None:
                self._carry_out(rank, row[self.next[rank]][1])
                self.next[rank] += 1
                moved = True
        return moved

    def stuck(self) -> list[str]:
        """For every rank that did not come to its end: where it stands and for what it waits; unmatched transfers."""
        found = []
        for rank, row in enumerate(self.rows):
            if self.next[rank] < len(row):
                place, action = row[self.next[rank]]
                found.append(
                    f"row {rank + 1} (rank {rank}), action {place} `{action}` waits for {self._missing(action)}"
                )
        if not found:
            for (rank, peer), queue in self.asked.items():
                found += [f"row {rank + 1} (rank {rank}): `{a}` has no counterpart on rank {peer}" for a in queue]
        return found

    def _carry_out(self, rank: int, action: Action) -> None:
        if not action.kind.startswith(("SEND", "RECV")):
            self.done.add(action)
            return
        peer = self.rank_of[_peer_stage(action)]
        mine, theirs = (self.asked.setdefault(pair, deque()) for pair in ((rank, peer), (peer, rank)))
        mine.append(action)
        while mine and theirs and _counterpart(mine[0]) == theirs[0]:
            self.done |= {mine.popleft(), theirs.popleft()}

    def _missing(self, action: Action) -> str | None:
        """What has to be done before `action`, as text; None if it can be carried out."""
        stage, number, kind = action.stage, action.micro_batch, action.kind
        wanted: list[Action] = []
        if kind == "F" and stage > 0:
            wanted = (
                [Action(stage, "RECV_F", number)]
                if self._crosses(stage, stage - 1)
                else [Action(stage - 1, "F", number)]
            )
        elif kind in ("B", "I") and stage < self.last_stage:
            both = [Action(stage + 1, "B", number), Action(stage + 1, "I", number)]
            wanted = [Action(stage, "RECV_B", number)] if self._crosses(stage, stage + 1) else both
        elif kind == "SEND_F":
            wanted = [Action(stage, "F", number)]
        elif kind == "SEND_B":
            wanted = [Action(stage, "B", number), Action(stage, "I", number)]
        if not wanted or any(one in self.done for one in wanted):
            return None
        first = wanted[0]
        owner = self.rank_of[first.stage]
        return f"`{first}`" + ("" if owner == self.rank_of[stage] else f" of rank {owner}")

    def _crosses(self, stage: int, other: int) -> bool:
        return self.explicit and self.rank_of[stage] != self.rank_of[other]


def require_complete(table: Table, rank_of: Mapping[int, int]) -> None:
    """Raises `UsageError` where a table that says its own communication lacks what torch's runtime needs: parameters
    gathered before they are computed with and freed at the end, gradients reduced once, after the last backward."""
    for rank, row in enumerate(table):
        gathered: set[int] = set()
        reduced: set[int] = set()
        for place, action in _placed(row):
            at = f"{WHERE}: row {rank + 1} (rank {rank}), action {place} `{action}`"
            stage = action.stage
            if action.kind == "UNSHARD":
                _require(stage not in gathered, f"{at}: the stage is gathered already")
                gathered.add(stage)
            elif action.kind in ("F", "B", "I", "W", "RESHARD"):
                _require(stage in gathered, f"{at} needs `{stage}UNSHARD` before it")
                _require(action.kind == "RESHARD" or stage not in reduced, f"{at} comes after `{stage}REDUCE_GRAD`")
                gathered -= {stage} if action.kind == "RESHARD" else set()
            elif action.kind == "REDUCE_GRAD":
                reduced.add(stage)
        own = {stage for stage, owner in rank_of.items() if owner == rank}
        for stage in sorted(own - reduced):
            raise UsageError(f"{WHERE}: row {rank + 1} (rank {rank}) lacks `{stage}REDUCE_GRAD`")
        for stage in sorted(gathered):
            raise UsageError(f"{WHERE}: row {rank + 1} (rank {rank}) lacks `{stage}RESHARD` at its end")


def _placed(row: Sequence[Action]) -> list[tuple[int, Action]]:
    """Single actions with the number, from 1, of the cell that they are in."""
    return [(place, part) for place, action in enumerate(row, start=1) for part in action.steps]


def _peer_stage(action: Action) -> int:
    return action.stage + (1 if action.kind in ("SEND_F", "RECV_B") else -1)


def _counterpart(action: Action) -> Action:
    kinds = {"SEND_F": "RECV_F", "RECV_F": "SEND_F", "SEND_B": "RECV_B", "RECV_B": "SEND_B"}
    return Action(_peer_stage(action), kinds[action.kind], action.micro_batch)  # type: ignore[arg-type]


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message)
