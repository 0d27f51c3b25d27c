"""The training loop, with every phase visible to the recorder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness import config
from harness.trainer.data import synthetic_batch
from harness.trainer.fully_sharded import fully_shard_decoder
from harness.trainer.initialise import initialise
from harness.trainer.loss import IGNORE_INDEX, cross_entropy_sum
from harness.trainer.model.decoder import Decoder
from harness.trainer.model.decoder_sharding import shard_decoder
from harness.trainer.optimizer import build_optimizer, clip_grad_norm_
from harness.trainer.parallel_dims import ParallelDims, axis_group, axis_ranks

if TYPE_CHECKING:
    from harness.record.recorder import Recorder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Trainer(config.Trainer):
    """One rank of a run: meta model → tensor parallel → FSDP2 → materialise → initialise → optimizer → steps.

    Reads torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK); without it, it is the only rank. Raises UsageError
    as `Trainer.Config.validate` does.
    """

    def __init__(self, config: config.Trainer.Config, directory: Path) -> None:
        config.validate()
        self.config = config
        self.directory = directory
        self.device = local_device(config.training.device)
        self.dims = ParallelDims.from_config(config)

    def train(self) -> list[float]:
        """Trains `training.steps` steps into a recording at `directory`; returns the global loss of every step."""
        with process_group(self.device, self.config.training.init_timeout_s):
            mesh = self.dims.build_mesh(self.device.type)
            self.dp_group, self.tp_group = axis_group(mesh, "dp_shard"), axis_group(mesh, "tp")
            self.dp_rank = mesh.get_local_rank("dp_shard")
            training = self.config.training
            recorder = self.config.recorder.build(
                self.directory,
                device=self.device,
                run_config=config.to_dict(self.config),
                mesh=axis_ranks(mesh),
                mode="shared-gpu" if shares_its_gpu(self.device) else None,
                tokens_per_step=training.micro_batch_size * training.seq_len,
                flops_per_token=self.config.model.flops_per_token(training.seq_len),
                devices_per_token=self.dims.tp * self.dims.cp * self.dims.pp,
            )
            with recorder:
                with recorder.category("parameter"):
                    self.model = self._build_model(mesh)
                self.optimizer = build_optimizer(self.config.optimizer, self.model.parameters(), self.device)
                return [self._step(step, mesh, recorder) for step in range(training.steps)]

    def _build_model(self, mesh: DeviceMesh) -> Decoder:
        training, layout = self.config.training, self.config.parallelism
        with torch.device("meta"):
            model = self.config.model.build(seq_len=training.seq_len)
        if self.dims.tp > 1:
            shard_decoder(model, mesh["tp"], sequence_parallel=layout.sequence_parallel)
        fully_shard_decoder(
            model,
            mesh["dp_shard"],
            param_dtype=DTYPES[training.mixed_precision_param],
            reduce_dtype=DTYPES[training.mixed_precision_reduce],
            policy=layout.reshard_after_forward,
        )
        model.to_empty(device=self.device)
        initialise(model, training.seed)
        return model

    def _step(self, step: int, mesh: DeviceMesh, recorder: Recorder) -> float:
        """One optimizer step; returns the loss averaged over the valid tokens of all ranks."""
        with recorder.step():
            tokens, labels = self._batch(step)
            self.optimizer.zero_grad(set_to_none=True)
            valid = (labels != IGNORE_INDEX).sum()
            if self.dp_group is not None:
                dist.all_reduce(valid, group=self.dp_group)

            with recorder.phase("forward"):
                # No name is kept for the logits: they must not outlive what backward needs of them.
                loss = cross_entropy_sum(self.model(tokens), labels, self.tp_group) / valid
            with recorder.phase("backward"):
                loss.backward()
            with recorder.phase("optimizer"):
                grad_norm = clip_grad_norm_(self.model.parameters(), self.config.training.max_norm, mesh)
                self.optimizer.step()

            loss = loss.detach()
            if self.dp_group is not None:
                dist.all_reduce(loss, group=self.dp_group)
            recorder.log(loss=loss, grad_norm=grad_norm)
        return loss.item()

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This data-parallel rank's tokens and labels, int64 [micro_batch, seq]; tensor-parallel ranks share them."""
        training = self.config.training
        tokens, labels = synthetic_batch(
            self.config.data,
            seed=training.seed,
            step=step,
            first_sample=self.dp_rank * training.micro_batch_size,
            batch=training.micro_batch_size,
            seq_len=training.seq_len,
            vocab_size=self.config.model.vocab_size,
        )
        return tokens.to(self.device), labels.to(self.device)


def local_device(wanted: str) -> torch.device:
    """This rank's device: a GPU by LOCAL_RANK (several ranks share one where there are fewer), or the CPU."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def shares_its_gpu(device: torch.device) -> bool:
    """Whether other ranks run on the same GPU: their times are then not a cluster's, and figures must say so."""
    return device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()


@contextmanager
def process_group(device: torch.device, timeout_s: int) -> Iterator[None]:
    """The default group: NCCL on GPUs, gloo on CPUs, of torchrun's ranks or of this process alone."""
    alone = "RANK" not in os.environ
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
        store=dist.HashStore() if alone else None,  # type: ignore[attr-defined]
        rank=0 if alone else -1,
        world_size=1 if alone else -1,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
