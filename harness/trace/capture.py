"""One trace file read and understood: whose it is, when it was, and what each of its devices did."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from harness import recording
from harness.errors import InputError
from harness.sources import SourceFile, Sources
from harness.trace.activity import Activity, Mask, device_activities
from harness.trace.classify import BOTH_WAYS, Groups, full_bytes
from harness.trace.events import MISSING, Trace, read_trace
from harness.trace.host import host_activity
from harness.trace.pipeline import MeasuredAction, actions_of
from harness.trace.ranges import HostRange, host_ranges
from harness.trace.steps import Step, step_of_each, steps_of
from harness.trace.units import Unit, unit_of_each

# The tag of a row whose step the device never said it ended (harness.record.step).
UNFINISHED = "unfinished"
UNFINISHED_ROW = "no finished row in steps/"
CUT = "the capture ended before its last launches ran"
WORKER_CAPTURE = re.compile(r"^(.+?)\.\d{10,}\.pt\.trace\.json")

Mesh = Mapping[str, Sequence[Sequence[int]]]
Mapper = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


class CollectiveRecord(NamedTuple):
    """One collective on one rank. `start_ns` is unix time where the file gives its base; `step` by the launch rule,
    None outside every step; sizes are bytes on this rank, None where the trace does not say. On the host, start and
    duration are those of gloo's work (`raw_kind` gloo:…), of the call where its work is not known."""

    rank: int | None
    step: int | None
    dimension: str
    group: str | None
    ranks: tuple[int, ...] | None
    kind: str
    raw_kind: str
    in_bytes: int | None
    out_bytes: int | None
    start_ns: int
    dur_ns: int
    sequence: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCapture:
    """One device of a capture: its activity, the step of every event (an index into `Capture.steps`, -1 for none),
    and the FSDP unit of those events that belong to one."""

    activity: Activity
    step: Any
    units: dict[int, Unit]


@dataclass(kw_only=True, slots=True)
class Capture:
    """What one trace file holds. `rank` is the trace's own word, else its name's; `order` counts the captures of one
    rank and iteration in time; `incomplete` maps the number of a step that the file holds in part to why."""

    file: SourceFile
    rank: int | None
    start_ns: int
    end_ns: int
    base_ns: int
    steps: list[Step]
    devices: list[DeviceCapture]
    launches_without_event: int
    dropped: dict[str, int]
    notes: list[str] = field(default_factory=list)
    incomplete: dict[int, str] = field(default_factory=dict)
    order: int = 0
    world_size: int | None = None
    pipeline: list[MeasuredAction] = field(default_factory=list)
    float8_products: int = 0
    """Matrix products of float8 operands that the host asked for."""
    ranges: list[HostRange] = field(default_factory=list)

    @property
    def worker(self) -> str:
        """Who recorded: the rank, else the worker a tensorboard_trace_handler file is named after, else the file."""
        if self.rank is not None:
            return f"rank {self.rank}"
        match = WORKER_CAPTURE.match(self.file.path.name)
        return str(self.file.path.parent / match[1]) if match else str(self.file.path)

    def records(self) -> list[CollectiveRecord]:
        """The collectives of all devices in order of their starts."""
        found = []
        for device in self.devices:
            activity = device.activity
            columns = (activity.start, activity.end, activity.collective, activity.sequence, device.step)
            counted = (column[activity.counts].tolist() for column in columns)
            for start, end, index, sequence, step in zip(*counted, strict=True):
                collective = activity.collectives[index] if index >= 0 else None
                if collective is None or collective.kind is None:
                    continue
                found.append(
                    CollectiveRecord(
                        rank=self.rank,
                        step=self.steps[step].number if step >= 0 else None,
                        dimension=collective.dimension,
                        group=collective.group,
                        ranks=collective.ranks,
                        kind=collective.kind,
                        raw_kind=collective.raw_kind,
                        in_bytes=collective.in_bytes,
                        out_bytes=collective.out_bytes,
                        start_ns=self.base_ns + start,
                        dur_ns=end - start,
                        sequence=None if sequence == MISSING else sequence,
                    )
                )
        return sorted(found, key=lambda record: record.start_ns)


