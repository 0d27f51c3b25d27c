"""Recordings, traces and snapshots written by hand for the tests of report and compare."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import recording
from harness.config import Decoder, Parallelism, Pipeline, Trainer, Training
from harness.config_json import to_dict
from harness.pipeline.plan import plan
from harness.pipeline.timeline import planned

MIB = 2**20


def write_recording(
    directory: Path,
    *,
    config: object = None,
    ranks: int = 2,
    world_size: int = 2,
    steps: int = 3,
    manifest: dict[str, Any] | None = None,
    **row: object,
) -> Path:
    """A complete CPU recording: rank r's step s takes 10 + s + r ms and peaks at (s + 1) MiB + r bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    about = {"mode": "cpu", "world_size": world_size, "config": config, "versions": {"torch": "9.9"}} | (manifest or {})
    recording.merge_manifest(directory, about)
    recording.write_status(directory, "complete")
    for rank in range(ranks):
        path = recording.steps_path(directory, rank)
        path.parent.mkdir(exist_ok=True)
        rows = [
            {
                "step": step,
                "wall_ns": (10 + step + rank) * 1_000_000,
                "loss": 2.5,
                "memory_source": "tensor_storages",
                "peak_allocated_bytes": (step + 1) * MIB + rank,
                "phases": {"forward": {"peak_allocated_bytes": step * MIB}},
                "tags": ["warmup"] if step == 0 else [],
                **row,
            }
            for step in range(steps)
        ]
        path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return directory


def write_trace(directory: Path, rank: int, collectives: list[tuple[str, int, int]]) -> None:
    """Our recorder's form on CPU: one step with `comm:` ranges of (kind, count, bytes of each) on the tp axis."""
    events = [{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0, "dur": 9000}]
    at = 1
    for kind, count, size in collectives:
        for sequence in range(count):
            name = f"comm:{kind}:mesh_tp:{sequence}:{size}"
            events.append({"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": at, "dur": 2})
            at += 3
    path = recording.trace_path(directory, 2, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events, "distributedInfo": {"rank": rank, "world_size": 2}}, file)


def write_pipeline(directory: Path, *, traced: bool = True) -> Path:
    """A CPU recording of two pipelines of two ranks each, ZBV with 4 micro-batches. Its traces hold steps 1 and 2 as
    planned, a forward of the second pipeline taking 2 ms instead of 1, and everything twice that in step 2."""
    config = Trainer.Config(
        name="pipeline",
        world_size=4,
        model=Decoder.Config(vocab_size=512, dim=64, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=176),
        parallelism=Parallelism.Config(pp=2, dp_shard=2),
        pipeline=Pipeline.Config(schedule="ZBVZeroBubble", micro_batches=4),
        training=Training.Config(device="cpu", steps=4, seq_len=64),
    )
    write_recording(directory, config=to_dict(config), ranks=4, world_size=4)
    if not traced:
        return directory
    timeline, length = planned(plan(config)), 200_000
    for rank in range(4):
        events: list[tuple[str, int, int]] = []
        for step in (1, 2):
            events.append((f"ProfilerStep#{step}", step * length, length))
            unit = 1000 * step * (1 + rank % 2)
            for action, start, end in timeline[rank // 2]:
                events.append((f"PP:{action}", step * length + start * unit, (end - start) * unit))
            events.append(("comm:recv:mesh_pp:0:8192", step * length + 190_000, 3000))
        path = recording.trace_path(directory, 3, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        common = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1}
        with gzip.open(path, "wt") as file:
            found = [common | {"name": name, "ts": ts, "dur": dur} for name, ts, dur in events]
            json.dump({"traceEvents": found, "distributedInfo": {"rank": rank, "world_size": 4}}, file)
    return directory


def rewrite_steps(directory: Path, rank: int, **values: Sequence[object]) -> None:
    """Replaces fields of a rank's rows, one value per step."""
    path = recording.steps_path(directory, rank)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for name, column in values.items():
        for row, value in zip(rows, column, strict=True):
            row[name] = value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_kernels(
    path: Path,
    kernels: Sequence[tuple[str, str | None, int, int, int]],
    *,
    rank: int = 0,
    world_size: int = 2,
    step: int | None = 3,
    length_us: int = 10_000,
    around: Sequence[str] = (),
    launched_us: Sequence[int] = (),
) -> Path:
    """A device trace of one step. Kernels: (name or collective, dimension or None for compute, stream, start µs,
    duration µs); each is launched at µs 1 unless `launched_us` says when, within the ranges `around`."""
    common = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1}
    events: list[dict[str, Any]] = [common | {"name": name, "ts": 0, "dur": 3} for name in around]
    if step is not None:
        name = f"ProfilerStep#{step}"
        events.append(
            {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": 0, "dur": length_us}
        )
    for number, (name, dimension, stream, start, dur) in enumerate(kernels, start=1):
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 1, "dur": 1}
        if launched_us:
            launch["ts"] = launched_us[number - 1]
        args: dict[str, Any] = {"device": 0, "stream": stream, "correlation": number}
        if dimension is not None:
            args |= {
                "Collective name": name,
                "Process Group Name": dimension,
                "Process Group Description": dimension,
                "Process Group Ranks": str(list(range(world_size))),
            }
        kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start, "dur": dur}
        events += [launch | {"args": {"correlation": number}}, kernel | {"args": args}]
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"schemaVersion": 1, "traceEvents": events, "distributedInfo": {"rank": rank, "world_size": world_size}}
    with gzip.open(path, "wt") as file:
        json.dump(content, file)
    return path


def write_snapshot(
    path: Path,
    *,
    pending: int = 0,
    size: int = 100 * MIB,
    site: str = "/home/me/train.py",
    completes: bool = True,
) -> Path:
    """A snapshot whose peak is two blocks of `size`; one is freed with `pending` further allocations before it can be
    reused, none of which the history shows if it does not complete."""
    frames = [{"filename": site, "line": 7, "name": "forward"}]
    base, time = 1 << 40, 1_000_000
    events: list[dict[str, Any]] = [{"action": "segment_alloc", "addr": base, "size": (pending + 3) * size}]

    def event(action: str, place: int) -> None:
        events.append({"action": action, "addr": base + place * size, "size": size, "frames": frames})

    event("alloc", 0)
    event("alloc", 1)
    event("free_requested", 0)
    for place in range(pending):
        event("alloc", 2 + place)
        event("free_requested", 2 + place)
    for place in [0, *range(2, 2 + pending)] if completes else []:
        event("free_completed", place)
    for index, item in enumerate(events):
        item |= {"stream": 0, "time_us": time + 10 * index}
    freed = "inactive" if completes else "active_pending_free"
    blocks = [
        {"address": base + place * size, "size": size, "requested_size": size, "state": state, "frames": frames}
        for place, state in [
            (0, freed),
            (1, "active_allocated"),
            *((2 + p, freed if p < pending else "inactive") for p in range(pending + 1)),
        ]
    ]
    total = sum(block["size"] for block in blocks)
    segment = {"device": 0, "address": base, "total_size": total, "stream": 0, "blocks": blocks}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [events]}, protocol=4))
    return path
