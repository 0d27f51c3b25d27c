"""Declarative tensor and sequence parallelism.

A module declares where its states, its input and its output live on the `tp` axis; `shard_module` distributes the
states and derives every redistribution from the difference between the declared source and destination. The same
mathematics as torch.distributed.tensor.parallel.style, stated as data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingConfig:
    """Placements on the `tp` axis. None leaves a tensor as it comes.

    `in_src` is what a plain tensor given as the first argument is; it becomes a DTensor and is redistributed to
    `in_dst`. The output must come as `out_src` (checked), is redistributed to `out_dst` and handed on as a plain
    tensor.
    """

    states: Mapping[str, Placement] = field(default_factory=dict)
    in_src: Placement | None = None
    in_dst: Placement | None = None
    out_src: Placement | None = None
    out_dst: Placement | None = None


def shard_module(module: nn.Module, config: ShardingConfig, mesh: DeviceMesh, *, async_op: bool = False) -> None:
    """Applies `config` to `module` on the one-dimensional `mesh`; raises ValueError for a state not declared.

    `async_op`: what is redistributed is waited for where it is first used, forward and backward
    (torch.distributed._functional_collectives.AsyncCollectiveTensor), not before the redistribution returns.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        if name not in config.states:
            raise ValueError(f"{type(module).__name__}.{name} has no placement in its ShardingConfig")
        sharded = distribute_tensor(parameter.data, mesh, [config.states[name]])
        module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))

    if config.in_src is not None:
        source, target = config.in_src, config.in_dst or config.in_src

        def distribute_input(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = DTensor.from_local(args[0], mesh, [source], run_check=False)
            return (x if source == target else x.redistribute(placements=[target], async_op=async_op), *args[1:])

        module.register_forward_pre_hook(distribute_input)

    if config.out_dst is not None:
        produced, wanted = config.out_src or config.out_dst, config.out_dst

        def localise_output(module: nn.Module, _: tuple[Any, ...], output: DTensor) -> torch.Tensor:
            (placement,) = output.placements
            # An embedding's partial sum is a subclass of Partial that remembers which rows were masked.
            if placement != produced and not (placement.is_partial() and produced.is_partial()):
                raise RuntimeError(f"{type(module).__name__} produced {placement}, its ShardingConfig says {produced}")
            moved = output if placement == wanted else output.redistribute(placements=[wanted], async_op=async_op)
            return moved.to_local()

        module.register_forward_hook(localise_output)
