"""Rotary position embeddings (arXiv 2104.09864), pairs of neighbouring channels as complex numbers."""

from __future__ import annotations

import torch


def rotary_table(seq_len: int, head_dim: int, theta: float, device: torch.device | str) -> torch.Tensor:
    """e^(i·position·theta^(-2j/head_dim)): complex64 of shape [seq_len, head_dim / 2]."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotates `x` of shape [batch, seq, heads, head_dim] in float32 and returns it in its own dtype."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table[None, :, None, :]).flatten(3).type_as(x)
