"""The parts that a loss in chunks is made of; whole runs are in test_end_to_end.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from harness.config import Decoder, Parallelism, Trainer, Training
from harness.errors import UsageError
from harness.record.recorder import Recorder
from harness.trainer.chunked_loss import ChunkedLoss

MODEL = Decoder.Config(vocab_size=8, dim=8, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=8)


def of_two_ranks(tmp_path, *, sequence_parallel: bool) -> ChunkedLoss:
    config = Trainer.Config(
        world_size=2,
        model=MODEL,
        parallelism=Parallelism.Config(tp=2, sequence_parallel=sequence_parallel),
        training=Training.Config(seq_len=12, loss_chunks=3),
    )
    return ChunkedLoss(config, MODEL.build(seq_len=12), dist.group.WORLD, Recorder(tmp_path))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_chunk_has_the_labels_of_the_hidden_states_that_the_ranks_put_together(
    fake_world, tmp_path, sequence_parallel
):
    with fake_world(0, 2):
        loss = of_two_ranks(tmp_path, sequence_parallel=sequence_parallel)
    positions = torch.arange(12).expand(2, 12)
    parts = positions.chunk(2, dim=1) if sequence_parallel else [positions]
    for number in range(3):
        gathered = torch.cat([loss._part(part, number) for part in parts], dim=1)
        assert torch.equal(loss._labels(positions, number), gathered)


def test_a_torch_that_cannot_run_a_part_of_a_unit_is_refused(fake_world, tmp_path, monkeypatch):
    monkeypatch.delattr(FSDPState, "_force_complete_incomplete_states")
    with (
        fake_world(0, 2),
        pytest.raises(UsageError, match=r"training.loss_chunks=3: the FSDP2 of torch .* set it to 1"),
    ):
        of_two_ranks(tmp_path, sequence_parallel=True)
