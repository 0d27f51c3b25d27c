"""Host intervals of a trace without device events (CPU and gloo): never mixed with device time.

Communication is the time in gloo's worker annotations (`gloo:*`) and in the ranges our recorder opens around each
outermost c10d call, `comm:<kind>:<group>:<seq>[:<bytes>]`; a range `comm:wait:…` is time, not a collective. gloo's
names are wrong at times (a reduce-scatter is called gloo:all_reduce), so with our ranges they give time only.
Compute is the time a thread spends in operators outside its communication ranges and c10d operators.
"""

from __future__ import annotations

import numpy as np

from harness.trace import classify
from harness.trace.activity import Activity, Collective
from harness.trace.classify import NO_GROUP, Groups
from harness.trace.events import MISSING, Interned, Trace
from harness.trace.figures import COMMUNICATION, COMPUTE
from harness.trace.intervals import Intervals, join, subtract, union


def host_activity(trace: Trace, groups: Groups) -> Activity:
    """The host's communication and computation. A host interval counts as launched when it starts."""
    rows = trace.annotations
    recorded = any(name.startswith("comm:") for name in trace.names)
    parsed = [range_of(name, groups, recorded) for name in trace.names]
    collectives: Interned[Collective] = Interned()
    number = np.array([-1 if p is None else collectives[p[0]] for p in parsed] + [-1], np.int64)
    sequences = np.array([MISSING if p is None else p[1] for p in parsed] + [MISSING], np.int64)
    of_row = number[rows.name]
    talks = of_row >= 0
    compute = {thread: compute_of(trace, int(thread), talks) for thread in np.unique(trace.operators.thread)}
    starts = [rows.start[talks], *(piece.start for piece in compute.values())]
    ends = [rows.start[talks] + rows.dur[talks], *(piece.end for piece in compute.values())]
    start = np.concatenate(starts)
    computes = start.size - starts[0].size
    threads = [np.full(piece.start.size, thread, np.int64) for thread, piece in compute.items()]
    return Activity(
        source="host",
        device=None,
        start=start,
        end=np.concatenate(ends),
        role=np.repeat(np.array([COMMUNICATION, COMPUTE], np.int8), [starts[0].size, computes]),
        collective=np.concatenate((of_row[talks], np.full(computes, -1, np.int64))),
        launch=start,
        thread=np.concatenate((rows.thread[talks], *threads)),
        stream=np.full(start.size, MISSING, np.int64),
        sequence=np.concatenate((sequences[rows.name][talks], np.full(computes, MISSING, np.int64))),
        collectives=list(collectives),
    )


def compute_of(trace: Trace, thread: int, talks: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Intervals:
    """The time a thread spends in operators that do not communicate."""
    operators, rows = trace.operators, trace.annotations
    mine = operators.thread == thread
    communicates = mine & (operators.communicates > 0)
    ranges = talks & (rows.thread == thread)
    away = join(
        union(operators.start[communicates], (operators.start + operators.dur)[communicates]),
        union(rows.start[ranges], (rows.start + rows.dur)[ranges]),
    )
    return subtract(union(operators.start[mine], (operators.start + operators.dur)[mine]), away)


def range_of(name: str, groups: Groups, recorded: bool) -> tuple[Collective, int] | None:
    """The collective and sequence number a host annotation stands for; None for any other annotation."""
    if name.startswith("gloo:"):
        kind = None if recorded else classify.collective_kind(name.removeprefix("gloo:"))
        return Collective(kind, name, None, NO_GROUP), int(MISSING)
    if not name.startswith("comm:"):
        return None
    _, raw, *fields = name.split(":")
    group = fields[0] if fields and fields[0] not in ("", "-") else None
    # Our ranges name a group as torch does, or by its description.
    known, description = (group, None) if groups.knows(group) else (None, group)
    sequence, size = (to_count(fields[index]) if len(fields) > index else None for index in (1, 2))
    collective = Collective(
        kind=None if raw == "wait" else classify.collective_kind(raw),
        raw_kind=raw,
        group=group,
        dimension=groups.dimension(known, description, None),
        ranks=groups.members(known, None, description),
        in_bytes=size,
        out_bytes=size,
    )
    return collective, int(MISSING) if sequence is None or raw == "wait" else sequence


def to_count(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 19 else None
