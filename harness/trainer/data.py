"""Synthetic tokens: the same samples for every layout, and something in them to learn."""

from __future__ import annotations

import torch

from harness.config import Data
from harness.trainer.loss import IGNORE_INDEX


def synthetic_batch(
    config: Data.Config, *, seed: int, step: int, first_sample: int, batch: int, seq_len: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, int64 [batch, seq_len] on the CPU, of samples first_sample … first_sample + batch - 1.

    A sample is a walk with one stride through the vocabulary, so the next token follows from the last two; it
    depends on seed, step and its own number only, never on which rank asks. `config.ignored_share` of the labels,
    a different number in every sample, is `IGNORE_INDEX`.
    """
    rows = []
    for sample in range(first_sample, first_sample + batch):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_000_003 + sample)
        start = torch.randint(vocab_size, (), generator=generator)
        stride = torch.randint(1, min(17, vocab_size), (), generator=generator)
        rows.append((start + stride * torch.arange(seq_len + 1)) % vocab_size)
        if config.ignored_share:
            share = 2 * config.ignored_share * torch.rand((), generator=generator)
            drop = torch.rand(seq_len + 1, generator=generator) < share
            drop[:2] = False  # the first input token, and one label that always counts
            rows[-1] = torch.where(drop, -1 - rows[-1], rows[-1])
    walk = torch.stack(rows)
    tokens = torch.where(walk < 0, -1 - walk, walk)
    labels = torch.where(walk < 0, IGNORE_INDEX, walk)
    return tokens[:, :-1].contiguous(), labels[:, 1:].contiguous()
