"""The Llama decoder."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from harness import config
from harness.trainer.model.attention import Attention
from harness.trainer.model.feed_forward import FeedForward
from harness.trainer.model.rope import rotary_table

EMBEDDING, HEAD = "tok_embeddings.weight", "lm_head.weight"
"""Names of the two matrices that may be one."""


class DecoderLayer(nn.Module):
    def __init__(self, config: config.Decoder.Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        """x: [batch, seq, dim], its sequence sharded under sequence parallelism; returns the same shape."""
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class Decoder(config.Decoder, nn.Module):
    """Layers in a ModuleDict keep their names when others are removed; the ends are optional for the same reason."""

    rotary: torch.Tensor

    def __init__(self, config: config.Decoder.Config, *, seq_len: int) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.seq_len = seq_len
        self.positions: torch.Tensor | None = None
        """Of the tokens in their sequence where a rank has some of them only: int64 [tokens], on the CPU."""
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(config) for i in range(config.n_layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.lm_head: nn.Linear | None = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.shares_matrix = config.tied_embeddings
        """Embedding and head are one parameter."""
        self.tie_embeddings()
        self.register_buffer("rotary", self._rotary_table(torch.get_default_device()), persistent=False)

    def _rotary_table(self, device: torch.device) -> torch.Tensor:
        table = rotary_table(self.seq_len, self.config.head_dim, self.config.rope_theta, device)
        return table if self.positions is None else table[self.positions.to(device)]

    def tie_embeddings(self) -> None:
        """Makes the head use the embedding's parameter where they share it; again after anything that replaces
        parameters module by module (sharding, `to_empty`)."""
        if self.shares_matrix:
            assert self.lm_head is not None, "parts share nothing"
            assert self.tok_embeddings is not None, "parts share nothing"
            self.lm_head.weight = self.tok_embeddings.weight

    def part(self, names: Collection[str]) -> Decoder:
        """A decoder of the named modules (`layers.3`, `norm`) of this one, which both then hold. Its head has a matrix
        of its own, also where this one's shares the embedding's."""
        part = Decoder.__new__(Decoder)
        nn.Module.__init__(part)
        part.config, part.seq_len, part.positions = self.config, self.seq_len, self.positions
        part.tok_embeddings = self.tok_embeddings if "tok_embeddings" in names else None
        part.layers = nn.ModuleDict({n: layer for n, layer in self.layers.items() if f"layers.{n}" in names})
        part.norm = self.norm if "norm" in names else None
        part.lm_head = self.lm_head if "lm_head" in names else None
        part.shares_matrix = False
        if self.shares_matrix and part.lm_head is not None:
            part.lm_head.weight = nn.Parameter(torch.empty_like(part.lm_head.weight))
        part.register_buffer("rotary", self.rotary, persistent=False)
        return part

    def recompute_buffers(self, device: torch.device | None = None) -> None:
        """Fills what `to_empty` left undefined and no checkpoint holds, on `device` or where it is."""
        self.rotary = self._rotary_table(device or self.rotary.device)

    def forward(self, tokens: torch.Tensor, *, head: bool = True) -> torch.Tensor:
        """tokens: int64 [batch, seq] (or hidden states where the embedding is absent); returns logits
        [batch, seq, vocabulary], this rank's share of the vocabulary under tensor parallelism. Without `head`: what
        that would be given."""
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.rotary)
        h = h if self.norm is None else self.norm(h)
        return h if self.lm_head is None or not head else self.lm_head(h)
