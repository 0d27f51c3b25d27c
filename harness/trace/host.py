"""Host intervals of a trace without device events (CPU and gloo): never mixed with device time.

Communication is the time in gloo's works (annotations `gloo:*`) and in the ranges our recorder opens around each
outermost c10d call, `comm:<kind>:<group>:<seq>[:<bytes>]`; a range `comm:wait:…` is time, not a collective.
A collective is a call and its work, counted once. Its time is the union of both, its duration between ranks the work's
alone (transfer, and waiting for the other ranks); the call gives its kind, group, dimension, bytes, sequence number,
step and FSDP unit. gloo's names are wrong at times (a reduce-scatter is called gloo:all_reduce), so a work whose call
is not known gives time only, under no group data; in a trace without our ranges its name has to do.
A send or receive is its call and the wait for it (`harness.trace.transfers`). If its thread went on in between, nothing
says when it was transferred; its `raw_kind` is then without gloo's prefix.
Compute is the time a thread spends in operators (not in autograd's nodes or engine, which only call them and where
FSDP's hooks wait) outside its communication ranges and c10d operators.
"""

from __future__ import annotations

import numpy as np

from harness.trace import classify
from harness.trace.activity import Activity, Collective
from harness.trace.classify import NO_GROUP, Groups
from harness.trace.events import MISSING, Annotations, Interned, Trace
from harness.trace.figures import COMMUNICATION, COMPUTE
from harness.trace.gloo import Call, Work, link
from harness.trace.intervals import Intervals, join, subtract, union
from harness.trace.transfers import waits

GLOO, RANGE = "gloo:", "comm:"
OPERATORS = "operators"


def host_activity(trace: Trace, groups: Groups) -> Activity:
    """The host's communication and computation. A gloo work counts as launched when its call starts, every other host
    interval when it starts itself."""
    recorded = any(name.startswith(RANGE) for name in trace.names)
    parsed = [range_of(name, groups, recorded) for name in trace.names]
    talks = np.array([p is not None for p in parsed] + [False], np.bool_)[trace.annotations.name]
    rows = Annotations(*(column[talks] for column in trace.annotations))
    names = [trace.names[name] for name in rows.name]
    meanings = [meaning for name in rows.name if (meaning := parsed[name]) is not None]
    launch, thread = rows.start.copy(), rows.thread.copy()
    counts = np.array([collective.kind is not None for collective, _ in meanings], np.bool_)
    call_of = calls_of_works(rows, names, [collective for collective, _ in meanings]) if recorded else {}
    for work, call in call_of.items():
        collective, sequence = meanings[call]
        meanings[work] = collective._replace(raw_kind=names[work]), sequence
        launch[work], thread[work] = rows.start[call], rows.thread[call]
        # The first work stands for its call.
        counts[work], counts[call] = counts[call], False

    transfers = np.array([is_transfer(name) for name in trace.names] + [False], np.bool_)
    since, is_later = waits(trace, transfers[trace.annotations.name])
    rows = rows._replace(start=since[talks], dur=rows.start + rows.dur - since[talks])
    later = np.flatnonzero(is_later[talks]).tolist()
    for work in later:
        collective, sequence = meanings[work]
        meanings[work] = collective._replace(raw_kind=collective.raw_kind.removeprefix(GLOO)), sequence

    compute = {thread: compute_of(trace, int(thread), rows) for thread in np.unique(trace.operators.thread)}
    start = np.concatenate((rows.start, *(piece.start for piece in compute.values())))
    computes = start.size - rows.start.size
    nothing = np.full(computes, MISSING, np.int64)
    collectives: Interned[Collective] = Interned()
    return Activity(
        source="host",
        device=None,
        start=start,
        end=np.concatenate((rows.start + rows.dur, *(piece.end for piece in compute.values()))),
        role=np.repeat(np.array([COMMUNICATION, COMPUTE], np.int8), [rows.start.size, computes]),
        collective=np.array([collectives[collective] for collective, _ in meanings] + [-1] * computes, np.int64),
        launch=np.concatenate((launch, start[rows.start.size :])),
        thread=np.concatenate((thread, *(np.full(piece.start.size, at, np.int64) for at, piece in compute.items()))),
        stream=np.full(start.size, MISSING, np.int64),
        sequence=np.concatenate((np.array([sequence for _, sequence in meanings], np.int64), nothing)),
        counts=np.concatenate((counts, np.zeros(computes, np.bool_))),
        name=np.concatenate((rows.name, np.full(computes, len(trace.names), np.int64))),
        collectives=list(collectives),
        names=[*trace.names, OPERATORS],
        notes=notes(names, set(call_of), recorded, len(later)),
    )


def calls_of_works(rows: Annotations, names: list[str], collectives: list[Collective]) -> dict[int, int]:
    """The row of each gloo work whose call is known → the row of that call, in order of the works' starts."""
    start, thread = rows.start.tolist(), rows.thread.tolist()
    end = (rows.start + rows.dur).tolist()
    ours = [i for i, name in enumerate(names) if name.startswith(RANGE) and collectives[i].kind is not None]
    theirs = sorted((i for i, name in enumerate(names) if name.startswith(GLOO)), key=lambda i: start[i])
    calls = [Call(start[i], end[i], thread[i], str(collectives[i].kind), collectives[i].group) for i in ours]
    works = [Work(start[i], thread[i], classify.collective_kind(names[i].removeprefix(GLOO))) for i in theirs]
    return {work: ours[call] for work, call in zip(theirs, link(calls, works), strict=True) if call is not None}


def is_transfer(name: str) -> bool:
    return name.startswith(GLOO) and classify.collective_kind(name.removeprefix(GLOO)) in ("send", "recv")


def notes(names: list[str], linked: set[int], recorded: bool, later: int) -> tuple[str, ...]:
    works = [row for row, name in enumerate(names) if name.startswith(GLOO)]
    found = []
    if later:
        transfers = sum(map(is_transfer, names))
        found.append(
            f"{later} of {transfers} sends and receives were waited for later: only their calls and waits count, "
            "as gloo does not say when they were transferred"
        )
    unknown = len(works) - len(linked)
    if works and not recorded:
        found.append("gloo misnames collectives (a reduce-scatter is called all_reduce): kinds are gloo's")
    elif unknown:
        found.append(f"{unknown} of {len(works)} gloo works have no recorded call: their time is under {NO_GROUP}")
    return tuple(found)


def compute_of(trace: Trace, thread: int, rows: Annotations) -> Intervals:
    """The time a thread spends in operators that do not communicate, outside `rows`."""
    operators = trace.operators
    mine = operators.thread == thread
    communicates = mine & (operators.communicates > 0)
    ranges = rows.thread == thread
    away = join(
        union(operators.start[communicates], (operators.start + operators.dur)[communicates]),
        union(rows.start[ranges], (rows.start + rows.dur)[ranges]),
    )
    return subtract(union(operators.start[mine], (operators.start + operators.dur)[mine]), away)


def range_of(name: str, groups: Groups, recorded: bool) -> tuple[Collective, int] | None:
    """The collective and sequence number a host annotation stands for; None for any other annotation."""
    if name.startswith(GLOO):
        kind = None if recorded else classify.collective_kind(name.removeprefix(GLOO))
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
