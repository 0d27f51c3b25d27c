"""Pipelines on 4 gloo processes: the same training as one process, exactly the ledger's memory and traffic, and the
schedule that was planned."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config import Data, Decoder, Parallelism, Pipeline, Recorder, Trainer, Training, Window
from harness.launch import launch
from harness.pipeline.plan import plan
from harness.recording import read_recording
from harness.rehearsal import ranks_to_rehearse
from harness.report import Report, build
from harness.report.text import render
from harness.trace.events import read_trace
from harness.trace.intervals import intersection, union

pytestmark = pytest.mark.distributed

# Losses and gradient norms of float32 runs differ between layouts by the order of their sums.
LOSS_TOLERANCE = 2e-6
NORM_TOLERANCE = 2e-5
PEAK_TOLERANCE_PCT = 3.0
SEQUENCES = 8
"""Of a step, over data-parallel ranks, passes and micro-batches: the same in every layout."""


@dataclass(frozen=True)
class Layout:
    parallelism: dict[str, Any]
    pipeline: dict[str, Any]
    accumulation_steps: int = 1
    tied: bool = False


# Its communication is its own: rank 1 asks for both activations before it computes.
TABLE = """\
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0B1,0RECV_B0,0I0,0W0,0REDUCE_GRAD,0RESHARD
1UNSHARD,1RECV_F0,1RECV_F1,1F0,1F1,1B1,1SEND_B1,1I0,1SEND_B0,1W0,1REDUCE_GRAD,1RESHARD
"""

LAYOUTS = {
    "1f1b_fsdp2_two_passes": Layout({"pp": 2, "dp_shard": 2}, {"schedule": "1F1B", "micro_batches": 2}, 2),
    "gpipe_tp2": Layout({"pp": 2, "tp": 2}, {"schedule": "GPipe", "micro_batches": 4}),
    "interleaved_pp4": Layout({"pp": 4}, {"schedule": "Interleaved1F1B", "micro_batches": 4}),
    "bfs_tp2_replicated": Layout({"pp": 2, "tp": 2, "sequence_parallel": False}, {"schedule": "LoopedBFS"}),
    "zero_bubble_hsdp2x1": Layout({"pp": 2, "dp_replicate": 2}, {"schedule": "InterleavedZeroBubble"}),
    "zbv_fsdp2": Layout({"pp": 2, "dp_shard": 2}, {"schedule": "ZBVZeroBubble"}),
    "dualpipev_tp2": Layout({"pp": 2, "tp": 2}, {"schedule": "DualPipeV"}),
    "tied_1f1b_fsdp2_two_passes": Layout({"pp": 2, "dp_shard": 2}, {"schedule": "1F1B"}, 2, tied=True),
    "tied_zbv_tp2": Layout({"pp": 2, "tp": 2}, {"schedule": "ZBVZeroBubble"}, tied=True),
    "tied_interleaved_pp4": Layout({"pp": 4}, {"schedule": "Interleaved1F1B", "micro_batches": 4}, tied=True),
    "table_fsdp2": Layout(
        {"pp": 2, "dp_shard": 2},
        {
            "table": TABLE,
            "split": [["tok_embeddings", "layers.0"], [*(f"layers.{i}" for i in range(1, 6)), "norm", "lm_head"]],
        },
    ),
}


SINGLE = {False: "single", True: "single_tied"}
"""One process, for layouts with and without tied embeddings."""


def configuration(name: str) -> Trainer.Config:
    layout = LAYOUTS.get(name, Layout({}, {}, tied=name == SINGLE[True]))
    parallelism = Parallelism.Config(**{"dp_shard": 1, **layout.parallelism})
    config = Trainer.Config(
        name=name,
        world_size=math.prod(getattr(parallelism, axis) for axis in ("pp", "dp_replicate", "dp_shard", "tp")),
        model=Decoder.Config(
            vocab_size=512, dim=64, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=176, tied_embeddings=layout.tied
        ),
        parallelism=parallelism,
        pipeline=Pipeline.Config(**layout.pipeline),
        training=Training.Config(
            device="cpu",
            steps=4,
            accumulation_steps=layout.accumulation_steps,
            seq_len=64,
            mixed_precision_param="float32",
        ),
        data=Data.Config(ignored_share=0.3),
        recorder=Recorder.Config(trace=Window(start=3, steps=1), memory=Window(start=1, steps=2)),
    )
    data_parallel = parallelism.dp_replicate * parallelism.dp_shard
    forwards = data_parallel * config.pipeline_micro_batches * layout.accumulation_steps
    config.training.micro_batch_size = SEQUENCES // forwards
    return config


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, pool) -> Callable[[str], Report]:
    """The report of a run of a layout, run once."""
    folder: Path = tmp_path_factory.mktemp("pipelines")
    reports: dict[str, Report] = {}

    def of(name: str) -> Report:
        if name not in reports:
            directory = folder / name
            directory.mkdir()
            pool.train(configuration(name), directory)
            reports[name] = build(directory)
        return reports[name]

    return of


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_schedule_trains_as_one_process_does(recorded, name):
    reference, report = recorded(SINGLE[LAYOUTS[name].tied]), recorded(name)
    assert [step["step"] for step in report.steps] == [0, 1, 2, 3]
    for expected, actual in zip(reference.steps, report.steps, strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=LOSS_TOLERANCE)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=NORM_TOLERANCE)
    losses = {rank: [row["loss"] for row in rows] for rank, rows in report.recording.steps.items()}
    assert len(losses) == 4
    assert all(series == losses[0] for series in losses.values()), "ranks disagree on the global loss"


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_stage_sends_exactly_what_is_predicted(recorded, name):
    config, report = configuration(name), recorded(name)
    degrees = {axis: getattr(config.parallelism, axis) for axis in ("pp", "dp_replicate", "dp_shard", "tp")}
    axes = {axis for axis, degree in degrees.items() if degree > 1}
    for stage in range(config.parallelism.pp):
        rows = [row for row in report.communication if row.pipeline_rank == stage]
        assert {row.dimension for row in rows} == axes
        for row in rows:
            assert row.agree, row
            assert (row.measured_count, row.measured_bytes) == (row.predicted_count, row.predicted_bytes)
        kinds = {row.kind for row in rows if row.dimension == "pp"}
        assert kinds == {"send", "recv", "all_reduce"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_predicted_cpu_peak_of_every_stage_is_reached(recorded, name):
    """As in tests/test_end_to_end.py, the lower of two tracked steps."""
    report = recorded(name)
    for rank in report.prediction.ranks:
        rows = [row for row in report.recording.steps[rank.rank] if row["memory_source"] == "tensor_storages"]
        measured = min(row["peak_allocated_bytes"] for row in rows)
        error_pct = 100 * (rank.peak_allocated_bytes - measured) / measured
        assert abs(error_pct) < PEAK_TOLERANCE_PCT, (name, rank.rank, error_pct)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_trace_shows_the_planned_schedule(recorded, name):
    config, report = configuration(name), recorded(name)
    planned = plan(config)
    found = report.pipeline.to_json()
    per_stage = config.world_size // config.parallelism.pp
    assert len(found["measured"]) == per_stage, "one step of as many pipelines as a stage has ranks"
    for one in found["measured"]:
        assert (one["step"], one["source"]) == (3, "host")
        assert [rank["rank"] // per_stage for rank in one["ranks"]] == list(range(config.parallelism.pp))
        for rank in one["ranks"]:
            row = planned.computation[rank["rank"] // per_stage]
            order = [str(part) for action in row for part in action.steps] * config.training.accumulation_steps
            assert [item["action"] for item in rank["actions"]] == order
            assert 0 <= rank["bubble_pct"] < 100
            assert rank["busy_ns"] <= rank["span_ns"]
    assert set(found["costs_ns"]) == {item["action"].lstrip("0123456789")[0] for item in _actions(found)}
    assert len(found["expected"]["ranks"]) == config.parallelism.pp


def _actions(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for one in found["measured"] for rank in one["ranks"] for item in rank["actions"]]


def test_transfers_under_way_hide_no_computation(recorded):
    """gloo's annotation of a send is open on the computing thread until the pass ends. Within a computation of this
    layout nothing communicates, so that every operator counts."""
    report = recorded("interleaved_pp4")
    for capture in report.captures:
        (device,) = capture.devices
        activity = device.activity
        sends = activity.where([one.kind in ("send", "recv") for one in activity.collectives])
        assert sends.any()
        computes = activity.window().compute
        assert intersection(activity.union(sends), computes).total_ns() == 0
        spans = np.array([(one.start_ns, one.end_ns) for one in capture.pipeline], np.int64)
        passes = union(spans[:, 0], spans[:, 1])
        operators = read_trace(capture.file.path).operators
        all_computing = union(operators.start, operators.start + operators.dur)
        assert intersection(passes, computes).total_ns() == intersection(passes, all_computing).total_ns() > 0


def test_the_report_draws_both_grids(recorded):
    text = render(recorded("zbv_fsdp2"))
    section = text[text.index("Pipeline, ZBVZeroBubble: 4 stages on 2 pipeline ranks, 4 micro-batches") :]
    assert "0: tok_embeddings, layer 0; 3: layer 5, norm, lm_head" in section
    planned, measured = section[section.index("planned, a backward") :].split("measured, step 3")[:2]
    assert "aaaAAA" in planned.splitlines()[1]
    assert {line.split()[0] for line in measured.splitlines()[1:3]} == {"1", "3"}


def test_a_rehearsed_stage_holds_what_a_real_one_does(recorded, tmp_path):
    """One rank of each stage, alone: the stage is told the shapes of what it would receive."""
    config, report = configuration("zbv_fsdp2"), recorded("zbv_fsdp2")
    ranks = ranks_to_rehearse(config, None)
    assert ranks == [0, 2]
    status = launch(config, tmp_path / "run", mode="rehearsal", rehearse=ranks, environment={"OMP_NUM_THREADS": "1"})
    assert (status.state, status.reason) == ("complete", None)
    rehearsed = read_recording(tmp_path / "run")
    for rank in ranks:
        # Each step keeps one loss more, and the mesh's own tensor of ranks is real only where groups are.
        slack = 128 + 4 * config.world_size
        assert min(_peaks(rehearsed, rank)) == pytest.approx(min(_peaks(report.recording, rank)), abs=slack)


def _peaks(recording: Any, rank: int) -> list[int]:
    rows = recording.steps[rank]
    return [row["peak_allocated_bytes"] for row in rows if row["memory_source"] == "tensor_storages"]
