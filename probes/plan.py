"""The order of an experiment's trials: blocks of two pairs, each ABBA or BAAB by the seed.

Within such a block both arms have the same mean position, so a linear drift over the session (a GPU that warms up, a
file system that fills) does not move the estimate; AAABBB puts all of it into the effect (docs/benchmarks.md, "Probe
statistics"). Which of the two comes is drawn, so that nothing periodic can side with one arm.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Arm = Literal["A", "B"]

BLOCKS: tuple[tuple[Arm, ...], ...] = (("A", "B", "B", "A"), ("B", "A", "A", "B"))


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of one arm: the `index`-th of the experiment, in the `pair`-th pair; both count from 0."""

    index: int
    pair: int
    arm: Arm


def order(pairs: int, seed: int) -> list[Trial]:
    """The 2·`pairs` trials in the order in which they run; the same for the same arguments.

    Trials 2k and 2k+1 are pair k, one of each arm. The last pair of an odd number is AB or BA.
    Raises ValueError for less than one pair.
    """
    if pairs < 1:
        raise ValueError(f"pairs is {pairs}: an experiment needs at least 1")
    draw = random.Random(seed)
    arms: list[Arm] = []
    while len(arms) < 2 * pairs:
        arms += draw.choice(BLOCKS)
    return [Trial(index, index // 2, arm) for index, arm in enumerate(arms[: 2 * pairs])]
