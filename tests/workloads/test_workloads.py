"""Workloads on gloo: the same sums whichever calls move the data, and what their recordings say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pool import Pool

from harness import compare
from harness.config import Trainer
from harness.config_json import with_overrides
from harness.errors import UsageError
from harness.ledger import predict
from harness.recipes import load_config
from harness.recording import Recording, read_recording
from harness.report import build
from harness.report.text import render

pytestmark = pytest.mark.distributed

SMALL = [
    ("training.steps", "4"),
    ("training.mixed_precision_param", "float32"),
    ("recorder.trace.start", "1"),
    ("recorder.memory.start", "3"),
]
LOOP = [("collectives.iterations", "3"), ("collectives.rows", "16"), ("collectives.dim", "32")]
LINE = [("point_to_point.sends", "5"), ("point_to_point.activation_mib", "1")]
ROWS_BYTES, WEIGHT_BYTES, ACTIVATION_BYTES = 16 * 32 * 4, 32 * 32 * 4, 1 << 20
CHECKSUMS_BYTES = 4 * 4


def config(name: str, *overrides: tuple[str, str], world_size: int = 2) -> Trainer.Config:
    sizes = {"collectives": LOOP, "point_to_point": LINE}[name]
    run = with_overrides(load_config("workloads", name), [*SMALL, *sizes, *overrides, ("world_size", str(world_size))])
    run.training.device = "cpu"
    return run


def record(pool: Pool, directory: Path, run: Trainer.Config) -> Recording:
    pool.train(run, directory)
    recording = read_recording(directory)
    assert recording.errors == []
    return recording


def checksums(recording: Recording) -> dict[int, list[float]]:
    return {rank: [row["loss"] for row in rows] for rank, rows in recording.steps.items()}


def peaks(recording: Recording) -> dict[int, int]:
    """The tracked step's, less what the base class keeps."""
    return {rank: rows[3]["peak_allocated_bytes"] - CHECKSUMS_BYTES for rank, rows in recording.steps.items()}


@pytest.fixture(scope="module")
def loop(pool, tmp_path_factory) -> Recording:
    pool.close()  # new workers: what checkpoints of the jobs before left in theirs would be tracked, too
    return record(pool, tmp_path_factory.mktemp("loop") / "functional", config("collectives"))


def test_collectives_hold_one_buffer_of_each_kind_at_a_time(loop):
    gathered = product = 2 * ROWS_BYTES
    resident = ROWS_BYTES + WEIGHT_BYTES
    peak = peaks(loop)
    assert min(peak.values()) >= resident + gathered + product
    # gloo's reduce-scatter works on a copy of its input; no iteration adds to the one before
    assert max(peak.values()) <= resident + gathered + 2 * product + ROWS_BYTES + 64


@pytest.mark.parametrize("async_op", ["true", "false"])
def test_c10d_calls_give_what_functional_ones_give(pool, tmp_path, loop, async_op):
    run = config("collectives", ("collectives.api", "c10d"), ("collectives.async_op", async_op))
    found = checksums(record(pool, tmp_path / "out", run))
    assert found == {rank: pytest.approx(values) for rank, values in checksums(loop).items()}
    assert len({values[0] for values in found.values()}) == 2, "the rows of the sum are another rank's"


def test_report_names_the_pattern_and_says_that_nothing_is_predicted(loop):
    text = render(build(loop.directory))
    assert "collectives: 2 ranks; float32\n" in text
    assert "collectives; 3 × all-gather, matrix product, reduce-scatter a step; 16 × 32, functional" in text
    assert "parameters (" not in text
    assert "No prediction: the ledger predicts trainings; collectives is a workload that trains nothing" in text
    assert f"world      all_gather          3  {3 * 2 * ROWS_BYTES:,}" in text
    assert f"world      reduce_scatter      3  {3 * 2 * ROWS_BYTES:,}" in text
    with pytest.raises(UsageError, match="collectives is a workload that trains nothing"):
        predict(config("collectives"))


@pytest.mark.parametrize(
    ("buffers", "batched", "activations"), [("freed", "false", 1), ("held", "true", 5), ("reused", "true", 2)]
)
def test_line_of_ranks_hands_activations_on(pool, tmp_path, buffers, batched, activations):
    run = config(
        "point_to_point", ("point_to_point.buffers", buffers), ("point_to_point.batched", batched), world_size=3
    )
    recording = record(pool, tmp_path / "out", run)
    first, second, third = (values[0] for values in checksums(recording).values())
    assert (second, third) == (pytest.approx(first / 2, rel=1e-5), pytest.approx(first / 4, rel=1e-5))
    # the source, and besides what buffers says
    assert {rank: peak // ACTIVATION_BYTES for rank, peak in peaks(recording).items()} == dict.fromkeys(
        range(3), 1 + activations
    )


def test_runs_of_other_work_are_not_comparable(pool, tmp_path, loop):
    held = compare.measure(record(pool, tmp_path / "held", config("point_to_point")).directory)
    found = compare.compare_runs(compare.measure(loop.directory), held)
    assert not found.comparable
    assert any("config.workload collectives in A, point_to_point in B" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("collectives", "iterations", 0, "collectives.iterations=0 must be at least 1"),
        ("collectives", "async_op", False, "collectives.async_op=false is for collectives.api=c10d"),
        ("point_to_point", "activation_mib", 0, "point_to_point.activation_mib=0 must be at least 1"),
    ],
)
def test_pattern_that_cannot_be_is_refused(name, field, value, message):
    run = config(name)
    setattr(getattr(run, name), field, value)
    with pytest.raises(UsageError, match=message):
        run.validate()


def test_what_would_change_nothing_is_refused():
    run = config("collectives")
    for other, message in (
        (dataclasses.replace(run, model=dataclasses.replace(run.model, dim=64)), "model: nothing of it acts on"),
        (dataclasses.replace(run, workload="training"), "collectives: nothing of it acts on workload=training"),
    ):
        with pytest.raises(UsageError, match=message):
            other.validate()
    line = config("point_to_point", world_size=1)
    with pytest.raises(UsageError, match="point_to_point sends from rank to rank"):
        line.validate()
    line.world_size, line.training.collective_memory = 2, "record_stream"
    with pytest.raises(UsageError, match="record_stream does not act on point_to_point"):
        line.validate()
