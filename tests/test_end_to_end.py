"""Whole runs on 4 gloo processes: the same training as one process, and exactly the ledger's memory and traffic."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.config import Data, Decoder, Parallelism, Recorder, Trainer, Training, Window
from harness.report import Report, build

pytestmark = pytest.mark.distributed

# Losses and gradient norms of float32 runs differ between layouts by the order of their sums.
LOSS_TOLERANCE = 2e-6
NORM_TOLERANCE = 2e-5
# The ledger against tracked storages: the bound set for it; what is reached is far less.
PEAK_TOLERANCE_PCT = 3.0

LAYOUTS = {
    "single": Parallelism.Config(dp_shard=1),
    "fsdp4": Parallelism.Config(dp_shard=4),
    "fsdp2_tp2": Parallelism.Config(dp_shard=2, tp=2),
    "tp4_no_sp": Parallelism.Config(dp_shard=1, tp=4, sequence_parallel=False),
    "fsdp2_tp2_never": Parallelism.Config(dp_shard=2, tp=2, reshard_after_forward="never"),
    "fsdp4_always": Parallelism.Config(dp_shard=4, reshard_after_forward="always"),
    "fsdp2_tp2_bfloat16": Parallelism.Config(dp_shard=2, tp=2),
}
IN_FLOAT32 = [name for name in LAYOUTS if "bfloat16" not in name]
GLOBAL_BATCH = 4


def configuration(name: str) -> Trainer.Config:
    layout = copy.deepcopy(LAYOUTS[name])
    return Trainer.Config(
        name=name,
        world_size=layout.dp_shard * layout.tp,
        model=Decoder.Config(vocab_size=512, dim=64, n_layers=3, n_heads=8, n_kv_heads=4, ffn_dim=176),
        parallelism=layout,
        training=Training.Config(
            device="cpu",
            steps=4,
            micro_batch_size=GLOBAL_BATCH // layout.dp_shard,
            seq_len=64,
            mixed_precision_param="float32" if name in IN_FLOAT32 else "bfloat16",
        ),
        data=Data.Config(ignored_share=0.3),
        recorder=Recorder.Config(trace=Window(start=3, steps=1), memory=Window(start=1, steps=2)),
    )


@pytest.fixture(scope="session")
def recorded(tmp_path_factory, pool) -> Callable[[str], Report]:
    """The report of a run of a layout, run once a session."""
    folder: Path = tmp_path_factory.mktemp("recordings")
    reports: dict[str, Report] = {}

    def of(name: str) -> Report:
        if name not in reports:
            directory = folder / name
            directory.mkdir()
            pool.train(configuration(name), directory)
            reports[name] = build(directory)
        return reports[name]

    return of


@pytest.mark.parametrize("name", [name for name in IN_FLOAT32 if name != "single"])
def test_every_layout_trains_as_one_process_does(recorded, name):
    reference, report = recorded("single"), recorded(name)
    assert [step["step"] for step in report.steps] == [0, 1, 2, 3]
    for expected, actual in zip(reference.steps, report.steps, strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=LOSS_TOLERANCE)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=NORM_TOLERANCE)
    losses = {rank: [row["loss"] for row in rows] for rank, rows in report.recording.steps.items()}
    assert all(series == losses[0] for series in losses.values()), "ranks disagree on the global loss"


@pytest.mark.parametrize("name", LAYOUTS)
def test_recorded_collectives_are_exactly_the_ledgers(recorded, name):
    report = recorded(name)
    assert report.prediction is not None
    if name == "single":
        assert report.communication == []
        return
    degrees = {"dp_shard": LAYOUTS[name].dp_shard, "tp": LAYOUTS[name].tp}
    assert {row.dimension for row in report.communication} == {axis for axis, n in degrees.items() if n > 1}
    for row in report.communication:
        assert row.agree, row
        assert (row.measured_count, row.measured_bytes) == (row.predicted_count, row.predicted_bytes)
        assert row.measured_count > 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_predicted_cpu_peak_is_what_the_storages_reach(recorded, name):
    report = recorded(name)
    assert len(report.prediction.ranks) == configuration(name).world_size
    for rank in report.prediction.ranks:
        assert rank.measured_peak_allocated_bytes is not None
        assert abs(rank.error_pct) < PEAK_TOLERANCE_PCT, (name, rank.rank, rank.error_pct)


def test_a_recording_says_what_ran_and_how_it_ended(recorded):
    report = recorded("fsdp2_tp2")
    assert report.mode == "cpu"
    assert report.errors == []
    assert report.recording.status.state == "complete"
    assert report.config == configuration("fsdp2_tp2")
    assert report.recording.missing_ranks == []
    sources = [step["memory_source"] for step in report.steps]
    assert sources == ["rss", "tensor_storages", "tensor_storages", "rss"]
    assert {entry["source"] for entry in report.overlap["ranks"]} == {"host"}
    assert sorted(entry["rank"] for entry in report.overlap["ranks"]) == [0, 1, 2, 3]
    assert {step["step"] for entry in report.overlap["ranks"] for step in entry["steps"]} == {3}
