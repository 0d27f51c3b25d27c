from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from harness.trainer.sharding import ShardingConfig, shard_module


def test_redistribution_follows_from_source_and_destination(fake_world):
    with fake_world(0, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        linear = nn.Linear(8, 6, bias=False)
        shard_module(
            linear,
            ShardingConfig(states={"weight": Shard(0)}, in_src=Shard(1), in_dst=Replicate(), out_dst=Shard(2)),
            mesh,
        )
        assert linear.weight.to_local().shape == (3, 8)
        out = linear(torch.ones(1, 4, 8))  # half a sequence of 8 in, all of it out, half of the features
        assert out.shape == (1, 8, 3)
        out.sum().backward()
        assert linear.weight.grad.placements == (Shard(0),)


def test_a_state_without_placement_is_refused(fake_world):
    with fake_world(0, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(ValueError, match=r"Linear\.bias has no placement"):
            shard_module(nn.Linear(4, 4), ShardingConfig(states={"weight": Shard(0)}), mesh)


def test_an_output_that_is_not_as_declared_is_refused(fake_world):
    with fake_world(0, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        linear = nn.Linear(4, 4, bias=False)
        declared = ShardingConfig(
            states={"weight": Shard(0)}, in_src=Replicate(), out_src=Partial(), out_dst=Replicate()
        )
        shard_module(linear, declared, mesh)
        with pytest.raises(RuntimeError, match="Linear produced S"):
            linear(torch.ones(1, 2, 4))