def read_captures(
    sources: Sources, *, each: Mapper = map, seen: Callable[[Capture], None] | None = None
) -> tuple[list[Capture], list[InputError]]:
    """Reads every trace of `sources`: the captures in order of rank and time, and what could not be read or fits
    nowhere (two files of one rank at the same time).

    `each` may be the `map` of a pool of processes. `seen` is called with each capture as soon as it and those before
    it in `sources.traces` are read.
    """
    captures, errors = [], list(sources.errors)
    for one in each(partial(_read_capture, mesh=sources.mesh), sources.traces):
        if not isinstance(one, Capture):
            errors.append(InputError(*one))
            continue
        captures.append(one)
        if seen is not None:
            seen(one)
    captures.sort(key=lambda c: (c.rank is None, c.rank or 0, "" if c.rank is not None else c.worker, c.start_ns))
    errors += order_in_time(captures)
    mark_unfinished(captures, sources)
    return captures, errors


def _read_capture(file: SourceFile, mesh: Mesh) -> Capture | tuple[str, str, int | None]:
    """The capture, or the arguments of the `InputError` that says why there is none."""
    try:
        return capture_of(file, read_trace(file.path), mesh)
    except InputError as error:
        return str(error.file), error.reason, error.offset


def mark_unfinished(captures: Sequence[Capture], sources: Sources) -> None:
    """Adds to `Capture.incomplete` the steps that a recording's own rows do not know as finished.

    Only for traces that the recorder wrote (their steps have the rows' numbers), and for ranks with a file of rows.
    """
    if not sources.recording:
        return
    own = recording.trace_path(sources.root, 0, 0).parent.parent
    finished = finished_steps(sources)
    for capture in captures:
        if capture.rank in finished and capture.file.path.is_relative_to(own):
            missing = (step.number for step in capture.steps if step.number not in finished[capture.rank])
            capture.incomplete |= dict.fromkeys(missing, UNFINISHED_ROW)


def finished_steps(sources: Sources) -> dict[int, set[int]]:
    """Rank -> the numbers of the steps whose rows say that they ended."""
    try:
        rows_of = recording.read_recording(sources.root).steps
    except InputError:  # of a later version; whoever reads the recording itself says so
        return {}
    return {
        rank: {
            row["step"] for row in rows if type(row.get("step")) is int and UNFINISHED not in (row.get("tags") or ())
        }
        for rank, rows in rows_of.items()
    }


def capture_of(file: SourceFile, trace: Trace, mesh: Mesh | None = None) -> Capture:
    groups = Groups(trace.distributed, mesh)
    steps = steps_of(trace)
    activities = device_activities(trace, groups) or [host_activity(trace, groups)]
    moments = [activity for activity in activities if activity.start.size] or activities[:0]
    start = min((int(a.start.min()) for a in moments), default=0)
    end = max((int(a.end.max()) for a in moments), default=0)
    notes = list(trace.notes)
    if trace.rank is not None and file.rank not in (None, trace.rank):
        notes.append(f"the file name says rank {file.rank}, the trace rank {trace.rank}: the trace's is used")
    elif trace.rank is None and file.rank is not None:
        notes.append(f"rank {file.rank} is from the file name: the trace does not say it")
    elif trace.rank is None:
        notes.append("neither the trace nor its name says its rank: read as one rank of its own")
    if trace.compiled_backwards:
        notes.append("compiled layers: what their backward computes again has no range and counts as backward")
    return Capture(
        file=file,
        rank=file.rank if trace.rank is None else trace.rank,
        start_ns=trace.base_ns + start,
        end_ns=trace.base_ns + end,
        base_ns=trace.base_ns,
        steps=steps,
        devices=[
            DeviceCapture(
                activity=activity, step=step_of_each(activity.launch, steps), units=unit_of_each(trace, activity)
            )
            for activity in activities
        ],
        launches_without_event=launches_without_event(trace),
        dropped=trace.dropped,
        notes=notes,
        incomplete={step.number: CUT for step in steps[-1:] if is_cut(trace, step)},
        world_size=trace.world_size,
        pipeline=actions_of(trace, activities[0], steps),
        float8_products=trace.float8_products,
        ranges=host_ranges(trace),
    )


