from __future__ import annotations

import torch

from harness.config import Data
from harness.trainer.data import synthetic_batch
from harness.trainer.loss import IGNORE_INDEX

OPTIONS = {"seed": 1, "step": 2, "seq_len": 32, "vocab_size": 50}


def test_samples_do_not_depend_on_how_they_are_split():
    config = Data.Config(ignored_share=0.4)
    tokens, labels = synthetic_batch(config, first_sample=0, batch=4, **OPTIONS)
    for half in range(2):
        part_tokens, part_labels = synthetic_batch(config, first_sample=2 * half, batch=2, **OPTIONS)
        assert torch.equal(part_tokens, tokens[2 * half : 2 * half + 2])
        assert torch.equal(part_labels, labels[2 * half : 2 * half + 2])


def test_labels_are_the_next_tokens_or_ignored():
    tokens, labels = synthetic_batch(Data.Config(ignored_share=0.4), first_sample=0, batch=8, **OPTIONS)
    kept = labels != IGNORE_INDEX
    assert torch.equal(labels[:, :-1][kept[:, :-1]], tokens[:, 1:][kept[:, :-1]])
    assert 0.3 < 1 - kept.float().mean() < 0.5
    assert kept.any(dim=1).all()
    assert len(set(kept.sum(dim=1).tolist())) > 1, "valid-token counts must differ between samples"
    assert tokens.min() >= 0
    assert tokens.max() < 50


def test_every_step_has_other_samples():
    first, _ = synthetic_batch(Data.Config(), first_sample=0, batch=4, **OPTIONS)
    second, _ = synthetic_batch(Data.Config(), first_sample=0, batch=4, **(OPTIONS | {"step": 3}))
    assert not torch.equal(first, second)
