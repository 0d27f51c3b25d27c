"""One capture as tracks that a window of time can be cut out of in milliseconds, however many events it holds.

A class is what a colour stands for: compute, memory operations, each kind of collective in each dimension. A track
holds the events of one class on one stream, in order of their starts. Beside its events, running totals
(`harness.trace.coverage`) of every set that a lane may show: each class, each stream, each track where it is neither,
and what of each class of communication is exposed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dashboard.store import Extract
from harness.report.lanes import kind_of
from harness.trace import Capture
from harness.trace.activity import Activity
from harness.trace.capture import DeviceCapture
from harness.trace.classify import full_bytes
from harness.trace.coverage import Coverage
from harness.trace.events import MISSING
from harness.trace.figures import COMPUTE, MEMORY
from harness.trace.intervals import Intervals, subtract

WORST_KEPT = 200
"""Collectives with the most exposed time that are kept for each device."""


def lane_index(capture: Capture) -> Extract:
    """`values`: the capture's name and time (unix ns) and, per device, classes, streams, tracks, steps and the most
    exposed collectives; `columns`: `start`, `end` (ns after `base_ns`), `name`, `collective`, `unit`, `step` of all
    events, track by track, and `cover_start`, `cover_before` of all coverages. Pairs [first, last) in `values` are
    places in these columns."""
    writer = _Writer()
    return Extract(
        values={
            "rank": capture.rank,
            "file": str(capture.file.path),
            "iteration": capture.file.iteration,
            "base_ns": capture.base_ns,
            "start_ns": capture.start_ns,
            "end_ns": capture.end_ns,
            "devices": [_device(capture, device, writer) for device in capture.devices],
        },
        columns=writer.columns(),
    )


class _Writer:
    """Collects pieces of columns and says where each lies."""

    def __init__(self) -> None:
        self.pieces: dict[str, list[Any]] = {}
        self.filled: dict[str, int] = {}

    def add(self, **columns: Any) -> None:
        for name, values in columns.items():
            self.pieces.setdefault(name, []).append(values)
            self.filled[name] = self.filled.get(name, 0) + len(values)

    def cover(self, times: Intervals) -> list[int]:
        coverage = Coverage.of(times)
        first = self.filled.get("cover_before", 0)
        # One entry more than intervals: both columns keep the same places, the last start is never looked at.
        self.add(cover_start=np.append(coverage.start, 0), cover_before=coverage.before)
        return [first, self.filled["cover_before"]]

    def columns(self) -> dict[str, Any]:
        return {name: np.concatenate(pieces) for name, pieces in self.pieces.items()}


def _device(capture: Capture, device: DeviceCapture, writer: _Writer) -> dict[str, Any]:
    activity = device.activity
    classes, class_of = _classes(activity)
    streams = np.unique(activity.stream)
    unit_names, unit_of = _units(device)
    names, name_of = np.unique(activity.name, return_inverse=True)
    class_times = [activity.union(class_of == index) for index in range(len(classes))]
    window = activity.window()
    exposed = [
        subtract(times, window.compute) if one["role"] == "communication" else None
        for one, times in zip(classes, class_times, strict=True)
    ]
    class_cover = [writer.cover(times) for times in class_times]
    stream_cover: dict[int, list[int]] = {}
    tracks = []
    pairs = [
        (kind, place, mine)
        for kind in range(len(classes))
        for place, stream in enumerate(streams)
        if (mine := (class_of == kind) & (activity.stream == stream)).any()
    ]
    for kind, place, mine in pairs:
        events = np.flatnonzero(mine)
        events = events[np.argsort(activity.start[events], kind="stable")]
        start, end = activity.start[events], activity.end[events]
        alone_in_class = sum(k == kind for k, _, _ in pairs) == 1
        alone_on_stream = sum(p == place for _, p, _ in pairs) == 1
        cover = class_cover[kind] if alone_in_class else writer.cover(activity.union(mine))
        if alone_on_stream:
            stream_cover[place] = cover
        first = writer.filled.get("start", 0)
        writer.add(
            start=start,
            end=end,
            name=name_of[events].astype(np.int32),
            collective=activity.collective[events].astype(np.int32),
            unit=unit_of[events],
            step=device.step[events].astype(np.int32),
        )
        serial = bool((end[:-1] <= start[1:]).all())
        place_of = [first, first + len(events)]
        tracks.append({"class": kind, "stream": place, "events": place_of, "cover": cover, "serial": serial})
    for place, stream in enumerate(streams):
        if place not in stream_cover:
            stream_cover[place] = writer.cover(activity.union(activity.stream == stream))
    return {
        "device": activity.device,
        "source": activity.source,
        "classes": classes,
        "streams": [None if stream == MISSING else int(stream) for stream in streams],
        "names": [activity.names[name] for name in names],
        "units": unit_names,
        "collectives": [_collective(one) for one in activity.collectives],
        "tracks": tracks,
        "class_cover": class_cover,
        "stream_cover": [stream_cover[place] for place in range(len(streams))],
        "exposed_cover": [None if times is None else writer.cover(times) for times in exposed],
        "all_exposed_cover": writer.cover(subtract(window.communication, window.compute)),
        "steps": _steps(capture, device),
        "spans": _unit_spans(device, unit_names, unit_of),
        "worst": _worst(device, Coverage.of(window.compute), class_of, unit_of),
    }


def _classes(activity: Activity) -> tuple[list[dict[str, Any]], Any]:
    """The classes in the order that lanes have, and the class of each event."""
    of_collective = [(one.dimension, kind_of(one)) for one in activity.collectives]
    used = np.unique(activity.collective)
    communicating = sorted({of_collective[index] for index in used if index >= 0})
    place_of = {pair: 1 + place for place, pair in enumerate(communicating)}
    by_collective = np.array([place_of.get(pair, 0) for pair in of_collective] + [0], np.int64)
    class_of = by_collective[activity.collective]
    class_of[activity.role == COMPUTE] = 0
    classes: list[dict[str, Any]] = [{"role": "compute", "dimension": None, "kind": None}]
    classes += [{"role": "communication", "dimension": name, "kind": kind} for name, kind in communicating]
    if (activity.role == MEMORY).any():
        class_of[activity.role == MEMORY] = len(classes)
        classes.append({"role": "memory", "dimension": None, "kind": None})
    return classes, class_of


def _units(device: DeviceCapture) -> tuple[list[list[str]], Any]:
    """[unit, phase] of each number, and the number of each event's unit (-1: none)."""
    number: dict[tuple[str, str], int] = {}
    of_event = np.full(device.activity.start.size, -1, np.int32)
    for event, unit in device.units.items():
        of_event[event] = number.setdefault((unit.unit, unit.phase), len(number))
    return [list(pair) for pair in number], of_event


