"""The real trainer's modules, rank by rank in one process on the fake process group; `main` prints their figures.

Runs as a process of its own: DTensor caches plans by mesh and would hand the next group of the same shape to other
tests. Cases that share a mesh are of one rank for the same reason.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.config import Decoder, Parallelism, Trainer, Training
from harness.trainer.fully_sharded import fully_shard_decoder
from harness.trainer.initialise import initialise
from harness.trainer.loss import IGNORE_INDEX, cross_entropy_sum
from harness.trainer.model.decoder_sharding import shard_decoder
from harness.trainer.optimizer import build_optimizer, clip_grad_norm_
from harness.trainer.parallel_dims import ParallelDims, axis_group

from .live import Live

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


CASES = {
    "fsdp2": (layout(2, 1), 0),
    "fsdp4_fp32": (layout(4, 1, mixed_precision_param="float32"), 0),
    "fsdp2_always": (layout(2, 1, reshard_after_forward="always"), 0),
    "fsdp2_never": (layout(2, 1, reshard_after_forward="never"), 0),
    "fsdp2_reduce_bf16": (layout(2, 1, mixed_precision_reduce="bfloat16"), 0),
    "tp2": (layout(1, 2), 0),
    "fsdp2_tp2": (layout(2, 2), 0),
    "fsdp2_tp2_fp32": (layout(2, 2, mixed_precision_param="float32"), 0),
    "fsdp2_tp2_one_sequence": (layout(2, 2, batch=1, seq_len=256), 0),
    "fsdp2_tp4_never": (layout(2, 4, reshard_after_forward="never", model=replace(MODEL, vocab_size=64)), 0),
    "fsdp2_tp2_replicated": (layout(2, 2, sequence_parallel=False), 0),
    "fsdp5_uneven": (layout(5, 1, model=UNEVEN), 0),
    "fsdp3_uneven_last_rank": (layout(3, 1, model=UNEVEN), 2),
    "fsdp6_tp2_uneven": (layout(6, 2, model=UNEVEN, seq_len=32), 0),
    "fsdp7_tp2_empty_last_rank": (layout(7, 2, model=UNEVEN, seq_len=32), 13),
    "single": (layout(1, 1), 0),
}
"""Name -> (configuration, rank). The last rank has what is left of uneven rows, or none of them."""


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


def figures(config: Trainer.Config, rank: int) -> dict[str, Any]:
    """Peaks in bytes of each phase of two steps, and what the second sent as [group size, kind, count, bytes]."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.world_size)
    try:
        real = RealStep(config)
        peaks = [real.run() for _ in range(2)]
        sent = [[size, kind, entry["count"], entry["bytes"]] for (size, kind), entry in sorted(real.sent.items())]
        return {"peaks": peaks, "sent": sent}
    finally:
        dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps({name: figures(config, rank) for name, (config, rank) in CASES.items()}))


if __name__ == "__main__":
    main()
