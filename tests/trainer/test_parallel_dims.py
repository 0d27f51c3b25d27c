from __future__ import annotations

import pytest

from harness.config import Parallelism, Trainer
from harness.trainer.parallel_dims import ParallelDims, axis_group, axis_ranks, data_mesh


def dims(dp_shard: int, tp: int, dp_replicate: int = 1, cp: int = 1) -> ParallelDims:
    config = Trainer.Config(world_size=dp_replicate * dp_shard * cp * tp)
    config.parallelism = Parallelism.Config(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp)
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
            assert dims(2, 2, dp_replicate=2).data_rank(mesh) == rank // 2
            assert axis_ranks(mesh)["dp_replicate"] == sorted({rank % 4, rank % 4 + 4})


def test_context_parallel_ranks_are_neighbours_on_the_axis_that_shards(fake_world):
    layout = dims(2, 2, dp_replicate=2, cp=2)
    for rank in range(16):
        with fake_world(rank, 16):
            mesh = layout.build_mesh("cpu")
            context = layout.context_group(mesh)
            assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard_cp", "tp")
            assert data_mesh(mesh).mesh_dim_names == ("dp_replicate", "dp_shard_cp")
            assert layout.data_rank(mesh) == rank // 4
            first = rank // 4 * 4 + rank % 2
            assert axis_ranks(mesh, context)["cp"] == [first, first + 2]
            assert context.group_desc == "mesh_cp"
            assert context.rank() == rank // 2 % 2


@pytest.mark.parametrize("dp_shard", [1, 2])
def test_the_groups_of_cp_and_of_what_fsdp_shards_over_are_two(fake_world, dp_shard):
    """Also where they are the same ranks, and all there are."""
    layout = dims(dp_shard, 1, cp=2)
    with fake_world(0, 2 * dp_shard):
        mesh = layout.build_mesh("cpu")
        context = layout.context_group(mesh)
        assert mesh.mesh_dim_names == ("dp_shard_cp",)
        assert axis_group(mesh, "dp_shard_cp").group_desc == "mesh_dp_shard_cp"
        assert context is not axis_group(mesh, "dp_shard_cp")
        assert axis_ranks(mesh, context) == {"dp_shard_cp": list(range(2 * dp_shard)), "cp": [0, 1]}
