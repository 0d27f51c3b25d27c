"""Patterns of communication without a model: what keeping tensors alive costs (docs/probes.md, "record_streams").

The sizes are for GPUs; with `--mode cpu` choose smaller ones.
"""

from __future__ import annotations

from harness.config import Recorder, Trainer, Training, Window
from harness.workloads.config import WorkloadName


def collectives() -> Trainer.Config:
    """40 × all-gather, matrix product, reduce-scatter of 16 MiB shards a step: 2 processes."""
    return _run("collectives")


def point_to_point() -> Trainer.Config:
    """40 × 64 MiB sent down the line of ranks a step: 2 processes."""
    return _run("point_to_point")


def _run(workload: WorkloadName) -> Trainer.Config:
    return Trainer.Config(
        name=workload,
        workload=workload,
        world_size=2,
        training=Training.Config(device="cuda", steps=12),
        recorder=Recorder.Config(trace=Window(start=8, steps=1), memory=Window(start=10, steps=1)),
    )
