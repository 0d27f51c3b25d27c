"""The layout of the ranks and its device mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.config import Trainer

AXES = ("pp", "dp_replicate", "dp_shard", "dp_shard_cp", "tp")
"""Outermost to innermost: pipeline stages are furthest apart, tensor-parallel ranks are neighbours. FSDP2 shards over
`dp_shard`, or with context parallelism over `dp_shard_cp`, whose neighbours share sequences."""
DATA_AXES = ("dp_replicate", "dp_shard", "dp_shard_cp")
"""Ranks that differ on these see different tokens."""


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
        """The mesh of the axes larger than 1, named as in `AXES`; that of FSDP2 is always there, it needs one.

        A process group is real only where it spans several ranks: a `dp_shard` of one rank beside other axes gets
        the fake backend, and an axis that spans the world uses the default group, but for `dp_shard_cp`, which `cp`
        may be the same ranks as: two groups, so that traces tell their collectives apart.
        """
        shard = "dp_shard" if self.cp == 1 else "dp_shard_cp"
        degrees = {"pp": self.pp, "dp_replicate": self.dp_replicate, shard: self.dp_shard * self.cp, "tp": self.tp}
        sizes = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis == shard}
        backend = {} if self.cp == 1 else {shard: str(dist.get_backend())}
        if len(sizes) > 1 and sizes[shard] == 1:
            backend = {shard: "fake"}
        return init_device_mesh(
            device_type,
            tuple(sizes.values()),
            mesh_dim_names=tuple(sizes),
            backend_override=backend or None,  # type: ignore[arg-type]
        )

    def data_rank(self, mesh: DeviceMesh) -> int:
        """This rank's number among those that see different samples, `dp_replicate` outermost."""
        number = 0
        for axis in DATA_AXES:
            if axis in (mesh.mesh_dim_names or ()):
                number = number * mesh[axis].size() + mesh.get_local_rank(axis)
        return number // self.cp

    def context_group(self, mesh: DeviceMesh) -> dist.ProcessGroup | None:
        """The group of the ranks that share this rank's samples, described `mesh_cp`; None where `cp` is 1.

        Every rank has to call it, once, after `build_mesh`.
        """
        if self.cp == 1:
            return None
        shards = mesh["dp_shard_cp"].mesh.flatten().tolist()
        first = mesh.get_local_rank("dp_shard_cp") // self.cp * self.cp
        ranks = shards[first : first + self.cp]
        group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True, group_desc="mesh_cp")
        return group


def axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup | None:
    """The process group of a mesh axis, or None where the axis holds one rank and nothing is to be sent."""
    if axis not in (mesh.mesh_dim_names or ()) or mesh[axis].size() == 1:
        return None
    return mesh.get_group(axis)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What FSDP2 shards over, with the axis it replicates over where there is one (HSDP)."""
    axes = tuple(axis for axis in DATA_AXES if axis in (mesh.mesh_dim_names or ()))
    return mesh[axes] if len(axes) > 1 else mesh[axes[0]]


def axis_ranks(mesh: DeviceMesh, context: dist.ProcessGroup | None = None) -> dict[str, list[int]]:
    """Mesh axis -> the global ranks of this rank's group on it, the form a recording's manifest keeps."""
    ranks = {axis: mesh[axis].mesh.flatten().tolist() for axis in mesh.mesh_dim_names or ()}
    return ranks if context is None else ranks | {"cp": dist.get_process_group_ranks(context)}
