"""Experiments of ranks without torch, planned as the command plans them."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from written import write_kernels, write_snapshot

from harness import recording
from harness.cli import build_parser, split_overrides
from harness.commands import probe
from harness.config_json import to_dict
from probes import surroundings
from probes.experiment import Experiment

PROGRAM = (str(Path(__file__).parent / "probes" / "rank_program.py"),)
SMALL = (
    *("--config", "single", "--nproc", "2", "--mode", "cpu", "--warmup", "1", "--training.steps", "4"),
    *("--parallelism.dp_shard", "2", "--recorder.trace.steps", "0", "--recorder.memory.steps", "0"),
)


def arguments(*words: str) -> argparse.Namespace:
    rest, overrides = split_overrides(["probe", *words])
    return build_parser("probe").parse_args(rest, argparse.Namespace(overrides=overrides))


def experiment(directory: Path, *words: str) -> Experiment:
    directory.mkdir(exist_ok=True)
    planned = replace(probe.plan(arguments(words[0], *SMALL, *words[1:])), directory=directory)
    planned.fix()
    return planned


def write_trial(
    planned: Experiment,
    index: int,
    *,
    wall_ns: int = 1_000_000,
    loss: float | None = 1.0,
    peak: int = 5 * 2**20,
    ranks: tuple[int, ...] = (0, 1),
    environment: dict[str, str] | None = None,
    samples: list[dict[str, Any]] | None = None,
) -> Path:
    """What the trial `index` leaves behind. `environment` is added to what its ranks say they started with, `samples`
    are of surroundings.json."""
    trial = planned.order()[index]
    arm, directory = planned.arm(trial.arm), planned.trial_directory(trial)
    settings = {name: value for name, value in arm.environment.items() if value is not None}
    config = planned.config_of(arm)
    recording.merge_manifest(
        directory,
        {"mode": "cpu", "world_size": 2, "recorded_ranks": [0, 1], "config": to_dict(config), "versions": {}},
    )
    for rank in ranks:
        recording.write_json(
            recording.rank_path(directory, rank),
            {"rank": rank, "environment_before": {**settings, **(environment or {})}, "end_state": "complete"},
        )
        rows = [
            {
                "step": step,
                "started_unix_ns": 1000 + step,
                "wall_ns": wall_ns,
                "loss": loss,
                "memory_source": "cuda_allocator",
                "peak_allocated_bytes": peak,
                "tags": [],
            }
            for step in range(config.training.steps)
        ]
        path = recording.steps_path(directory, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recording.write_json(surroundings.path_of(directory), {"reason": None, "samples": samples or []})
    recording.write_status(directory, "complete")
    return directory


def write_all(planned: Experiment, slower: float = 1.0, captures: bool = True) -> None:
    """Every trial; those of arms but the first take `slower` times as long, in a session that slows down by 1 % from
    trial to trial. Arm k peaks k blocks higher."""
    names = [arm.name for arm in planned.run_arms]
    for trial in planned.order():
        place = names.index(trial.arm)
        wall = round(1_000_000 * (slower if place else 1) * (1 + trial.index / 100 + trial.index**2 / 10_000))
        directory = write_trial(planned, trial.index, wall_ns=wall)
        if captures:
            for rank in range(2):
                steps = [("gemm", None, 7, 100, 4000), ("allreduce", "mesh_dp", 20, 4050, 100 * (1 + rank + place))]
                write_kernels(recording.trace_path(directory, 4, rank), steps, rank=rank)
            write_snapshot(recording.snapshot_path(directory, 4, 0), pending=place)


if __name__ == "__main__":  # a process of its own, to be killed
    probe.perform(experiment(Path(sys.argv[1]), *sys.argv[2:]), [], PROGRAM)
