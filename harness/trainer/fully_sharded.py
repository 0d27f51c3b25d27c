"""FSDP2 over the decoder: which modules form a unit, in which dtypes, and what stays gathered after forward."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from harness.trainer.model.decoder import Decoder

ReshardPolicy = Literal["default", "always", "never"]


def fully_shard_decoder(
    model: Decoder,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    policy: ReshardPolicy,
) -> None:
    """Wraps embedding, every layer, and norm with head as one unit each; then the root, which owns nothing itself.

    A tied embedding belongs to the unit of the head: one parameter cannot be in two. The last unit is needed first
    in backward: `default` keeps it gathered. A two-dimensional mesh replicates over its first axis (HSDP), one of a
    single rank installs mixed precision only. Gradients are summed, not averaged: the loss is already divided by the
    valid tokens of all ranks.
    """
    # DTensor.to_local gives a view; nothing here writes to a unit's output in place, which is what this is about.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False),
    }
    free = policy != "never"
    tied = model.config.tied_embeddings
    if model.tok_embeddings is not None and not tied:
        fully_shard(model.tok_embeddings, **options, reshard_after_forward=free)
    for layer in model.layers.values():
        fully_shard(layer, **options, reshard_after_forward=free)
    ends: list[nn.Module] = [
        module for module in (model.tok_embeddings if tied else None, model.norm, model.lm_head) if module is not None
    ]
    if ends:
        fully_shard(ends, **options, reshard_after_forward=policy == "always")
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A plain SUM: gloo has no PREMUL_SUM, which FSDP2 would otherwise use for a factor of 1.
            module.set_force_sum_reduction_for_comms(True)
