"""The life of one FSDP unit's parameters in one traced step of one rank, read from the ranges that FSDP2 opens on the
host (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py) and from what was launched in them.

Where the trace has device events a state begins with the first kernel that writes it and ends with the last that uses
it; the host lets go of the memory earlier, in stream order. On the host it begins and ends with the ranges themselves.
Nothing is kept longer than its use here, although FSDP2 holds an all-gather's output in forward until the next unit's
copy-out, and a reduce-scatter's input until the next unit's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from harness.trace.activity import Activity, Collective, Mask
from harness.trace.capture import Capture, DeviceCapture
from harness.trace.events import MISSING
from harness.trace.figures import COMMUNICATION, COMPUTE, MEMORY
from harness.trace.intervals import EMPTY, Intervals, clip, intersection, join, subtract
from harness.trace.passes import OPENS, host_phases, passes
from harness.trace.ranges import HostRange

StateName = Literal[
    "sharded parameters",
    "all-gather input",
    "all-gather output",
    "unsharded parameters",
    "unsharded gradients",
    "accumulated gradients",
    "reduce-scatter input",
    "gradient shards",
]
STATES: tuple[StateName, ...] = StateName.__args__  # type: ignore[attr-defined]

RESHARDS = ("post_forward", "post_backward_reshard")


class Span(NamedTuple):
    """[start, end) in ns of the trace."""

    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Storage of the unit's parameters or gradients while it is needed. `phase`: the one in which it came to be."""

    name: StateName
    span: Span
    phase: str
    streams: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A collective of the unit. `exposed_ns`: its time in which nothing computed on this device. `ahead`: launched
    while another unit was at work (prefetched)."""

    kind: str
    collective: Collective
    span: Span
    phase: str
    exposed_ns: int
    stream: int | None
    ahead: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """One pass of the unit: first start to last end of what it launched to compute, on the host the pass itself.
    `busy`: when it computed."""

    phase: str
    span: Span
    busy: Intervals


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """`span` is the step's, by the launch rule; `phases` are named forward, backward and optimizer. `compute` is all
    that computed on the device, `communication` all that communicated."""

    unit: str
    source: str
    span: Span
    phases: list[tuple[str, Span]]
    states: list[State]
    transfers: list[Transfer]
    computations: list[Computation]
    compute: Intervals
    communication: Intervals

    @property
    def own_compute(self) -> Intervals:
        return join(*(one.busy for one in self.computations)) if self.computations else EMPTY


@dataclass(frozen=True, slots=True)
class _Gather:
    """How a unit was unsharded: the range that launched the all-gather, and that of the copies out of its output.
    On a single shard rank both are the unit's own pre-forward or pre-backward, which casts and copies."""

    opened: HostRange
    copied: HostRange | None
    communicates: bool


class _Reduction(NamedTuple):
    """`copied_in`: when gradients were cast and copied together; `scattered`: when the reduce-scatter had read them;
    `ready`: when the shards were there, under HSDP after the all-reduce."""

    copied_in: Span
    scattered: int
    ready: int
    streams: tuple[int, ...]


def units_of(capture: Capture) -> list[str]:
    """The FSDP units of a trace, in order of their first range."""
    names = (one.unit for one in capture.ranges if one.name.startswith("FSDP::"))
    return list(dict.fromkeys(name for name in names if name is not None))


def life_of(capture: Capture, device: DeviceCapture, place: int, unit: str) -> Life | None:
    """The life of `unit` in the step at `place` of `capture.steps`; None if the step has no event or no range of it."""
    step = capture.steps[place]
    ranges = [one for one in capture.ranges if step.start_ns <= one.start < step.end_ns]
    if not (device.step == place).any() or not any(one.unit == unit for one in ranges):
        return None
    return _Reader(device.activity, device.step == place, ranges, unit).life()