def _collective(one: Any) -> dict[str, Any]:
    size = full_bytes(one.kind or "other", one.in_bytes, one.out_bytes)
    return {"kind": kind_of(one), "group": one.group, "dimension": one.dimension, "bytes": size}


def _steps(capture: Capture, device: DeviceCapture) -> list[dict[str, Any]]:
    """Each step's host window (`clip`) and the window of the events that it launched (`launch`, None without any)."""
    found = []
    for index, step in enumerate(capture.steps):
        mine = device.step == index
        activity = device.activity
        launch = [int(activity.start[mine].min()), int(activity.end[mine].max())] if mine.any() else None
        found.append({"step": step.number, "clip": [step.start_ns, step.end_ns], "launch": launch})
    return found


def _unit_spans(device: DeviceCapture, units: list[list[str]], unit_of: Any) -> list[dict[str, Any]]:
    """From the first start to the last end of each unit's communication in each step and phase: where to look for a
    layer."""
    found = []
    for number, (unit, phase) in enumerate(units):
        for index in np.unique(device.step[unit_of == number]):
            mine = (unit_of == number) & (device.step == index)
            start, end = int(device.activity.start[mine].min()), int(device.activity.end[mine].max())
            found.append({"unit": unit, "phase": phase, "step": int(index), "start": start, "end": end})
    return found


def _worst(device: DeviceCapture, compute: Coverage, class_of: Any, unit_of: Any) -> list[dict[str, Any]]:
    """The collectives of which most is exposed: while they ran, no kernel of the device computed."""
    activity = device.activity
    events = np.flatnonzero(activity.counts)
    start, end = activity.start[events], activity.end[events]
    exposed = (end - start) - (compute.until(end) - compute.until(start))
    most = np.argsort(-exposed, kind="stable")[:WORST_KEPT]
    most = most[exposed[most] > 0]
    events = events[most]
    columns = {
        "start": start[most],
        "end": end[most],
        "exposed_ns": exposed[most],
        "class": class_of[events],
        "collective": activity.collective[events],
        "unit": unit_of[events],
        "step": device.step[events],
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)]
