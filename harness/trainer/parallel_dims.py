"""The layout of the ranks and its device mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.config import Trainer

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost to innermost: pipeline stages are furthest apart, tensor-parallel ranks are neighbours."""
DATA_AXES = ("dp_replicate", "dp_shard")
"""Ranks that differ on these see different samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDims:
    """Degrees of a layout; their product is the world size (checked by `Trainer.Config.validate`)."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    @classmethod
    def from_config(cls, config: Trainer.Config) -> ParallelDims:
        layout = config.parallelism
        return cls(pp=layout.pp, dp_replicate=layout.dp_replicate, dp_shard=config.dp_shard, cp=layout.cp, tp=layout.tp)

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """The mesh of the axes larger than 1, named as in `AXES`; `dp_shard` is always there, FSDP2 needs an axis.

        A process group is real only where it spans several ranks: a `dp_shard` of one rank beside other axes gets
        the fake backend, and an axis that spans the world uses the default group.
        """
        sizes = {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) > 1 or axis == "dp_shard"}
        alone = len(sizes) > 1 and sizes["dp_shard"] == 1
        return init_device_mesh(
            device_type,
            tuple(sizes.values()),
            mesh_dim_names=tuple(sizes),
            backend_override={"dp_shard": "fake"} if alone else None,
        )


def axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup | None:
    """The process group of a mesh axis, or None where the axis holds one rank and nothing is to be sent."""
    if axis not in (mesh.mesh_dim_names or ()) or mesh[axis].size() == 1:
        return None
    return mesh.get_group(axis)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What FSDP2 shards over (`dp_shard`), with the axis it replicates over where there is one (HSDP)."""
    axes = tuple(axis for axis in DATA_AXES if axis in (mesh.mesh_dim_names or ()))
    return mesh[axes] if len(axes) > 1 else mesh[axes[0]]


def data_rank(mesh: DeviceMesh) -> int:
    """This rank's number among those that see different samples, `dp_replicate` outermost."""
    number = 0
    for axis in DATA_AXES:
        if axis in (mesh.mesh_dim_names or ()):
            number = number * mesh[axis].size() + mesh.get_local_rank(axis)
    return number


def axis_ranks(mesh: DeviceMesh) -> dict[str, list[int]]:
    """Mesh axis -> the global ranks of this rank's group on it, the form a recording's manifest keeps."""
    return {axis: mesh[axis].mesh.flatten().tolist() for axis in mesh.mesh_dim_names or ()}