def launches_without_event(trace: Trace) -> int:
    """Kernel launches and asynchronous copies whose device event is not in the file (the capture ended first)."""
    launching, ran = launches_and_events(trace)
    return int((launching & ~ran).sum()) if trace.device.start.size else 0


def is_cut(trace: Trace, step: Step) -> bool:
    """Whether the last launch of a step has no device event: the capture ended before the step did on the device.

    Where events were left out, theirs may be the missing one: then it is not known, and the answer is no.
    """
    if trace.dropped or not trace.device.start.size:
        return False
    launching, ran = launches_and_events(trace)
    start = trace.launches.start
    mine = np.flatnonzero(launching & (start >= step.start_ns) & (start < step.end_ns))
    return bool(mine.size) and not ran[mine[start[mine].argmax()]]


def launches_and_events(trace: Trace) -> tuple[Mask, Mask]:
    """Per host call: whether it launches device work, and whether that work is in the file."""
    named = [bool(re.search(r"Launch(Cooperative)?Kernel|Mem(cpy|set)\w*Async", name)) for name in trace.names]
    launching = np.array([*named, False], np.bool_)[trace.launches.name]
    return launching, np.isin(trace.launches.correlation, trace.device.correlation)


def order_in_time(captures: list[Capture]) -> list[InputError]:
    """Numbers the captures of each worker in time. Captures that overlap in time although their folders do not say
    different iterations are two files of one rank: the error names both."""
    errors = []
    for worker in dict.fromkeys(capture.worker for capture in captures):
        mine = [capture for capture in captures if capture.worker == worker]
        clash = next((pair for pair in pairwise(mine) if same_time(*pair)), None)
        if clash:
            first, second = clash[0].file.path, clash[1].file.path
            others = f" (and {len(mine) - 2} more files)" if len(mine) > 2 else ""
            reason = f"is of {worker}, and so is {second}{others}: both are shown, which one counts is not known"
            errors.append(InputError(first, reason))
            continue
        earlier: Counter[int | None] = Counter()
        for number, capture in enumerate(mine, start=1):
            capture.order = earlier[capture.file.iteration]
            earlier[capture.file.iteration] += 1
            if len(mine) > 1:
                capture.notes.append(f"capture {number} of {len(mine)} of this worker, in order of time")
    return errors


def same_time(first: Capture, second: Capture) -> bool:
    a, b = first.file.iteration, second.file.iteration
    return second.start_ns < first.end_ns and not (a is not None and b is not None and a != b)


def collective_counts(records: Sequence[CollectiveRecord]) -> list[dict[str, Any]]:
    """How often each kind of collective ran in each dimension, per rank and step, and how much it moved.

    Items: rank, step, dimension, kind, count, bytes. `bytes` is the sum over the calls of the size of the full
    (unsharded) side: an all-gather's output, a reduce-scatter's input, the tensor of an all-reduce and of every other
    kind, on this rank; None if the trace lacks one of the sizes. A kernel that sends and receives counts as one send
    and one receive.
    """
    totals: dict[tuple[int | None, int | None, str, str], list[int | None]] = {}
    for record in records:
        parts = ("send", "recv") if record.raw_kind == BOTH_WAYS else (record.kind,)
        for kind in parts:
            key = (record.rank, record.step, record.dimension, kind)
            totals.setdefault(key, []).append(full_bytes(kind, record.in_bytes, record.out_bytes))
    return [
        {"rank": rank, "step": step, "dimension": dimension, "kind": kind, "count": len(sizes)}
        | {"bytes": None if None in sizes else sum(size for size in sizes if size is not None)}
        for (rank, step, dimension, kind), sizes in totals.items()
    ]
