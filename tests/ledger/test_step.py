"""Whole steps against the real trainer's modules: ranks of several layouts, in this process, on the fake process group.

Memory agrees to the bytes of zero-dimensional tensors, communication exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.config import Decoder, Parallelism, Trainer, Training
from harness.ledger import Implementation, predict
from harness.ledger.step import Step
from harness.trainer.fully_sharded import fully_shard_decoder
from harness.trainer.initialise import initialise
from harness.trainer.loss import IGNORE_INDEX, cross_entropy_sum
from harness.trainer.model.decoder_sharding import shard_decoder
from harness.trainer.optimizer import build_optimizer, clip_grad_norm_
from harness.trainer.parallel_dims import ParallelDims, axis_group
from tests.ledger.live import Live

SLACK = 128
"""Bytes of zero-dimensional tensors alive at a peak (loss, norm, counts), which the ledger leaves out."""

MODEL = Decoder.Config(vocab_size=512, dim=128, n_layers=3, n_heads=8, n_kv_heads=4, ffn_dim=384)
UNEVEN = Decoder.Config(vocab_size=514, dim=96, n_layers=2, n_heads=6, n_kv_heads=2, ffn_dim=250)


def layout(
    dp_shard: int, tp: int, *, model: Decoder.Config = MODEL, batch: int = 2, seq_len: int = 64, **options: Any
) -> Trainer.Config:
    parallelism = {
        name: options.pop(name) for name in ("sequence_parallel", "reshard_after_forward") if name in options
    }
    config = Trainer.Config(
        world_size=dp_shard * tp,
        model=model,
        parallelism=Parallelism.Config(dp_shard=dp_shard, tp=tp, **parallelism),
        training=Training.Config(micro_batch_size=batch, seq_len=seq_len, device="cpu", **options),
    )
    config.validate()
    return config


LAYOUTS = {
    "fsdp2": layout(2, 1),
    "fsdp4_fp32": layout(4, 1, mixed_precision_param="float32"),
    "fsdp2_always": layout(2, 1, reshard_after_forward="always"),
    "fsdp2_never": layout(2, 1, reshard_after_forward="never"),
    "fsdp2_reduce_bf16": layout(2, 1, mixed_precision_reduce="bfloat16"),
    "tp2": layout(1, 2),
    "fsdp2_tp2": layout(2, 2),
    "fsdp2_tp2_fp32": layout(2, 2, mixed_precision_param="float32"),
    "fsdp2_tp2_one_sequence": layout(2, 2, batch=1, seq_len=256),
    "fsdp2_tp4_never": layout(2, 4, reshard_after_forward="never", model=replace(MODEL, vocab_size=64)),
    "fsdp2_tp2_replicated": layout(2, 2, sequence_parallel=False),
    "fsdp5_uneven": layout(5, 1, model=UNEVEN),
    "fsdp7_tp2_uneven": layout(7, 2, model=UNEVEN, seq_len=32),
    "single": layout(1, 1),
}


# The last rank has what is left of uneven rows, or nothing.
CASES = [(name, 0) for name in LAYOUTS] + [(n, c.world_size - 1) for n, c in LAYOUTS.items() if c.model is UNEVEN]


@pytest.fixture(params=CASES, ids=[f"{name}-rank{rank}" for name, rank in CASES])
def case(request: pytest.FixtureRequest) -> Iterator[tuple[Trainer.Config, int]]:
    name, rank = request.param
    config = LAYOUTS[name]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.world_size)
    try:
        yield config, rank
    finally:
        dist.destroy_process_group()


class RealStep:
    """The trainer's step on this rank; the peak of each phase."""

    def __init__(self, config: Trainer.Config) -> None:
        self.config = config
        self.mesh = ParallelDims.from_config(config).build_mesh("cpu")
        with torch.device("meta"):
            self.model = config.model.build(seq_len=config.training.seq_len)
        layout, training = config.parallelism, config.training
        if layout.tp > 1:
            shard_decoder(self.model, self.mesh["tp"], sequence_parallel=layout.sequence_parallel)
        fully_shard_decoder(
            self.model,
            self.mesh["dp_shard"],
            param_dtype=getattr(torch, training.mixed_precision_param),
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            policy=layout.reshard_after_forward,
        )
        self.model.to_empty(device="cpu")
        initialise(self.model, 0)
        self.optimizer = build_optimizer(config.optimizer, self.model.parameters(), torch.device("cpu"))
        self.live = Live(*self.model.parameters(), self.model.rotary)

    def run(self) -> dict[str, int]:
        training, live = self.config.training, self.live
        tp_group, dp_group = axis_group(self.mesh, "tp"), axis_group(self.mesh, "dp_shard")
        peaks = {}
        live.restart()
        sent = live.sent
        with live:
            tokens = torch.randint(self.config.model.vocab_size, (training.micro_batch_size, training.seq_len))
            labels = tokens.clone()
            self.optimizer.zero_grad(set_to_none=True)
            valid = (labels != IGNORE_INDEX).sum()
            if dp_group is not None:
                dist.all_reduce(valid, group=dp_group)
            live.peak = 0
            loss = cross_entropy_sum(self.model(tokens), labels, tp_group) / valid
            peaks["forward"], live.peak = live.peak, 0
            loss.backward()
            peaks["backward"], live.peak = live.peak, 0
            clip_grad_norm_(self.model.parameters(), training.max_norm, self.mesh)
            self.optimizer.step()
            peaks["optimizer"] = live.peak
            loss = loss.detach()
            if dp_group is not None:
                dist.all_reduce(loss, group=dp_group)
        self.sent = {key: dict(value) for key, value in sent.items()}
        return peaks


def ledger_phases(step: Step) -> dict[str, int]:
    step.run()
    phases = {"forward": 0, "backward": 0, "optimizer": 0}
    for instant in step.tape.instants:
        name = instant.name.split(":")[0]
        if name in phases:
            phases[name] = max(phases[name], instant.bytes)
    return phases


def test_step(case: tuple[Trainer.Config, int]) -> None:
    config, rank = case
    real = RealStep(config)
    ledger = Step(config, target="cpu", dp_rank=rank // config.parallelism.tp, implementation=Implementation())
    for step in range(2):
        measured, predicted = real.run(), ledger_phases(ledger)
        for phase, size in measured.items():
            assert predicted[phase] == pytest.approx(size, abs=SLACK), (step, phase)

    sizes = {"dp_shard": config.dp_shard, "tp": config.parallelism.tp}
    predicted_sent: dict[tuple[int, str], dict[str, int]] = {}
    for c in predict(config, "cpu").communication:
        entry = predicted_sent.setdefault((sizes[c.dimension], c.kind), {"count": 0, "bytes": 0})
        entry["count"] += c.count
        entry["bytes"] += c.bytes
    assert predicted_sent == real.sent
