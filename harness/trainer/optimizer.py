"""AdamW on local shards, and clipping by the global gradient norm."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.config import Optimizer
from harness.trainer.parallel_dims import axis_group


def build_optimizer(
    config: Optimizer.Config, parameters: Iterable[nn.Parameter], device: torch.device
) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101); elementwise, so shards are updated without communication."""
    implementation = config.resolved("cuda" if device.type == "cuda" else "cpu")
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=implementation == "fused",
        foreach=implementation == "foreach",
    )


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter], max_norm: float, mesh: DeviceMesh, *, copies: Collection[nn.Parameter] = ()
) -> torch.Tensor:
    """Scales all gradients so that their global 2-norm is at most `max_norm`; returns the norm before, 0-d float32.

    One all-reduce of one float32 per mesh axis of several ranks, on the mesh's device wherever the gradients are. A
    gradient that is replicated on an axis is counted once: its square is divided by the size of that axis before the
    sum. `copies` are parameters that count elsewhere, and are scaled as all are.
    """
    local, share = [], []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        holders = 1
        if isinstance(grad, DTensor):
            for dim, placement in enumerate(grad.placements):
                holders *= grad.device_mesh.size(dim) if placement.is_replicate() else 1
            grad = grad.to_local()
        local.append(grad)
        share.append(0.0 if parameter in copies else 1.0 / holders)
    norms = torch.stack(torch._foreach_norm(local))
    total = norms.square_().mul_(torch.tensor(share, device=norms.device)).sum().to(mesh.device_type)
    for axis in mesh.mesh_dim_names or ():
        group = axis_group(mesh, axis)
        if group is not None:
            dist.all_reduce(total, group=group)
    total.sqrt_()
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    torch._foreach_mul_(local, scale.to(norms.device))
    return total
