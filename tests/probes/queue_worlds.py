"""Contexts whose queues are known, and what `queues_worker` would see of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from probes.queues import Latency, Observations, Round, Row
from probes.queues_worker import CONTROLS

RELEASED_NS, LAUNCHED_NS = 4_000_000, 900_000


def observe(
    queues: Sequence[int],
    *,
    rounds: int = 3,
    sleeper: int = 0,
    sleeper_blocks: bool = True,
    flips: float = 0.0,
    missing: float = 0.0,
    stalled: float = 0.0,
    moving: bool = False,
    seed: int = 0,
) -> Observations:
    """`queues`: the queue of each stream. The kernel waited for is in queue `sleeper`, which it holds up or not.

    `flips`: the share of figures that say the opposite, `missing`: that are not there, `stalled`: of rows in which
    everything ends late. `moving`: the driver maps streams to queues anew for every round.
    """
    draw, streams = random.Random(seed), len(queues)

    def row(waiting: int | None, at: Sequence[int]) -> Row:
        blocked = {sleeper} if sleeper_blocks else set()
        blocked |= set() if waiting is None else {at[waiting]}
        stall = draw.random() < stalled
        ended: list[int | None] = []
        for number in range(streams):
            late = at[number] in blocked or stall
            if number != waiting:
                late ^= draw.random() < flips
            known = number == waiting or draw.random() >= missing
            ended.append((RELEASED_NS + 7_000 if late else LAUNCHED_NS) if known else None)
        return Row(stream=waiting, released_ns=RELEASED_NS, in_time=True, ended_ns=ended)

    def one_round() -> Round:
        at = draw.sample(list(queues), streams) if moving else queues
        order = [*range(streams), *[None] * CONTROLS]
        draw.shuffle(order)
        return Round(rows=[row(waiting, at) for waiting in order])

    latencies = []
    for count in range(3, min(48, streams) + 1):
        held = queues[count - 1] in queues[0 if sleeper_blocks else 1 : count - 1]
        ended = 5_507_000 if held else 700_000
        latencies += [Latency(streams=count, released_ns=5_000_000, ended_ns=ended, in_time=True)] * rounds
    return Observations(
        device="a GPU",
        streams=streams,
        rounds=[one_round() for _ in range(rounds)],
        latencies=latencies,
        phase="complete",
    )


def round_robin(queues: int, streams: int = 96) -> list[int]:
    return [number % queues for number in range(streams)]
