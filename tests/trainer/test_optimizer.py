from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from harness.config import Optimizer
from harness.trainer.optimizer import clip_grad_norm_


def test_the_learning_rate_warms_up_and_follows_half_a_cosine():
    config = Optimizer.Config(lr=1.0, warmup_steps=4, schedule="cosine", min_lr_factor=0.1)
    rates = [config.lr_at(step, 25) for step in range(25)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[14] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    assert rates[24] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[4:]))


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_run_shorter_than_its_warm_up_has_a_rate(steps):
    config = Optimizer.Config(lr=1.0, warmup_steps=4, schedule="cosine")
    assert [config.lr_at(step, steps) for step in range(steps)] == [0.25 * (step + 1) for step in range(steps)]


def test_clipping_is_torchs(fake_world):
    torch.manual_seed(0)
    ours, theirs = nn.Linear(7, 5), nn.Linear(7, 5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    with fake_world(0, 1):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
        norm = clip_grad_norm_(ours.parameters(), 0.5, mesh)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
