"""Causal self-attention with grouped keys and values (arXiv 2305.13245)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812, torch's own name for it
from torch import nn

from harness.config import Decoder
from harness.trainer.model.rope import apply_rotary

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries [batch, heads, seq, head_dim], keys and values with fewer heads; returns the shape of the queries."""


def attend_causally(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Attention(nn.Module):
    """Under tensor parallelism the projections hold this rank's heads; the head count follows from their output."""

    def __init__(self, config: Decoder.Config) -> None:
        super().__init__()
        self.attend: Attend = attend_causally
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        """x: [batch, seq, dim]; rotary: the table of `rotary_table`; returns the shape of x."""
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk, self.wv))
        q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        out = self.attend(q, k, v)
        return self.wo(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
