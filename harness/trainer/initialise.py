"""Initial weights as a function of (seed, parameter name, index), so that every layout starts from the same values.

Each rank computes its own shard only: no full tensor, no broadcast, no random-number state to keep in step.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.trainer.model.decoder import EMBEDDING, HEAD, Decoder

CHUNK = 1 << 22
"""Elements computed at a time; bounds the temporaries to about 150 MiB."""


@torch.no_grad()
def initialise(model: Decoder, seed: int, device: torch.device | None = None) -> None:
    """Fills every parameter of `model`, sharded or not, and its buffers, which come to `device`, where the values of
    parameters are computed wherever these are; by default everything stays where it is.

    Normal with standard deviation 0.02, divided by sqrt(2·layers) where a branch re-enters the residual stream
    (GPT-2's rule); norms are ones.
    """
    residual = 0.02 / math.sqrt(2 * model.config.n_layers)
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if "norm" in name:
            local.fill_(1.0)
        else:
            std = residual if name.endswith(("wo.weight", "w2.weight")) else 0.02
            matrix = EMBEDDING if name == HEAD and model.config.tied_embeddings else name
            key = int(_mix(torch.tensor((seed << 32) ^ zlib.crc32(matrix.encode()))))
            _fill_normal(local, _offset(parameter), parameter.shape[1], std, key, device or local.device)
    model.recompute_buffers(device)


def _fill_normal(
    local: torch.Tensor, offset: tuple[int, int], columns: int, std: float, key: int, device: torch.device
) -> None:
    """Box-Muller over two hashes of each element's index in the full, row-major matrix of `columns` columns."""
    row, column = offset
    rows_at_once = max(1, CHUNK // max(1, local.shape[1]))
    across = torch.arange(column, column + local.shape[1], device=device)
    for start in range(0, local.shape[0], rows_at_once):
        part = local[start : start + rows_at_once]
        down = torch.arange(row + start, row + start + part.shape[0], device=device)
        index = (down[:, None] * columns + across) * 2 + key
        radius = _uniform(index).log_().mul_(-2).sqrt_()
        part.copy_(radius.mul_(_uniform(index + 1).mul_(2 * math.pi).cos_()).mul_(std))


def _offset(parameter: nn.Parameter) -> tuple[int, int]:
    """Row and column at which this rank's shard starts. Tensor parallelism cut first, FSDP cut what it left,
    each as torch.chunk does (equal parts, the last ones shorter or empty)."""
    start, length = [0, 0], list(parameter.shape)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        for axis in reversed(range(mesh.ndim)):
            # Sharded placements have a `dim`; FSDP over tensor parallelism has its own class, which is no Shard.
            dim = getattr(parameter.placements[axis], "dim", None)
            if dim is not None:
                part = -(-length[dim] // mesh.size(axis))
                begin = min(part * coordinate[axis], length[dim])
                start[dim] += begin
                length[dim] = min(part, length[dim] - begin)
    return start[0], start[1]


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) on int64 with wrap-around."""
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; torch's on int64 is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _uniform(index: torch.Tensor) -> torch.Tensor:
    """float32 in (0, 1) from the top 24 bits of a hash."""
    return (_shift(_mix(index * -7046029254386353131), 40).float() + 0.5).mul_(2.0**-24)
