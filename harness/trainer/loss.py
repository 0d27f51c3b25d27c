"""Cross-entropy summed over the valid tokens, upcast to float32 inside the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812, torch's own name for it

IGNORE_INDEX = -100

Loss = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup | None], torch.Tensor]
"""`cross_entropy_sum`, or what torch.compile made of it."""


def cross_entropy_sum(
    logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The 0-d float32 sum of -log p(label) over the labels that are not `IGNORE_INDEX`.

    logits: [batch, seq, vocabulary]; with `group`, this rank's equal share of the vocabulary in rank order.
    labels: int64 [batch, seq].
    """
    logits, labels = logits.flatten(0, 1), labels.flatten(0, 1)
    if group is None:
        return F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=IGNORE_INDEX)
    loss: torch.Tensor = _VocabParallelCrossEntropy.apply(logits, labels, group)  # type: ignore[no-untyped-call]
    return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Three all-reduces of one float32 per token forward, none backward; no rank ever holds a full row of logits.

    With T tokens and V/t columns on this rank it holds 10·T·V/t bytes forward (bf16 logits, their float32 copy,
    its exponential) and saves the float32 copy, which backward turns into the gradient in place: a second
    backward over the same graph is not possible.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        shifted = logits.to(torch.float32, copy=True)
        largest = shifted.amax(dim=-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        shifted.sub_(largest[:, None])
        total = shifted.exp().sum(dim=-1)
        dist.all_reduce(total, dist.ReduceOp.SUM, group)
        log_total = total.log_()

        columns = shifted.shape[-1]
        own = labels - group.rank() * columns
        elsewhere = (own < 0) | (own >= columns)
        own = own.masked_fill(elsewhere, 0)
        target = shifted.gather(-1, own[:, None]).squeeze(-1).masked_fill_(elsewhere, 0.0)
        dist.all_reduce(target, dist.ReduceOp.SUM, group)

        ignored = labels == IGNORE_INDEX
        ctx.save_for_backward(shifted, log_total, own, elsewhere, ignored)
        ctx.dtype = logits.dtype
        return (log_total - target).masked_fill_(ignored, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        shifted, log_total, own, elsewhere, ignored = ctx.saved_tensors
        gradient = shifted.sub_(log_total[:, None]).exp_()
        gradient.scatter_add_(-1, own[:, None], elsewhere.to(gradient.dtype).sub_(1.0)[:, None])
        gradient.mul_(grad).masked_fill_(ignored[:, None], 0.0)
        return gradient.to(ctx.dtype), None, None
