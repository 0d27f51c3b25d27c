"""What a device (without device events: the host) did: intervals with a role, and the collective each belongs to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.trace import classify
from harness.trace.classify import Groups, Label
from harness.trace.coalesced import attributed
from harness.trace.events import MISSING, Launches, Trace
from harness.trace.figures import COMMUNICATION, COMPUTE, MEMORY, Window
from harness.trace.intervals import Intervals, Ns, union

Mask = NDArray[np.bool_]

# What an activity says of each event.
COLUMNS = ("start", "end", "role", "collective", "launch", "thread", "stream", "sequence", "counts", "name")


class Collective(NamedTuple):
    """What the events of one kind of collective share. Sizes are bytes per call on this rank.

    `kind` None marks time that is communication without being a collective of a known kind (a wait, a gloo work whose
    call is not known).
    """

    kind: str | None
    raw_kind: str
    group: str | None
    dimension: str
    ranks: tuple[int, ...] | None = None
    in_bytes: int | None = None
    out_bytes: int | None = None
    symmetric: bool = False


@dataclass(frozen=True, slots=True)
class Activity:
    """Intervals [start, end) in the trace's ns. `collective` indexes `collectives`, -1 where nothing communicates;
    `launch` is the start of the host call that launched an event (a host interval's own start), MISSING without one,
    and `thread` the host thread of that call. A collective may have several intervals; the one that `counts` is the
    collective, the others are more of its time. `name` indexes `names`: the kernel's, the memory operation's, the
    annotation's."""

    source: Literal["device", "host"]
    device: int | None
    start: Ns
    end: Ns
    role: NDArray[np.int8]
    collective: Ns
    launch: Ns
    thread: Ns
    stream: Ns
    sequence: Ns
    counts: Mask
    name: Ns
    collectives: list[Collective]
    names: list[str]
    notes: tuple[str, ...] = ()

    def window(self, mask: Mask | None = None) -> Window:
        """The window of all events, or of some."""
        if mask is None:
            return Window.of(self.start, self.end, self.role)
        return Window.of(self.start[mask], self.end[mask], self.role[mask])

    def only(self, kept: Mask) -> Activity:
        """The same without the events that are not kept."""
        return replace(self, **{name: getattr(self, name)[kept] for name in COLUMNS})

    def of(self, wanted: Mask) -> Mask:
        """The events whose collective is wanted (`wanted` is over `collectives`)."""
        chosen: Mask = np.append(wanted, False)[self.collective] & (self.collective >= 0)
        return chosen

    def where(self, condition: list[bool]) -> Mask:
        return self.of(np.array(condition, np.bool_))

    def union(self, mask: Mask) -> Intervals:
        return union(self.start[mask], self.end[mask])

    def starved_ns(self, mask: Mask) -> int | None:
        """How long, between the first start and the last end of these events, none ran and none that had been launched
        was still to run: the device waits for its host. None on the host itself, and without events.

        What is launched and idle all the same waits for another stream, or is a launch's own few microseconds.
        """
        if self.source == "host" or not mask.any():
            return None
        start, end = self.start[mask], self.end[mask]
        first = start.min()
        known = self.launch[mask] != MISSING
        launch = np.where(known, self.launch[mask], start)
        busy = union(np.maximum(np.minimum(launch, start), first), end)
        return int(end.max() - first) - busy.total_ns()

    def dimensions(self) -> list[str]:
        """The parallel dimensions that communicate, in order of their names."""
        return sorted({self.collectives[index].dimension for index in np.unique(self.collective) if index >= 0})

    def dimension(self, name: str) -> Mask:
        return self.where([collective.dimension == name for collective in self.collectives])


def device_activities(trace: Trace, groups: Groups) -> list[Activity]:
    """One activity per device that has events, in order of the device's number."""
    events = trace.device
    launch, thread = launched_by(trace.launches, events.correlation)
    labels, label = attributed(trace, launch, thread)
    collectives = [collective_of(one, groups) for one in labels]
    communicates = np.array([c is not None for c in collectives] + [False], np.bool_)[label]
    role = np.where(label < 0, MEMORY, np.where(communicates, COMMUNICATION, COMPUTE)).astype(np.int8)
    nothing = Collective(None, "", None, classify.NO_GROUP)
    return [
        Activity(
            source="device",
            device=None if device == MISSING else int(device),
            start=events.start[mine],
            end=events.start[mine] + events.dur[mine],
            role=role[mine],
            collective=np.where(communicates, label, -1)[mine],
            launch=launch[mine],
            thread=thread[mine],
            stream=events.stream[mine],
            sequence=events.sequence[mine],
            counts=communicates[mine],
            name=events.name[mine],
            collectives=[collective or nothing for collective in collectives],
            names=trace.names,
        )
        for device in np.unique(events.device)
        for mine in [events.device == device]
    ]


def collective_of(label: Label, groups: Groups) -> Collective | None:
    """The collective a kernel belongs to; None for a kernel that computes."""
    symmetric = classify.is_symmetric(label)
    if not (symmetric or classify.is_nccl(label)):
        return None
    return Collective(
        kind=classify.kind_of(label),
        raw_kind=classify.raw_kind(label),
        group=label.group,
        dimension=groups.dimension(label.group, label.description, label.ranks),
        ranks=groups.members(label.group, label.ranks),
        in_bytes=classify.size_bytes(label.in_elements, label.dtype),
        out_bytes=classify.size_bytes(label.out_elements, label.dtype),
        symmetric=symmetric,
    )


def launched_by(launches: Launches, correlation: Ns) -> tuple[Ns, Ns]:
    """Start and thread of the first host call with each correlation number; MISSING where the file has none."""
    order = np.lexsort((launches.start, launches.correlation))
    known, first = np.unique(launches.correlation[order], return_index=True)
    start, thread = launches.start[order][first], launches.thread[order][first]
    place = np.searchsorted(known, correlation)
    found = np.append(known, MISSING)[place] == correlation
    found &= correlation != MISSING
    return np.where(found, np.append(start, 0)[place], MISSING), np.where(found, np.append(thread, 0)[place], MISSING)
