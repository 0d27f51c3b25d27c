"""Models to measure: built by the trainer's own functions, with and without FSDP2."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from harness.config import Trainer
from harness.trainer.activation_checkpoint import checkpoint_layers
from harness.trainer.build import DTYPES, build_on_meta
from harness.trainer.fully_sharded import fully_shard_decoder
from harness.trainer.initialise import initialise
from harness.trainer.model.decoder import Decoder
from harness.trainer.parallel_dims import ParallelDims


def plain(run: Trainer.Config, device: torch.device) -> Decoder:
    """Without FSDP2, in the dtype of compute."""
    model = _materialised(_on_meta(run), run, device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[run.training.mixed_precision_param])
    return model


def of_one_shard(run: Trainer.Config, device: torch.device) -> Decoder:
    """Each rank's FSDP2 over itself: units cast their parameters and send nothing."""
    mesh = init_device_mesh(
        device.type,
        (dist.get_world_size(), 1),
        mesh_dim_names=("rank", "dp_shard"),
        backend_override={"dp_shard": "fake"},
    )
    model = _on_meta(run)
    param, reduce = DTYPES[run.training.mixed_precision_param], DTYPES[run.training.mixed_precision_reduce]
    fully_shard_decoder(model, mesh["dp_shard"], param_dtype=param, reduce_dtype=reduce, policy="default")
    return _materialised(model, run, device)


def _on_meta(run: Trainer.Config) -> Decoder:
    with torch.device("meta"):
        model = run.model.build(seq_len=run.training.seq_len)
    checkpoint_layers(model, run.activation_checkpoint, keeps_attention=True, compiled=False)
    return model


def built(run: Trainer.Config, device: torch.device) -> Decoder:
    """As the trainer builds it."""
    mesh = ParallelDims.from_config(run).build_mesh(device.type)
    return _materialised(build_on_meta(run, mesh, device).model, run, device)


def _materialised(model: Decoder, run: Trainer.Config, device: torch.device) -> Decoder:
    model.to_empty(device=device)
    initialise(model, run.training.seed, device)
    return model