class _Reader:
    def __init__(self, activity: Activity, in_step: Mask, ranges: Sequence[HostRange], unit: str) -> None:
        self.activity, self.ranges, self.unit = activity.only(in_step), ranges, unit
        self.own = [one for one in ranges if one.unit == unit]
        self.on_host = activity.source == "host"
        self.span = Span(int(self.activity.start.min()), int(self.activity.end.max()))
        self.compute = clip(activity.union(activity.role == COMPUTE), *self.span)
        self.communication = clip(activity.union(activity.role == COMMUNICATION), *self.span)

    def life(self) -> Life:
        computations = self.computations()
        gathers = self.gathers()
        states = [State(name="sharded parameters", span=self.span, phase="all"), *self.gathered(gathers)]
        states += self.gradients()
        transfers = [t for gather in gathers if gather.communicates for t in self.transfers(gather.opened, "")]
        transfers += [t for one in self.named("post_backward_reduce") for t in self.transfers(one, "backward")]
        return Life(
            unit=self.unit,
            source=self.activity.source,
            span=self.span,
            phases=self.phases(),
            states=sorted(states, key=lambda state: (state.span, STATES.index(state.name))),
            transfers=sorted(transfers, key=lambda transfer: transfer.span),
            computations=computations,
            compute=self.compute,
            communication=self.communication,
        )

    def named(self, *operations: str) -> list[HostRange]:
        return [one for one in self.own if one.operation in operations]

    def launched(self, start: int, end: int, *roles: int, thread: int | None = None) -> Mask:
        """What was launched in [start, end) of the host's time, by a thread or by any."""
        activity = self.activity
        mask: Mask = (activity.launch >= start) & (activity.launch < end)
        mask &= np.isin(activity.role, roles)
        return mask if thread is None else mask & (activity.thread == thread)

    def wrote(self, one: HostRange) -> Mask:
        return self.launched(one.start, one.end, COMPUTE, MEMORY, thread=one.thread)

    def bounds(self, mask: Mask) -> Span | None:
        return Span(int(self.activity.start[mask].min()), int(self.activity.end[mask].max())) if mask.any() else None

    def worked(self, one: HostRange) -> Span | None:
        """When the copies and casts of a range ran; of a host trace the range itself."""
        return Span(one.start, one.end) if self.on_host else self.bounds(self.wrote(one))

    def streams(self, mask: Mask) -> tuple[int, ...]:
        return tuple(int(stream) for stream in np.unique(self.activity.stream[mask]) if stream != MISSING)

    def gathers(self) -> list[_Gather]:
        opened, outs = self.named("all_gather"), self.named("all_gather_copy_out")
        if not opened:
            alone = (one for one in self.named(*OPENS) if self.wrote(one).any())
            return [_Gather(one, one, communicates=False) for one in alone]
        limits = self.limits(opened)
        return [
            _Gather(one, next((out for out in outs if one.start <= out.start < limit), None), communicates=True)
            for one, limit in zip(opened, limits, strict=True)
        ]

    def limits(self, ranges: Sequence[HostRange]) -> list[int]:
        """Where each of some ranges has its next, for the last the end of the host's time."""
        end = max(one.end for one in self.ranges) + 1
        return [*(one.start for one in ranges[1:]), end][: len(ranges)]

    def phase_at(self, moment: int) -> str:
        """What the unit does next."""
        following = next((one for one in self.named(*OPENS) if one.end > moment), None)
        return OPENS[following.operation or ""] if following else "backward"

    def gathered(self, gathers: Sequence[_Gather]) -> list[State]:
        """All-gather buffers and unsharded parameters, one after the other."""
        found = []
        limits = self.limits([gather.opened for gather in gathers])
        for gather, limit in zip(gathers, limits, strict=True):
            phase = self.phase_at(gather.opened.start)
            copied = self.worked(gather.copied) if gather.copied else None
            if gather.communicates:
                found += self.all_gather_buffers(gather, copied, phase)
            if copied is None or gather.copied is None:
                continue
            ends = [one for one in self.named(*RESHARDS) if gather.copied.start <= one.start < limit]
            end = max(copied.end, self.last_use(ends[-1], gather.copied)) if ends else self.span.end
            span = Span(copied.start, end)
            streams = self.streams(self.wrote(gather.copied))
            found.append(State(name="unsharded parameters", span=span, phase=phase, streams=streams))
        return found

    def all_gather_buffers(self, gather: _Gather, copied: Span | None, phase: str) -> list[State]:
        written = self.worked(gather.opened)
        sent = self.bounds(self.sent(gather.opened))
        begin = written or sent
        if begin is None:
            return []
        done = sent.end if sent else begin.end
        streams = self.streams(self.wrote(gather.opened))
        cast_end = sent.start if self.on_host and sent else begin.end
        cast = State(name="all-gather input", span=Span(begin.start, cast_end), phase=phase, streams=streams)
        full = Span(begin.start, max(done, copied.end if copied else done))
        return [cast, State(name="all-gather output", span=full, phase=phase, streams=streams)]

    def last_use(self, reshard: HostRange, copied: HostRange) -> int:
        """The end of the last kernel launched before `reshard` on the streams that compute with the parameters."""
        if self.on_host:
            return reshard.end
        before = self.launched(copied.start, reshard.start, COMPUTE)
        where = self.streams(self.wrote(copied))
        span = self.bounds(before & np.isin(self.activity.stream, where) if where else before)
        return span.end if span else 0

    def gradients(self) -> list[State]:
        """From the first kernel of a backward to the reduced shards, which stay until the step ends. Without a
        reduction the gradients are added up whole."""
        found: list[State] = []
        closes, before = self.named("post_backward_accumulate"), -1
        limits = self.limits(closes)
        whole_since = reduced_at = None
        for close, limit in zip(closes, limits, strict=True):
            begin = self.first_gradient(before, close)
            before = close.start
            reduction = self.reduction(close.start, limit)
            if reduction is None:
                if begin is not None:
                    end = max(begin, self.kept(close.start, limit) or begin)
                    found.append(State(name="unsharded gradients", span=Span(begin, end), phase="backward"))
                    whole_since = end if whole_since is None else whole_since
                continue
            if begin is not None:
                span = Span(begin, max(begin, reduction.copied_in.end))
                found.append(State(name="unsharded gradients", span=span, phase="backward"))
            if whole_since is not None:
                found.append(self.accumulated(Span(whole_since, max(whole_since, reduction.copied_in.end))))
                whole_since = None
            span = Span(reduction.copied_in.start, reduction.scattered)
            streams = reduction.streams
            found.append(State(name="reduce-scatter input", span=span, phase="backward", streams=streams))
            reduced_at = reduction.ready if reduced_at is None else reduced_at
        if whole_since is not None:
            found.append(self.accumulated(Span(whole_since, self.span.end)))
        if reduced_at is not None:
            span = Span(reduced_at, max(reduced_at, self.span.end))
            found.append(State(name="gradient shards", span=span, phase="backward"))
        return found

    def reduction(self, since: int, until: int) -> _Reduction | None:
        """That of the gradients which a post-backward in [since, until) of the host's time found."""
        reduce = next((one for one in self.named("post_backward_reduce") if since <= one.start < until), None)
        wrote = self.worked(reduce) if reduce else None
        sent = self.bounds(self.sent(reduce)) if reduce else None
        if reduce is None or (wrote is None and sent is None):
            return None
        if self.on_host:
            copied_in = Span(reduce.start, sent.start if sent else reduce.end)
        else:
            first = sent.start if sent else self.span.end
            copied_in = self.bounds(self.wrote(reduce) & (self.activity.start < first)) or Span(first, first)
        scattered = self.bounds(self.sent(reduce, "reduce_scatter"))
        return _Reduction(
            copied_in=copied_in,
            scattered=max(copied_in.end, scattered.end if scattered else 0),
            ready=max(span.end for span in (copied_in, wrote, sent) if span),
            streams=self.streams(self.wrote(reduce)),
        )

    def kept(self, since: int, until: int) -> int | None:
        """When gradients that are not reduced were cast to be added up."""
        reshard = next((one for one in self.named("post_backward_reshard") if since <= one.start < until), None)
        cast = self.worked(reshard) if reshard else None
        return cast.end if cast else None

    def accumulated(self, span: Span) -> State:
        return State(name="accumulated gradients", span=span, phase="backward")

    def first_gradient(self, before: int, close: HostRange) -> int | None:
        """When the backward began that a post-backward ends, and that came after `before`; None if none did: a
        pipeline reduces what earlier ones left."""
        opened = [one for one in self.named(*OPENS) if before < one.start < close.start]
        if not opened:
            return None
        since = opened[-1].end
        if opened[-1].operation != "pre_backward":  # a unit that ran in part: the head under a loss in chunks
            named = [one.start for one in self.ranges if one.name == "backward" and one.start <= close.start < one.end]
            since = named[-1] if named else close.start
        if self.on_host:
            return since
        found = self.bounds(self.launched(since, close.start, COMPUTE, thread=close.thread))
        found = found or self.bounds(self.wrote(close))
        return found.start if found else None

    def sent(self, one: HostRange, kind: str | None = None) -> Mask:
        """The collectives that a range launched, all or those of a kind."""
        mask = self.launched(one.start, one.end, COMMUNICATION, thread=one.thread) & self.activity.counts
        return mask if kind is None else mask & self.activity.where([c.kind == kind for c in self.activity.collectives])

    def transfers(self, one: HostRange, phase: str) -> list[Transfer]:
        activity, found = self.activity, []
        own = [other for other in self.named(*OPENS) if other.start <= one.start < other.end]
        for event in np.flatnonzero(self.sent(one)).tolist():
            collective = activity.collectives[int(activity.collective[event])]
            span = Span(int(activity.start[event]), int(activity.end[event]))
            if collective.kind is None:
                continue
            when = Intervals(*(np.array([at], np.int64) for at in span)) if span.end > span.start else EMPTY
            stream = int(activity.stream[event])
            found.append(
                Transfer(
                    kind=collective.kind,
                    collective=collective,
                    span=span,
                    phase=phase or self.phase_at(one.start),
                    exposed_ns=subtract(when, self.compute).total_ns(),
                    stream=None if stream == MISSING else stream,
                    ahead=not phase and not own,
                )
            )
        return found

    def computations(self) -> list[Computation]:
        """Every pass of the unit, with what it launched between its own ranges and not in another unit's."""
        found = []
        for phase, windows in passes(self.ranges, self.unit):
            busy = intersection(self.compute, windows) if self.on_host else self.computed(windows)
            whole = windows if self.on_host else busy
            if whole.start.size:
                span = Span(int(whole.start[0]), int(whole.end[-1]))
                found.append(Computation(phase=phase, span=span, busy=busy))
        return sorted(found, key=lambda one: one.span)

    def computed(self, windows: Intervals) -> Intervals:
        """What was launched in the windows of the host's time."""
        launch = self.activity.launch
        place = np.searchsorted(windows.start, launch, side="right") - 1
        inside = (place >= 0) & (launch < np.append(windows.end, MISSING)[place])
        return self.activity.union(inside & (self.activity.role == COMPUTE))

    def phases(self) -> list[tuple[str, Span]]:
        """On the device: what was launched in them."""
        found: list[tuple[str, Span]] = []
        for name, start, end in host_phases(self.ranges):
            span = Span(start, end) if self.on_host else self.bounds(self.launched(start, end, COMPUTE))
            if span is None:
                continue
            if found and found[-1][0] == name:
                found[-1] = name, Span(found[-1][1].start, max(found[-1][1].end, span.end))
            else:
                # Copies for a unit that is gathered ahead run while the phase before still computes.
                begin = max(span.start, found[-1][1].end) if found else span.start
                found.append((name, Span(begin, max(begin, span.end))))
        return found
