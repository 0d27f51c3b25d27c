"""Training steps of a trace and the two rules that give events to them.

`launch`: an event belongs to the step in whose host window the call that launched it started; the step's window is
then from the first start to the last end of its events. `clip`: everything is cut to the host window.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from harness.trace.events import MISSING, Trace
from harness.trace.intervals import Ns, union

STEP_NAME = re.compile(r"^ProfilerStep#(\d{1,15})$")


class Step(NamedTuple):
    """Step `number` (the N of `ProfilerStep#N`) and its host window [start_ns, end_ns)."""

    number: int
    start_ns: int
    end_ns: int


def steps_of(trace: Trace) -> list[Step]:
    """The steps in order of time. Overlapping annotations of one number (several threads) are one step."""
    found = []
    for name_index, name in enumerate(trace.names):
        if match := STEP_NAME.match(name):
            rows = trace.annotations.name == name_index
            start, dur = trace.annotations.start[rows], trace.annotations.dur[rows]
            windows = union(start, start + dur)
            empty = [] if windows.start.size else [(int(at), int(at)) for at in start[:1]]
            pairs = [(int(a), int(b)) for a, b in zip(*windows, strict=True)] + empty
            found += [Step(int(match[1]), start_ns, end_ns) for start_ns, end_ns in pairs]
    return sorted(found, key=lambda step: (step.start_ns, step.number))


def step_of_each(launch: Ns, steps: list[Step]) -> Ns:
    """Index of the step in whose host window each launch lies, -1 for none."""
    chosen = np.full(launch.size, -1, np.int64)
    for index, step in enumerate(steps):
        chosen[(launch >= step.start_ns) & (launch < step.end_ns) & (launch != MISSING)] = index
    return chosen
