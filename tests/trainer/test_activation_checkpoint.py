"""Which operators a checkpointed layer runs again, on a decoder of one process."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.config import ActivationCheckpoint, Decoder
from harness.trainer.activation_checkpoint import checkpoint_layers
from harness.trainer.model.decoder import Decoder as DecoderModel

LAYERS = 3
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Ran(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def decoder(**checkpointing: Any) -> DecoderModel:
    torch.manual_seed(0)
    config = Decoder.Config(vocab_size=32, dim=16, n_layers=LAYERS, n_heads=2, n_kv_heads=1, ffn_dim=32)
    model = config.build(seq_len=8)
    checkpoint_layers(model, ActivationCheckpoint.Config(**checkpointing), keeps_attention=True)
    return model


def of_backward(model: DecoderModel) -> Counter[str]:
    loss = model(torch.arange(16).reshape(2, 8)).square().mean()
    with Ran() as ran:
        loss.backward()
    return ran.calls


@pytest.mark.parametrize(
    ("checkpointing", "products", "attentions"),
    [
        ({"mode": "full"}, 7 * LAYERS, LAYERS),
        ({"mode": "full", "every": 2}, 7, 1),
        # Of wq, wk, wv, wo, w1, w3 and w2 the second, fourth and sixth; attention is kept.
        ({"mode": "selective"}, 3 * LAYERS, 0),
        ({"mode": "selective", "every": LAYERS}, 3, 0),
    ],
)
def test_what_is_computed_again(checkpointing: dict[str, Any], products: int, attentions: int) -> None:
    plain, checkpointed = decoder(), decoder(**checkpointing)
    expected, actual = of_backward(plain), of_backward(checkpointed)
    assert actual["aten::mm"] - expected["aten::mm"] == products
    assert actual[ATTENTION] - expected[ATTENTION] == attentions
    for (name, one), (same, other) in zip(plain.named_parameters(), checkpointed.named_parameters(), strict=True):
        assert name == same, "checkpoints are written by name"
        assert one.grad is not None
        assert torch.equal(one.grad, other.grad), name


def test_the_range_around_it_names_the_layer() -> None:
    loss = decoder(mode="full", every=2)(torch.arange(8)[None]).sum()
    with torch.profiler.profile() as profile:
        loss.backward()
    assert [event.name for event in profile.events() if event.name.startswith("AC::")] == ["AC::recompute (layers.1)"]
