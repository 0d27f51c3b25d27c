"""Whole steps against the real trainer's modules: memory to the bytes of zero-dimensional tensors, communication
exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.ledger import Implementation, predict
from harness.ledger.pipeline import PipelineStep
from harness.ledger.step import Step

from .real_steps import CASES, lacks

SLACK = 128
"""Bytes of zero-dimensional tensors alive at a peak (loss, norm, counts), which the ledger leaves out."""

APPROXIMATE_PCT = {"compiled_selective_tp2": 2.5, "compiled_full_every2": 0.1, "compiled_budget": 6.0}
"""The ledger follows torch's partitioner where it is plain what that keeps, and no further: the order in which regions
are computed again, 5,056 bytes of random state a layer (CPU), the knapsack of a memory budget."""


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    command = [sys.executable, "-W", "error", "-m", f"{__package__}.real_steps"]
    root = Path(__file__).parents[__package__.count(".") + 1]
    child = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr
    figures: dict[str, Any] = json.loads(child.stdout)
    return figures


def skip_where_it_cannot_run(name: str) -> None:
    """Float8 without torchao, an optional extra (the dev extra, and so CI, brings it), or where torch has no such CPU
    products."""
    if missing := lacks(CASES[name][0]):
        pytest.skip(missing)


def ledger_phases(step: Step | PipelineStep) -> dict[str, int]:
    step.run()
    phases = {"forward": 0, "backward": 0, "optimizer": 0}
    for instant in step.tape.instants:
        name = instant.name.split(":")[0]
        if name in phases:
            phases[name] = max(phases[name], instant.bytes)
    return phases


@pytest.mark.parametrize("name", CASES)
def test_memory(name: str, measured: dict[str, Any]) -> None:
    skip_where_it_cannot_run(name)
    config, rank = CASES[name]
    shard_rank = rank // config.parallelism.tp % config.fsdp_shards
    options: Any = {"target": "cpu", "shard_rank": shard_rank, "implementation": Implementation()}
    ledger: Step | PipelineStep
    if config.parallelism.pp == 1:
        ledger = Step(config, **options)
    else:
        stage = rank // (config.world_size // config.parallelism.pp)
        ledger = PipelineStep(config, pipeline_rank=stage, **options)
    for step, peaks in enumerate(measured[name]["peaks"]):
        predicted = ledger_phases(ledger)
        for phase, size in peaks.items():
            slack = SLACK + size * APPROXIMATE_PCT.get(name, 0) / 100
            assert predicted[phase] == pytest.approx(size, abs=slack), (step, phase)


@pytest.mark.parametrize("name", CASES)
def test_communication(name: str, measured: dict[str, Any]) -> None:
    """Where axes have the same size, their collectives count together: operators do not name the axis."""
    skip_where_it_cannot_run(name)
    config, rank = CASES[name]
    stage = rank // (config.world_size // config.parallelism.pp) if config.parallelism.pp > 1 else None
    layout = config.parallelism
    sizes = {axis: getattr(layout, axis) for axis in ("dp_replicate", "cp", "tp", "pp")}
    sizes[config.fsdp_axis] = config.fsdp_shards
    predicted: Counter[tuple[int, str, str]] = Counter()
    for c in (c for c in predict(config, "cpu").communication if c.pipeline_rank == stage):
        predicted[sizes[c.dimension], c.kind, "count"] += c.count
        predicted[sizes[c.dimension], c.kind, "bytes"] += c.bytes
    sent: Counter[tuple[int, str, str]] = Counter()
    for size, kind, count, total in measured[name]["sent"]:
        sent[size, kind, "count"], sent[size, kind, "bytes"] = count, total
    assert predicted == sent
