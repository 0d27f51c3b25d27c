"""The named host ranges of a trace that tell of FSDP units and phases, in order of time."""

from __future__ import annotations

import re
from typing import NamedTuple

from harness.trace.events import Trace

UNIT_PREFIXES = ("FSDP::", "AC::")
OPTIMIZER_STEP = "Optimizer.step#"
PHASES = ("forward", "backward", "optimizer")
OPERATION = re.compile(r"^(?:FSDP|AC)::(\w+) \((.+)\)$")


class HostRange(NamedTuple):
    """[start, end) in the trace's ns on a host thread. Of `FSDP::all_gather (layers.3)`, `operation` is `all_gather`
    and `unit` is `layers.3`; None for a range that belongs to no unit."""

    start: int
    end: int
    thread: int
    name: str
    operation: str | None
    unit: str | None


def host_ranges(trace: Trace) -> list[HostRange]:
    meanings: dict[int, tuple[str | None, str | None]] = {}
    for index, name in enumerate(trace.names):
        if match := OPERATION.match(name):
            meanings[index] = match[1], match[2]
        elif name.startswith((*UNIT_PREFIXES, OPTIMIZER_STEP)) or name in PHASES:
            meanings[index] = None, None
    rows = zip(*(column.tolist() for column in trace.annotations), strict=True)
    return sorted(
        (
            HostRange(start, start + dur, thread, trace.names[name], *meanings[name])
            for start, dur, thread, name in rows
            if name in meanings
        ),
        key=lambda one: (one.start, one.end),
    )
