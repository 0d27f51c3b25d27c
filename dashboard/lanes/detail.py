"""What a window of time looks like on a screen: each column of pixels with its true shares, or the events themselves.

Exact at every zoom: a column's busy and exposed nanoseconds are differences of running totals, so over any window they
add up to the lengths of the unions. Nothing is sampled and nothing is widened.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dashboard.store import Extract
from harness.trace.coverage import Coverage
from harness.trace.intervals import Intervals, Ns, join

Layout = Literal["kind", "stream"]

EVENTS_SENT = 8_000
"""Events that one picture may hold one by one; lanes with fewest are the first to be exact."""
NONE = 255


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One row of a device. `busy` covers all of it, `tracks` and `class_covers` are its parts; `exposed` is the part of
    communication while nothing computed (None on lanes without communication). The lane of role "exposed" has no
    tracks: it is what all of a device's communication exposes."""

    label: str
    role: Literal["compute", "communication", "memory", "exposed", "stream"]
    dimension: str | None
    kind: str | None
    busy: Coverage
    exposed: Coverage | None
    tracks: Sequence[dict[str, Any]]
    class_covers: Sequence[tuple[int, Coverage]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Events:
    """Events that lie at least in part in a window, in order of their starts; `start` and `end` in ns after the trace's
    base, the others index the device's tables, `exposed_ns` is 0 for what does not communicate."""

    start: Ns
    end: Ns
    classes: NDArray[np.uint8]
    name: NDArray[np.int32]
    collective: NDArray[np.int32]
    unit: NDArray[np.int32]
    step: NDArray[np.int32]
    exposed_ns: Ns


class LaneIndex:
    """An extract of `index.lane_index`, with its pieces by name."""

    def __init__(self, extract: Extract) -> None:
        self.values = extract.values
        self.columns = extract.columns

    @property
    def rank(self) -> int | None:
        rank: int | None = self.values["rank"]
        return rank

    @property
    def devices(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.values["devices"]
        return found

    def cover(self, place: Sequence[int]) -> Coverage:
        first, last = place
        return Coverage(self.columns["cover_start"][first : last - 1], self.columns["cover_before"][first:last])

    def lanes(self, device: dict[str, Any], layout: Layout, dimensions: Collection[str] | None = None) -> list[Lane]:
        """The rows of a device: by what runs, or by stream. `dimensions` (None: all) leaves out other communication."""
        classes = device["classes"]
        shown = [
            index
            for index, one in enumerate(classes)
            if one["role"] != "communication" or dimensions is None or one["dimension"] in dimensions
        ]
        by_kind, by_stream = self._lane_of_class, self._lane_of_stream
        if layout == "kind":
            lanes = [by_kind(device, index) for index in shown if any(t["class"] == index for t in device["tracks"])]
        else:
            places = range(len(device["streams"]))
            lanes = [lane for place in places if (lane := by_stream(device, place, shown)) is not None]
        exposed = self.cover(device["all_exposed_cover"])
        if dimensions is None and exposed.total_ns():
            lanes.append(
                Lane(
                    label="exposed",
                    role="exposed",
                    dimension=None,
                    kind=None,
                    busy=exposed,
                    exposed=exposed,
                    tracks=(),
                    class_covers=(),
                )
            )
        return lanes

    def _lane_of_class(self, device: dict[str, Any], index: int) -> Lane:
        one = device["classes"][index]
        busy = self.cover(device["class_cover"][index])
        exposed = device["exposed_cover"][index]
        return Lane(
            label=label_of(one),
            role=one["role"],
            dimension=one["dimension"],
            kind=one["kind"],
            busy=busy,
            exposed=None if exposed is None else self.cover(exposed),
            tracks=[track for track in device["tracks"] if track["class"] == index],
            class_covers=[(index, busy)],
        )

    def _lane_of_stream(self, device: dict[str, Any], place: int, shown: Collection[int]) -> Lane | None:
        tracks = [track for track in device["tracks"] if track["stream"] == place and track["class"] in shown]
        if not tracks:
            return None
        stream = device["streams"][place]
        covers = [(track["class"], self.cover(track["cover"])) for track in tracks]
        whole = len(tracks) == sum(track["stream"] == place for track in device["tracks"])
        return Lane(
            label="no stream" if stream is None else f"stream {stream}",
            role="stream",
            dimension=None,
            kind=None,
            busy=self.cover(device["stream_cover"][place]) if whole else joined([cover for _, cover in covers]),
            exposed=None,
            tracks=tracks,
            class_covers=covers,
        )

    def count(self, lane: Lane, start_ns: int, end_ns: int) -> int:
        """How many of a lane's events lie at least in part in [start_ns, end_ns)."""
        return sum(len(self._within(track, start_ns, end_ns)) for track in lane.tracks)

    def events(self, device: dict[str, Any], lane: Lane, start_ns: int, end_ns: int) -> Events:
        """The lane's events in [start_ns, end_ns), whole: those at its edges reach beyond it."""
        found = [(track["class"], self._within(track, start_ns, end_ns)) for track in lane.tracks]
        places = np.concatenate([place for _, place in found] or [np.empty(0, np.int64)])
        classes = np.repeat(
            np.array([index for index, _ in found], np.uint8), np.array([len(place) for _, place in found], np.int64)
        )
        order = np.argsort(self.columns["start"][places], kind="stable")
        places, classes = places[order], classes[order]
        start, end = self.columns["start"][places], self.columns["end"][places]
        compute = self.cover(device["class_cover"][0])
        exposed = (end - start) - (compute.until(end) - compute.until(start))
        communicates = np.array([one["role"] == "communication" for one in device["classes"]], np.bool_)
        return Events(
            start=start,
            end=end,
            classes=classes,
            name=self.columns["name"][places],
            collective=self.columns["collective"][places],
            unit=self.columns["unit"][places],
            step=self.columns["step"][places],
            exposed_ns=np.where(communicates[classes], exposed, 0),
        )

    def _within(self, track: dict[str, Any], start_ns: int, end_ns: int) -> Ns:
        first, last = track["events"]
        begun = int(np.searchsorted(self.columns["start"][first:last], end_ns, side="left"))
        if track["serial"]:
            over = int(np.searchsorted(self.columns["end"][first:last], start_ns, side="right"))
            return np.arange(first + over, first + max(begun, over))
        # Events that run at the same time end in any order.
        return np.asarray(first + np.flatnonzero(self.columns["end"][first : first + begun] > start_ns), np.int64)


def label_of(one: dict[str, Any]) -> str:
    """A class in words."""
    if one["role"] == "communication":
        return f"{one['dimension']} {one['kind']}"
    return "compute" if one["role"] == "compute" else "memory operations"


def joined(covers: Sequence[Coverage]) -> Coverage:
    """The union of sets."""
    return Coverage.of(join(*(Intervals(np.asarray(one.start), np.asarray(one.end)) for one in covers)))


def edges_of(start_ns: int, end_ns: int, columns: int) -> Ns:
    """The edges of `columns` columns over a window in whole nanoseconds; fewer where it has fewer nanoseconds."""
    return np.unique(start_ns + np.arange(columns + 1) * (end_ns - start_ns) // columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Per column of pixels: nanoseconds that a lane ran and that it was exposed, and the class that ran longest (an
    index into the device's classes, `NONE` where nothing ran)."""

    busy_ns: Ns
    exposed_ns: Ns
    dominant: NDArray[np.uint8]


def columns_of(lane: Lane, edges: Ns) -> Columns:
    busy = lane.busy.per_column(edges)
    exposed = lane.exposed.per_column(edges) if lane.exposed is not None else np.zeros_like(busy)
    if not lane.class_covers:
        dominant = np.zeros(len(busy), np.uint8)
    else:
        by_class = np.stack([cover.per_column(edges) for _, cover in lane.class_covers])
        dominant = np.array([index for index, _ in lane.class_covers], np.uint8)[by_class.argmax(axis=0)]
    return Columns(busy_ns=busy, exposed_ns=exposed, dominant=np.where(busy > 0, dominant, NONE).astype(np.uint8))


def exact_lanes(counts: Sequence[int], limit: int = EVENTS_SENT) -> list[bool]:
    """Which lanes are sent event by event: those with fewest first, as long as all together stay below `limit`."""
    exact = [False] * len(counts)
    total = 0
    for place in sorted(range(len(counts)), key=lambda place: counts[place]):
        total += counts[place]
        if total > limit:
            break
        exact[place] = True
    return exact
