"""When the host ran the passes of an FSDP unit, and the phases of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from harness.trace.intervals import Intervals, intersection, subtract, union
from harness.trace.ranges import OPTIMIZER_STEP, PHASES, HostRange

# Which range opens a pass, and which close it.
OPENS = {"pre_forward": "forward", "pre_backward": "backward"}
CLOSES = {"post_forward": ("forward",), "post_backward_accumulate": ("backward", "forward")}


def passes(ranges: Sequence[HostRange], unit: str) -> Iterator[tuple[str, Intervals]]:
    """Phase and host time of each pass of a unit: while it is the innermost unit at work, without the ranges in which
    FSDP2 gathers. What a checkpointed unit computes again is a pass of its own, `recompute`."""
    aside = _union([one for one in ranges if one.operation in OPENS])
    again = _union([one for one in ranges if one.name.startswith("AC::") and one.unit == unit])
    backward = _union([one for one in ranges if one.name == "backward"])
    at_work: list[tuple[str, str]] = []
    pieces: dict[str, list[tuple[int, int]]] = {}
    since = 0
    for one in ranges:
        name, operation = one.unit, one.operation or ""
        if name is None or not (operation in OPENS or operation in CLOSES):
            continue
        if at_work and at_work[-1][0] == unit:
            pieces.setdefault(at_work[-1][1], []).append((since, one.start))
        since = one.start
        if operation in OPENS:
            if (name, OPENS[operation]) not in at_work:
                at_work.append((name, OPENS[operation]))
            continue
        for phase in CLOSES[operation]:
            at_work = [entry for entry in at_work if entry != (name, phase)]
            if name != unit or not (spans := pieces.pop(phase, [])):
                continue
            windows = subtract(union(*(np.array(edges, np.int64) for edges in zip(*spans, strict=True))), aside)
            if phase == "forward" and operation != "post_forward":
                # A unit that ran in part, as the head of a loss in chunks, has no post-forward and no pre-backward.
                yield "backward", intersection(windows, backward)
                windows = subtract(windows, backward)
            yield phase, subtract(windows, again)
            yield "recompute", intersection(windows, again)


def host_phases(ranges: Sequence[HostRange]) -> list[tuple[str, int, int]]:
    """Forward, backward and optimizer, with start and end, as the trace names them, else as the ranges of FSDP2 and
    the optimizer tell."""
    found = [(one.name, one.start, one.end) for one in ranges if one.name in PHASES]
    named = {name for name, *_ in found}
    for phase in ("forward", "backward") if named.isdisjoint(("forward", "backward")) else ():
        mine = [one for one in ranges if phase in (one.operation or "")]
        if mine:
            found.append((phase, mine[0].start, max(one.end for one in mine)))
    if "optimizer" not in named:
        found += [("optimizer", one.start, one.end) for one in ranges if one.name.startswith(OPTIMIZER_STEP)]
    return sorted(found, key=lambda item: item[1])


def _union(ranges: Sequence[HostRange]) -> Intervals:
    return union(np.array([r.start for r in ranges], np.int64), np.array([r.end for r in ranges], np.int64))
