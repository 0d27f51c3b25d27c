"""Captures made of random events, and what a nanosecond-by-nanosecond count says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from harness.sources import SourceFile
from harness.trace.activity import Activity, Collective
from harness.trace.capture import Capture, DeviceCapture
from harness.trace.events import MISSING
from harness.trace.figures import COMMUNICATION, COMPUTE, MEMORY
from harness.trace.steps import Step
from harness.trace.units import Unit

SPAN_NS = 3000
COLLECTIVES = [
    Collective("all_gather", "allgather", "1", "mesh_dp", (0, 1), 10, 20),
    Collective("reduce_scatter", "reduce_scatter", "1", "mesh_dp", (0, 1), 40, 20),
    Collective("all_gather", "allgather", "2", "mesh_tp", (0, 2), 10, None),
]


def random_capture(seed: int, events: int = 120, *, base_ns: int = 1_700_000_000_000_000_000) -> Capture:
    """Events of every role on three streams that may run at once, some without any length; steps at every 1000 ns."""
    random = np.random.default_rng(seed)
    start = np.sort(random.integers(0, SPAN_NS - 80, events))
    role = random.choice([COMPUTE, COMMUNICATION, MEMORY], events, p=[0.5, 0.35, 0.15]).astype(np.int8)
    collective = np.where(role == COMMUNICATION, random.integers(0, len(COLLECTIVES), events), -1)
    activity = Activity(
        source="device",
        device=0,
        start=start,
        end=start + random.integers(0, 80, events),
        role=role,
        collective=collective,
        launch=start,
        thread=np.zeros(events, np.int64),
        stream=np.where(role == COMMUNICATION, random.choice([7, 20], events), random.choice([7, MISSING], events)),
        sequence=np.full(events, MISSING, np.int64),
        counts=role == COMMUNICATION,
        name=random.integers(0, 3, events),
        collectives=COLLECTIVES,
        names=["void at::native::gemm<float, 4>(int)", "ncclDevKernel_AllGather", "Memcpy DtoD"],
    )
    steps = [Step(number, 1000 * index, 1000 * (index + 1)) for index, number in enumerate((4, 5, 6))]
    units = {int(event): Unit("layers.0", "forward") for event in np.flatnonzero(collective == 0)}
    return Capture(
        file=SourceFile(path=Path("rank0_trace.json"), rank=0, iteration=None),
        rank=0,
        start_ns=base_ns + int(start.min()),
        end_ns=base_ns + int(activity.end.max()),
        base_ns=base_ns,
        steps=steps,
        devices=[DeviceCapture(activity=activity, step=start // 1000, units=units)],
        launches_without_event=0,
        dropped={},
    )


def moments(activity: Activity, mask: Any) -> Any:
    """Which nanoseconds the chosen events cover."""
    covered = np.zeros(SPAN_NS, np.bool_)
    for start, end in zip(activity.start[mask], activity.end[mask], strict=True):
        covered[start:end] = True
    return covered


def class_moments(activity: Activity) -> dict[str, Any]:
    """Label of a class -> its nanoseconds."""
    found = {
        "compute": moments(activity, activity.role == COMPUTE),
        "memory operations": moments(activity, activity.role == MEMORY),
    }
    for one in COLLECTIVES:
        wanted = activity.where([(o.dimension, o.kind) == (one.dimension, one.kind) for o in activity.collectives])
        found[f"{one.dimension} {one.kind}"] = moments(activity, wanted)
    return found
