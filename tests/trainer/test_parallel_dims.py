from __future__ import annotations

import pytest

from harness.config import Trainer
from harness.trainer.parallel_dims import ParallelDims, axis_group, axis_ranks, data_mesh, data_rank


def dims(dp_shard: int, tp: int, dp_replicate: int = 1) -> ParallelDims:
    config = Trainer.Config(world_size=dp_replicate * dp_shard * tp)
    config.parallelism.tp, config.parallelism.dp_replicate = tp, dp_replicate
    return ParallelDims.from_config(config)


def test_tp_is_innermost_and_axes_are_named(fake_world):
    with fake_world(5, 8):
        mesh = dims(4, 2).build_mesh("cpu")
        assert mesh.mesh_dim_names == ("dp_shard", "tp")
        assert axis_ranks(mesh) == {"dp_shard": [1, 3, 5, 7], "tp": [4, 5]}
        assert axis_group(mesh, "tp").group_desc == "mesh_tp"
        assert axis_group(mesh, "dp_shard").group_desc == "mesh_dp_shard"


def test_an_axis_of_one_rank_has_no_group(fake_world):
    with fake_world(1, 2):
        mesh = dims(1, 2).build_mesh("cpu")
        assert mesh.mesh_dim_names == ("dp_shard", "tp")
        assert axis_group(mesh, "dp_shard") is None
        assert axis_group(mesh, "tp").size() == 2
        assert axis_group(mesh, "pp") is None


@pytest.mark.parametrize(("dp_shard", "tp", "names"), [(4, 1, ("dp_shard",)), (1, 1, ("dp_shard",))])
def test_axes_of_one_rank_are_left_out(fake_world, dp_shard, tp, names):
    with fake_world(0, dp_shard * tp):
        assert dims(dp_shard, tp).build_mesh("cpu").mesh_dim_names == names


def test_replicas_are_outside_shards(fake_world):
    for rank in range(8):
        with fake_world(rank, 8):
            mesh = dims(2, 2, dp_replicate=2).build_mesh("cpu")
            assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
            assert data_mesh(mesh).mesh_dim_names == ("dp_replicate", "dp_shard")
            assert data_rank(mesh) == rank // 2
            assert axis_ranks(mesh)["dp_replicate"] == sorted({rank % 4, rank % 4 + 4})
