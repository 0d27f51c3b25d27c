"""One step of one rank as lanes over time, in columns that hold the true share of the time something ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness.trace import Capture
from harness.trace.activity import Activity, Collective, Mask
from harness.trace.capture import DeviceCapture
from harness.trace.coverage import Shares, shares
from harness.trace.events import MISSING
from harness.trace.figures import COMMUNICATION, COMPUTE, MEMORY
from harness.trace.intervals import EMPTY, Intervals, subtract

COLUMNS = 1200


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """`busy` is the share of each column in which the lane ran, `exposed` that in which it ran and nothing computed
    (communication only). `kind` is compute, memory, exposed or a collective's kind."""

    label: str
    kind: str
    streams: list[int]
    count: int
    busy: Shares
    exposed: Shares
    busy_ns: int
    exposed_ns: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LanePicture:
    """The events of `step` (None: of the whole file), from the first start to the last end."""

    rank: int | None
    step: int | None
    source: str
    span_ns: int
    column_ns: float
    lanes: list[Lane]


class TracedStep(NamedTuple):
    """A step in a trace: its place among `capture.steps`, None where the file names none. `exposed_ns`: communication
    in which nothing computed."""

    exposed_ns: int
    capture: Capture
    device: DeviceCapture
    place: int | None

    @property
    def number(self) -> int | None:
        return None if self.place is None else self.capture.steps[self.place].number


def traced_steps(captures: Sequence[Capture]) -> Iterator[TracedStep]:
    """Every step that has events on a device; a file without steps as a whole."""
    for capture in captures:
        for device in capture.devices:
            choices: list[int | None] = [i for i in range(len(capture.steps)) if (device.step == i).any()]
            for place in choices or [None]:
                window = device.activity.window(selected(device, place))
                if window.span_ns:
                    yield TracedStep(window.exposed_ns(window.communication), capture, device, place)


def most_exposed(captures: Sequence[Capture]) -> LanePicture | None:
    """The traced step and rank with most exposed communication. None: no events."""
    best = max(traced_steps(captures), key=lambda step: step.exposed_ns, default=None)
    return None if best is None else picture(best.capture, best.device, best.place)


def selected(device: DeviceCapture, step: int | None) -> Mask:
    everything: Mask = np.ones(device.activity.start.size, np.bool_)
    return everything if step is None else np.asarray(device.step == step, np.bool_)


def picture(capture: Capture, device: DeviceCapture, step: int | None, columns: int = COLUMNS) -> LanePicture:
    """Lanes: compute, each kind of collective in each dimension, memory operations, and what is exposed."""
    activity, mask = device.activity, selected(device, step)
    window = activity.window(mask)
    start = int(activity.start[mask].min())
    edges = np.unique(start + np.arange(columns + 1) * window.span_ns // columns)

    def lane(label: str, kind: str, mine: Mask, times: Intervals, exposed: Intervals | None = None) -> Lane:
        return Lane(
            label=label,
            kind=kind,
            streams=streams_of(activity, mine),
            count=int((mine if exposed is None else mine & activity.counts).sum()),
            busy=shares(times, edges),
            exposed=shares(EMPTY if exposed is None else exposed, edges),
            busy_ns=times.total_ns(),
            exposed_ns=None if exposed is None else exposed.total_ns(),
        )

    lanes = [lane("compute", "compute", mask & (activity.role == COMPUTE), window.compute)]
    for dimension in activity.dimensions():
        of_dimension = mask & activity.dimension(dimension)
        for kind in sorted({kind_of(activity.collectives[i]) for i in np.unique(activity.collective[of_dimension])}):
            mine = of_dimension & activity.where([kind_of(one) == kind for one in activity.collectives])
            times = activity.union(mine)
            lanes.append(lane(f"{dimension} {kind}", kind, mine, times, subtract(times, window.compute)))
    if window.memory.start.size:
        lanes.append(lane("memory operations", "memory", mask & (activity.role == MEMORY), window.memory))
    if window.communication.start.size:
        exposed = subtract(window.communication, window.compute)
        communicates = mask & (activity.role == COMMUNICATION)
        lanes.append(lane("exposed communication", "exposed", communicates, exposed, exposed))
    return LanePicture(
        rank=capture.rank,
        step=None if step is None else capture.steps[step].number,
        source=activity.source,
        span_ns=window.span_ns,
        column_ns=window.span_ns / max(edges.size - 1, 1),
        lanes=lanes,
    )


def kind_of(collective: Collective) -> str:
    return collective.kind or "wait"


def streams_of(activity: Activity, mask: Mask) -> list[int]:
    streams = np.unique(activity.stream[mask])
    return [int(stream) for stream in streams if stream != MISSING]
