"""Three kinds of parallelism at once, two ranks each, on 8 gloo processes: the same training as one process, and
exactly the ledger's traffic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pool import Pool

from harness.config import (
    ActivationCheckpoint,
    Data,
    Decoder,
    Parallelism,
    Pipeline,
    Recorder,
    Trainer,
    Training,
    Window,
)
from harness.report import Report, build

pytestmark = pytest.mark.distributed

LOSS_TOLERANCE, NORM_TOLERANCE = 2e-6, 2e-5
SEQUENCES = 8
"""Of a step, over data-parallel ranks and micro-batches: the same in every layout."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2_fsdp2_tp2": {"pp": 2, "dp_shard": 2, "tp": 2},
    "cp2_fsdp2_tp2": {"cp": 2, "dp_shard": 2, "tp": 2},
}


def configuration(name: str) -> Trainer.Config:
    layout = Parallelism.Config(**LAYOUTS.get(name, {"dp_shard": 1}))
    micro_batches = 2 if layout.pp > 1 else 1
    return Trainer.Config(
        name=name,
        world_size=math.prod((layout.pp, layout.cp, layout.dp_shard, layout.tp)),
        model=Decoder.Config(vocab_size=512, dim=64, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=176),
        parallelism=layout,
        pipeline=Pipeline.Config(micro_batches=micro_batches) if layout.pp > 1 else Pipeline.Config(),
        activation_checkpoint=ActivationCheckpoint.Config(mode="selective"),
        training=Training.Config(
            device="cpu",
            steps=3,
            micro_batch_size=SEQUENCES // (layout.dp_shard * micro_batches),
            seq_len=64,
            mixed_precision_param="float32",
        ),
        data=Data.Config(ignored_share=0.3),
        recorder=Recorder.Config(trace=Window(start=2, steps=1), memory=Window(start=1, steps=1)),
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Report]]:
    """The report of a run of a layout, run once."""
    folder: Path = tmp_path_factory.mktemp("three_axes")
    workers = Pool(8, folder)
    reports: dict[str, Report] = {}

    def of(name: str) -> Report:
        if name not in reports:
            (folder / name).mkdir()
            workers.train(configuration(name), folder / name, timeout_s=240)
            reports[name] = build(folder / name)
        return reports[name]

    yield of
    workers.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_as_one_process_does(recorded, name):
    reference, report = recorded("single"), recorded(name)
    assert len(reference.steps) == len(report.steps) == 3
    for expected, actual in zip(reference.steps, report.steps, strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=LOSS_TOLERANCE)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=NORM_TOLERANCE)


@pytest.mark.parametrize(
    ("name", "axes"),
    [("pp2_fsdp2_tp2", {"pp", "dp_shard", "tp"}), ("cp2_fsdp2_tp2", {"cp", "dp_shard_cp", "tp"})],
)
def test_recorded_collectives_are_exactly_the_ledgers(recorded, name, axes):
    rows = recorded(name).communication
    assert {row.dimension for row in rows} == axes
    for row in rows:
        assert row.agree, row
        assert (row.measured_count, row.measured_bytes) == (row.predicted_count, row.predicted_bytes)
