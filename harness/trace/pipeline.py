"""Pipeline actions of a trace: the ranges `PP:<action>` that torch's runtime opens on the host, as times of computing.

A range also covers waiting for what the action needs. The computation in it is, where the trace has device events, from
the first start to the last end of the compute kernels launched in it, and on the host the recorder's `forward` and
`backward` phases in it; in a host trace without these the whole range stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from harness.pipeline.actions import COMPUTE, Action, parse_action
from harness.trace.activity import Activity
from harness.trace.events import Trace
from harness.trace.figures import COMPUTE as COMPUTES
from harness.trace.steps import Step, step_of_each

PREFIX = "PP:"
PHASES = ("forward", "backward")


class MeasuredAction(NamedTuple):
    """One computation of a schedule; `step` indexes `Capture.steps`, -1 for none; times from `Capture.base_ns` on."""

    action: Action
    step: int
    start_ns: int
    end_ns: int


class _Range(NamedTuple):
    start: int
    end: int
    thread: int


def actions_of(trace: Trace, activity: Activity, steps: list[Step]) -> list[MeasuredAction]:
    """Those that computed, in order of their starts."""
    known: list[tuple[Action, _Range]] = []
    phases: dict[str, list[_Range]] = {name: [] for name in PHASES}
    for start, dur, thread, index in zip(*(column.tolist() for column in trace.annotations), strict=True):
        name = trace.names[index]
        if name in phases:
            phases[name].append(_Range(start, start + dur, thread))
        elif name.startswith(PREFIX) and (action := _action(name)) is not None:
            known.append((action, _Range(start, start + dur, thread)))
    at = step_of_each(np.array([place.start for _, place in known], np.int64), steps).tolist() if known else []
    found = []
    for (action, place), step in zip(known, at, strict=True):
        for part, windows in _parts(action, place, phases):
            span = _computed(activity, windows)
            if span is not None:
                found.append(MeasuredAction(part, step, *span))
    return sorted(found, key=lambda measured: measured.start_ns)


def _action(name: str) -> Action | None:
    try:
        action = parse_action(name.removeprefix(PREFIX))
    except ValueError:
        return None
    return action if all(part.kind in COMPUTE for part in action.steps) else None


def _parts(action: Action, place: _Range, phases: dict[str, list[_Range]]) -> list[tuple[Action, Sequence[_Range]]]:
    """What an action consists of, with the host ranges of each; overlapping ones without phases stay together."""
    inside = {name: [r for r in ranges if _contains(place, r)] for name, ranges in phases.items()}
    if not any(inside.values()):
        return [(action, [place])]
    return [(part, inside[PHASES[part.kind != "F"]] or [place]) for part in action.steps]


def _contains(outer: _Range, inner: _Range) -> bool:
    return outer.thread == inner.thread and outer.start <= inner.start and inner.end <= outer.end


def _computed(activity: Activity, windows: Sequence[_Range]) -> tuple[int, int] | None:
    """First start and last end; None if no kernel was launched. Autograd launches from threads of its own."""
    if activity.source == "host":
        return min(w.start for w in windows), max(w.end for w in windows)
    mine = np.zeros(activity.start.size, np.bool_)
    for window in windows:
        mine |= (activity.launch >= window.start) & (activity.launch < window.end)
    mine &= activity.role == COMPUTES
    return (int(activity.start[mine].min()), int(activity.end[mine].max())) if mine.any() else None
