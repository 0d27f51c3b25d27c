"""Overlap and exposure of communication: the object `meshscope overlap --json` prints, made from trace files alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.errors import InputError
from harness.sources import Sources
from harness.trace.activity import Activity
from harness.trace.capture import Capture, DeviceCapture, read_captures
from harness.trace.cross_rank import cross_rank
from harness.trace.events import MISSING
from harness.trace.figures import COMMUNICATION, COMPUTE, Window

SCHEMA_VERSION = 1
HOST_WAITED = "no operator ran during communication: the host waited for every collective"


def analyse(sources: Sources) -> dict[str, Any]:
    """The `overlap --json` object of everything at `sources`: definitions as in `Window.figures`, times in ns.

    Never raises for a file: what cannot be read is in `errors`.
    """
    captures, errors = read_captures(sources)
    return analyse_captures(captures, errors, sources.mode)


def analyse_captures(captures: Sequence[Capture], errors: Sequence[InputError], mode: str) -> dict[str, Any]:
    """The same for captures that are already read."""
    return {
        "schema_version": SCHEMA_VERSION,
        "mode": mode,
        "ranks": [device_entry(capture, device) for capture in captures for device in capture.devices],
        "cross_rank": cross_rank(captures),
        "errors": [error.to_json() for error in errors],
    }


def device_entry(capture: Capture, device: DeviceCapture) -> dict[str, Any]:
    """One item of `ranks`: one device of one file; steps that it holds in part are named in `incomplete_steps`."""
    activity = device.activity
    whole = activity.window()
    by_launch = [activity.window(device.step == index) for index in range(len(capture.steps))]
    unattributed = activity.window(activity.launch == MISSING)
    return {
        "rank": capture.rank,
        "file": str(capture.file.path),
        "device": activity.device,
        "iteration": capture.file.iteration,
        "source": activity.source,
        "window": whole.figures(),
        "symmetric_comm_ns": activity.union(symmetric(activity)).total_ns(),
        "steps": [
            {"step": step.number, "rule": rule, **window.figures()}
            for step, launched in zip(capture.steps, by_launch, strict=True)
            for rule, window in (("launch", launched), ("clip", whole.clipped(step.start_ns, step.end_ns)))
        ],
        "unattributed": {
            "count": int((activity.launch == MISSING).sum()),
            "comm_ns": unattributed.communication.total_ns(),
            "compute_ns": unattributed.compute.total_ns(),
        },
        "breakdown": [
            breakdown(activity, device.step == index, step.number, window)
            for index, (step, window) in enumerate(zip(capture.steps, by_launch, strict=True))
        ],
        "units": units(device, whole),
        "collectives": collectives(activity, whole),
        "dimensions": [
            {"dimension": name, **whole.figures(activity.union(activity.dimension(name)))}
            for name in activity.dimensions()
        ],
        "incomplete_steps": sorted(capture.incomplete),
        "dropped": capture.dropped,
        "notes": capture.notes + notes(capture, device, whole),
    }


def symmetric(activity: Activity) -> Any:
    return activity.where([collective.symmetric for collective in activity.collectives])


def breakdown(activity: Activity, in_step: Any, number: int, window: Window) -> dict[str, Any]:
    """Where a step's span goes, by the launch rule: compute + exposed communication + exposed memory operations +
    idle = span. `exposed` is per dimension, and dimensions that communicate at the same time count it twice;
    `idle_host_ns` is what of idle the device waited for its host (`Activity.starved_ns`)."""
    exposed = {
        name: window.exposed_ns(activity.union(activity.dimension(name) & in_step)) for name in activity.dimensions()
    }
    return {
        "step": number,
        "compute_ns": window.compute.total_ns(),
        "exposed": exposed,
        "exposed_memory_ns": window.exposed_memory_ns(),
        "idle_ns": window.idle_ns(),
        "idle_host_ns": activity.starved_ns(in_step),
        "span_ns": window.span_ns,
    }


def units(device: DeviceCapture, whole: Window) -> list[dict[str, Any]]:
    """Figures per FSDP unit, phase and kind, in order of first appearance."""
    activity = device.activity
    events: dict[tuple[str, str, str], list[int]] = {}
    for event, unit in device.units.items():
        kind = activity.collectives[int(activity.collective[event])].kind
        if kind is not None:
            events.setdefault((unit.unit, unit.phase, kind), []).append(event)
    first = sorted(events.items(), key=lambda item: int(activity.start[item[1]].min()))
    found = []
    for (unit_name, phase, kind), members in first:
        mask = np.zeros(activity.start.size, np.bool_)
        mask[members] = True
        found.append({"unit": unit_name, "phase": phase, "kind": kind, **whole.figures(activity.union(mask))})
    return found


def collectives(activity: Activity, whole: Window) -> list[dict[str, Any]]:
    """Figures per kind, group and dimension over the whole file; `sum_ns` adds up the durations of the `count`
    collectives, concurrent ones twice (on the host those of gloo's works, without the calls)."""
    kinds: dict[tuple[str, str | None, str | None], list[int]] = {}
    for index in np.unique(activity.collective).tolist():
        if index >= 0:
            one = activity.collectives[index]
            if one.kind is not None:
                kinds.setdefault((one.kind, one.group, one.dimension), []).append(index)
    found = []
    for (kind, group, dimension), indices in kinds.items():
        mask = np.isin(activity.collective, indices)
        counted = mask & activity.counts
        found.append(
            {
                "kind": kind,
                "group": group,
                "dimension": dimension,
                "count": int(counted.sum()),
                **whole.figures(activity.union(mask)),
                "sum_ns": sum((activity.end - activity.start)[counted].tolist()),
                "raw_kinds": sorted({activity.collectives[index].raw_kind for index in indices}),
            }
        )
    return sorted(found, key=lambda item: (str(item["dimension"]), -item["comm_ns"], item["kind"]))


def notes(capture: Capture, device: DeviceCapture, whole: Window) -> list[str]:
    """What a reader of the figures has to know."""
    activity = device.activity
    found = []
    if activity.source == "host":
        found.append("no device events: times are the host's (operators, c10d calls, gloo), not device time")
        if whole.communication.start.size and not whole.figures()["overlap_ns"]:
            found.append(HOST_WAITED)
    found += activity.notes
    if not whole.communication.start.size:
        found.append("no communication: overlap is n/a")
    if len(activity.dimensions()) > 1:
        found.append("dimensions that communicate at the same time: exposed times per dimension need not add up")
    found += stream_notes(activity, whole)
    if symmetric(activity).any():
        found.append("symmetric-memory and custom all-reduce kernels are included in communication")
    found += [
        f"step {number} is incomplete ({why}): neither compared nor in means"
        for number, why in capture.incomplete.items()
    ]
    if not capture.steps:
        found.append("no ProfilerStep#N annotations: no steps")
    outside = int(((device.step < 0) & (activity.launch != MISSING)).sum())
    if capture.steps and outside:
        found.append(f"{outside} events were launched outside every step's host window")
    without = int((activity.launch == MISSING).sum())
    if without:
        found.append(f"{without} events have no launch in the file: the first step may be partial")
    if capture.launches_without_event:
        found.append(f"{capture.launches_without_event} launches have no device event: the last step may be partial")
    return found


def stream_notes(activity: Activity, whole: Window) -> list[str]:
    """Says where communication cannot overlap because it shares a stream with compute."""
    known = activity.stream != MISSING
    comm = set(np.unique(activity.stream[known & (activity.role == COMMUNICATION)]).tolist())
    compute = set(np.unique(activity.stream[known & (activity.role == COMPUTE)]).tolist())
    shared = sorted(comm & compute)
    if not shared:
        return []
    text = f"streams shared by communication and compute: {', '.join(map(str, shared))}"
    if comm == compute and len(comm) == 1:
        return [f"{text}: overlap is impossible on one stream"]
    return [f"{text}: what runs on one stream cannot overlap there"]
