"""Contexts whose queues are known, as `queues_worker` measures them; and what it saw of real ones."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from probes.queues import Control, Latency, Observations, Round, parse
from probes.queues_worker import SLEEP_NS, Streams, round_of

H200 = Path(__file__).with_name("data") / "h200_queues"
LAUNCH_NS = 8_000


class SimulatedStreams(Streams):
    """Streams of a context with so many queues. One is assigned when work arrives: `dynamic`, one in which nothing
    waits, while there is one; else in turn, whatever it holds, as an H200 does with two.

    `stalled`: the share of work that is late for another reason, `flips`: of figures that say the opposite, `missing`:
    of observations whose launches took too long.
    """

    def __init__(
        self, queues: int, draw: random.Random, *, dynamic: bool, stalled: float, flips: float, missing: float
    ) -> None:
        self._queues, self._draw, self._dynamic = queues, draw, dynamic and queues > 2
        self._stalled, self._flips, self._missing = stalled, flips, missing

    def observe(
        self, sleeper: int, waiting: Sequence[int], others: Sequence[int], sleep_ns: int, work_ns: int = 0
    ) -> dict[str, Any]:
        assert len({sleeper, *waiting, *others}) == 1 + len(waiting) + len(others)
        busy: set[int] = set()
        for place in range(1 + len(waiting)):
            busy.add(self._assigned(place, busy))
        ended = dict.fromkeys(waiting, sleep_ns + LAUNCH_NS)
        stall = self._draw.random() < self._stalled
        for place, number in enumerate(others, 1 + len(waiting)):
            late = (stall or self._assigned(place, busy) in busy) ^ (self._draw.random() < self._flips)
            ended[number] = work_ns + LAUNCH_NS * place + sleep_ns * late
        return {"released_ns": sleep_ns, "in_time": self._draw.random() >= self._missing, "ended_ns": ended}

    def _assigned(self, place: int, busy: set[int]) -> int:
        used = len(busy)
        return used if self._dynamic and used < self._queues else place % self._queues


def observe(
    queues: int,
    *,
    rounds: int = 3,
    streams: int = 48,
    dynamic: bool = True,
    stalled: float = 0.0,
    flips: float = 0.0,
    missing: float = 0.0,
    seed: int = 0,
) -> Observations:
    """What the program prints of such a context."""
    draw = random.Random(seed)
    simulated = SimulatedStreams(queues, draw, dynamic=dynamic, stalled=stalled, flips=flips, missing=missing)
    found = [round_of(simulated, streams, SLEEP_NS, draw) for _ in range(rounds)]
    return parse({"device": "a GPU", "streams": streams, "rounds": found, "phase": "complete"})


def changed(
    found: Observations,
    *,
    late: Sequence[int] = (),
    early: Sequence[int] = (),
    without: Sequence[int] = (),
    **fields: Any,
) -> Observations:
    """The same observations with some numbers of streams held up or not, some not known, and fields of all rounds
    replaced."""

    def of(sample: Latency) -> Latency:
        if sample.streams in late or sample.streams in early:
            return replace(sample, ended_ns=sample.released_ns + (1 if sample.streams in late else -1))
        return sample

    def of_round(item: Round) -> Round:
        latencies = [of(sample) for sample in item.latencies if sample.streams not in without]
        return replace(item, latencies=latencies, **fields)

    return replace(found, rounds=[of_round(item) for item in found.rounds])


def controls(*late: int, others: int = 47) -> list[Control]:
    return [Control(others=others, late=number, in_time=True) for number in late]


def h200() -> dict[str, Observations]:
    """What real contexts showed, for each value of the variable (data/README.md)."""
    arms = ("unset", "1", "2", "8", "16", "32")
    return {arm: parse(json.loads((H200 / f"{arm}.json").read_text(encoding="utf-8"))) for arm in arms}
