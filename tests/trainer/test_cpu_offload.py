"""CPU offload: the same training from host memory, as far as a CPU has the two apart, and where it is refused.

On CPUs FSDP2's offload policy takes its own ways through all-gather and reduction, whose copies are none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import checkpoint_path
from harness.config import Data, Decoder, Parallelism, Recorder, Trainer, Training, Window
from harness.errors import UsageError
from harness.ledger import predict
from harness.ledger.text import report
from harness.recording import read_recording


def run_of(**training: Any) -> Trainer.Config:
    return Trainer.Config(
        name="offload",
        world_size=4,
        model=Decoder.Config(vocab_size=512, dim=64, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=176),
        parallelism=Parallelism.Config(dp_shard=2, tp=2),
        training=Training.Config(device="cpu", steps=4, accumulation_steps=2, seq_len=32, **training),
        data=Data.Config(ignored_share=0.3),
        recorder=Recorder.Config(trace=Window(), memory=Window()),
    )


def trained(directory: Path) -> list[tuple[int, float, float]]:
    recording = read_recording(directory)
    assert recording.status.state == "complete"
    return [(row["step"], row["loss"], row["grad_norm"]) for row in recording.steps[0]]


@pytest.mark.distributed
def test_offloaded_shards_train_bit_for_bit_as_those_on_the_device_and_take_up_their_checkpoint(tmp_path, pool):
    config = run_of()
    config.optimizer.implementation = "fused"  # as on CUDA
    config.checkpoint.interval = 2
    plain, offloaded, resumed = (tmp_path / name for name in ("plain", "offloaded", "resumed"))
    for directory in (plain, offloaded, resumed):
        directory.mkdir()
    pool.train(config, plain)
    pool.train(config, offloaded, cpu_offload=True)
    assert trained(offloaded) == trained(plain)
    assert len(trained(plain)) == 4
    config.checkpoint.load = str(checkpoint_path(plain, 2))
    pool.train(config, resumed, cpu_offload=True)
    assert trained(resumed) == trained(plain)[2:]


def test_it_is_refused_where_parameters_are_in_host_memory_already_or_there_are_none(tmp_path):
    config = run_of(cpu_offload=True)
    with pytest.raises(UsageError, match=r"training\.cpu_offload=true needs CUDA: on CPUs parameters are in host"):
        config.build(tmp_path)
    with pytest.raises(UsageError, match=r"training\.cpu_offload=true needs CUDA"):
        predict(config, "cpu")
    with pytest.raises(UsageError, match=r"training\.cpu_offload=true: workload=collectives has no parameters"):
        Trainer.Config(workload="collectives", training=config.training).validate()


def test_the_ledger_moves_shards_to_the_host_and_counts_their_copies():
    config = run_of(cpu_offload=True)
    offloaded = predict(config, "cuda")
    config.training.cpu_offload = False
    plain = predict(config, "cuda")
    assert plain.host_copies == []
    (copies,) = offloaded.host_copies
    for before, after in zip(plain.ranks, offloaded.ranks, strict=True):
        assert before.host_bytes == 0
        resident = before.quantities["P"] * 16 + 4 * before.quantities["tensors"]
        lines = {line.category: line.bytes for line in after.host_entries}
        assert lines.pop("gradients to add") == 4 * before.quantities["N_layer"] // 2  # of the largest unit
        assert sum(lines.values()) == resident
        assert before.resident_bytes - after.resident_bytes == pytest.approx(resident, abs=512 * 100)
        of_device = {entry.category for entry in after.entries}
        assert of_device.isdisjoint({"parameters", "gradients", "optimizer states"})
    shard = 4 * plain.ranks[0].quantities["P"]
    ends = 4 * plain.ranks[0].quantities["N_head"] // 2
    assert copies.to_host_bytes == 2 * shard  # as many micro-batches
    assert copies.to_device_bytes == 2 * (2 * shard - ends)  # norm and head stay gathered
    text = report(offloaded)
    assert "in host memory up to" in text
    assert "of shards from host memory to the device" in text
    assert offloaded.to_json()["host_copies"] == [
        {"to_device_bytes": copies.to_device_bytes, "to_host_bytes": copies.to_host_bytes}
    ]
