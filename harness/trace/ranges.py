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
    """[start, end) in the trace's ns on a host thread."""

    start: int
    end: int
    thread: int
    name: str

    @property
    def operation(self) -> str | None:
        """`all_gather` of `FSDP::all_gather (layers.3)`; None for a range that belongs to no unit."""
        match = OPERATION.match(self.name)
        return match[1] if match else None

    @property
    def unit(self) -> str | None:
        """`layers.3` of `FSDP::all_gather (layers.3)`."""
        match = OPERATION.match(self.name)
        return match[2] if match else None


def host_ranges(trace: Trace) -> list[HostRange]:
    rows = zip(*(column.tolist() for column in trace.annotations), strict=True)
    found = (HostRange(start, start + dur, thread, trace.names[name]) for start, dur, thread, name in rows)
    wanted = (*UNIT_PREFIXES, OPTIMIZER_STEP)
    return sorted(one for one in found if one.name.startswith(wanted) or one.name in PHASES)
