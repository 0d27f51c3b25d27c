"""Where a recorder runs: rank, device and mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist


def rank_and_world() -> tuple[int, int]:
    """Of the default process group, else of torchrun's environment, else the only rank."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def this_device(device: torch.device | str | None) -> torch.device:
    """`device` with its index; None is the current CUDA device, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    without_index = torch.device("cuda")
    return torch.device("cuda", torch.cuda.current_device()) if device == without_index else device


def plain_mesh(mesh: Mapping[str, Sequence[int]] | None) -> dict[str, list[int]] | None:
    return None if mesh is None else {axis: [int(rank) for rank in ranks] for axis, ranks in mesh.items()}
