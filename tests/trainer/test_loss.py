from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from harness.trainer.loss import IGNORE_INDEX, cross_entropy_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_vocabulary_parallel_loss_of_one_rank_is_cross_entropy(fake_world, dtype):
    torch.manual_seed(0)
    logits = (torch.randn(2, 6, 11) * 5).to(dtype).requires_grad_()
    labels = torch.randint(11, (2, 6))
    labels[0, :3] = IGNORE_INDEX
    expected = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    (expected * 0.25).backward()
    expected_grad, logits.grad = logits.grad, None

    with fake_world(0, 1):
        loss = cross_entropy_sum(logits, labels, dist.group.WORLD)
        (loss * 0.25).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits.grad, expected_grad)
    assert logits.grad[0, :3].abs().max() == 0


def test_no_float32_logits_outlive_the_loss():
    logits = torch.randn(1, 4, 7, dtype=torch.bfloat16)
    assert cross_entropy_sum(logits, torch.zeros(1, 4, dtype=torch.long)).dtype == torch.float32
