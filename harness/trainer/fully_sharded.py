"""FSDP2 over the decoder: which modules form a unit, in which dtypes, what stays gathered after forward, and how units
communicate."""

from __future__ import annotations

import warnings
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from harness.config import Parallelism
from harness.trainer.model.decoder import Decoder

REDUCE_SCATTER_GROUP = "fsdp_reduce_scatter"
"""Description of a process group for reduce-scatters alone, as torch 2.13 names its own
(FSDPModule.set_separate_reduce_scatter_group)."""

ReshardPolicy = Literal["default", "always", "never"]


def fully_shard_decoder(
    model: Decoder,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    policy: ReshardPolicy,
    head_in_chunks: bool = False,
    cpu_offload: bool = False,
) -> None:
    """Wraps embedding, every layer, and norm with head as one unit each; then the root, which owns nothing itself.

    An embedding whose matrix the head shares belongs to its unit: one parameter cannot be in two. The last unit is
    needed first in backward: `default` keeps it gathered, unless with `head_in_chunks` the head runs apart, later. A
    two-dimensional mesh replicates over its first axis (HSDP), one of a single rank installs mixed precision only.
    Gradients are summed, not averaged: the loss is already divided by the valid tokens of all ranks. With `cpu_offload`
    shards and their gradients are in host memory, and the parameters have to be materialised there.
    """
    # DTensor.to_local gives a view; nothing here writes to a unit's output in place, which is what this is about.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False),
        # Pinned memory is the GPU's to copy from and to.
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy(),
    }
    free = policy != "never"
    tied = model.shares_matrix
    if model.tok_embeddings is not None and not tied:
        fully_shard(model.tok_embeddings, **options, reshard_after_forward=free)
    for layer in model.layers.values():
        fully_shard(layer, **options, reshard_after_forward=free)
    ends: list[nn.Module] = [
        module for module in (model.tok_embeddings if tied else None, model.norm, model.lm_head) if module is not None
    ]
    if ends:
        fully_shard(ends, **options, reshard_after_forward=free if head_in_chunks else policy == "always")
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A plain SUM: gloo has no PREMUL_SUM, which FSDP2 would otherwise use for a factor of 1.
            module.set_force_sum_reduction_for_comms(True)


def set_fsdp_communication(model: Decoder, mesh: DeviceMesh, layout: Parallelism.Config) -> None:
    """How far ahead units are gathered, on which stream, and in which process group gradients are reduced.

    `mesh` is the one of `fully_shard_decoder`. Every rank of a shard group has to call it.
    """
    root = cast(FSDPModule, model)
    if layout.fsdp_prefetch != "default":
        _set_prefetch(model, layout.fsdp_prefetch)
    if layout.fsdp_async_unshard:
        root._set_unshard_async_op(True)
    if layout.fsdp_reduce_scatter_group == "separate":
        if hasattr(root, "set_separate_reduce_scatter_group"):
            root.set_separate_reduce_scatter_group()
        else:
            _set_reduce_scatter_group(model, mesh.get_group(mesh.ndim - 1))


def _set_prefetch(model: Decoder, depth: int) -> None:
    """Without a list of its own a unit falls back to torch's rule, which gathers one unit ahead in backward: for none a
    unit is told to gather itself, which it is already."""
    ends = model.norm if model.norm is not None else model.lm_head
    in_order = [model.tok_embeddings, *model.layers.values(), None if model.shares_matrix else ends]
    units = [cast(FSDPModule, unit) for unit in in_order if unit is not None]
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + depth])
    if model.shares_matrix and model.tok_embeddings is not None:
        units = [*units[1:], units[0]]  # its forward, which the head ends, is the last to be done
    for place, unit in enumerate(units):
        ahead = units[max(0, place - depth) : place][::-1]
        unit.set_modules_to_backward_prefetch(ahead if depth else [unit])


class _ReduceScatterIn(DefaultReduceScatter):
    """FSDP2's reduce-scatter in `group`, whatever group it is asked for: torch before 2.13 has no other way."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work:
        return super().__call__(output_tensor, input_tensor, self.group, op, async_op)


def _set_reduce_scatter_group(model: Decoder, shard_group: dist.ProcessGroup) -> None:
    """What `set_separate_reduce_scatter_group` does."""
    ranks = dist.get_process_group_ranks(shard_group)
    group = dist.new_group(ranks, use_local_synchronization=True, group_desc=REDUCE_SCATTER_GROUP)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(_ReduceScatterIn(group))


def reduce_scatter_groups() -> list[dist.ProcessGroup]:
    """The separate ones of this process; torch's own are made where only FSDP2 knows them."""
    world: Any = dist.distributed_c10d._world
    return [group for group in world.pg_map if group.group_desc == REDUCE_SCATTER_GROUP]
