"""SwiGLU feed-forward network (arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812, torch's own name for it
from torch import nn

from harness.config import Decoder


class FeedForward(nn.Module):
    def __init__(self, config: Decoder.Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, seq, dim]; returns the same shape."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]
