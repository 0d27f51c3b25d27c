"""The CPU operator table against torch on this machine: what lives after forward, and the most in either direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from harness.ledger.autograd import Gradient, Node, Tensor
from harness.ledger.loss import cross_entropy
from harness.ledger.operators import Operators
from harness.ledger.sizes import Quantities
from harness.ledger.tape import Tape
from harness.trainer.loss import cross_entropy_sum
from harness.trainer.model.rope import apply_rotary, rotary_table

from .live import Live

B, S, H, K, HD, FFN, V = 2, 64, 8, 2, 16, 320, 512
D, KV, T = H * HD, K * HD, B * S
VALUES = {"1": 1, "T": T, "B": B, "S": S, "d": D, "f": FFN, "kv": KV, "hd": HD, "H": H, "K": K, "V": V, "t": 1, "k": 1}
SLACK = 64
"""Bytes of zero-dimensional tensors, which the table leaves out."""


@dataclass
class Figures:
    forward_peak: int
    saved: int
    backward_peak: int


def measured(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Figures:
    """Bytes beyond the inputs; what is saved includes the output, which is held, as is its gradient in backward."""
    live = Live(*inputs)
    live.restart()
    base = live.now()
    with live:
        out = function(*inputs)
    forward, saved = live.peak - base, live.now() - base
    gradient = torch.ones_like(out)
    live._see(gradient)
    live.restart()
    leaves = [x for x in inputs if x.requires_grad]
    with live:
        torch.autograd.grad(out, leaves, gradient)
    return Figures(forward, saved, live.peak - base)


def predicted(
    element: int,
    function: Callable[[Operators, list[Tensor]], Tensor],
    inputs: list[str],
    gradient: str,
    values: dict[str, int] = VALUES,
) -> Figures:
    tape = Tape()
    ops = Operators(tape, Quantities(values), target="cpu", element=element)
    collected: list[Gradient] = []

    def collect(gradient: Gradient) -> list[Gradient | None]:
        collected.append(gradient)
        return []

    tensors = [Tensor(ops.new("input", element, m), Node(1 << 62, (), collect, None)) for m in inputs]
    base = tape.total
    tape.instant("forward")
    out = function(ops, tensors)
    forward, saved = tape.peak().bytes - base, tape.total - base
    held = Gradient(ops.new("output gradient", element if gradient != "1" else 4, gradient))
    tape.start_step()
    tape.instant("backward")
    assert out.node is not None
    ops.graph.backward(out.node, held)
    return Figures(forward, saved, max(i.bytes for i in tape.instants) - base)


def agree(a: Figures, b: Figures) -> None:
    for name in ("forward_peak", "saved", "backward_peak"):
        assert getattr(a, name) == pytest.approx(getattr(b, name), abs=SLACK), (name, a, b)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


def leaf(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def test_rms_norm(dtype: torch.dtype) -> None:
    real = measured(lambda x, w: F.rms_norm(x, (D,), w, 1e-5), leaf(dtype, B, S, D), leaf(dtype, D))
    table = predicted(dtype.itemsize, lambda ops, i: ops.rms_norm("norm", i[0], i[1], "T·d", "T"), ["T·d", "d"], "T·d")
    agree(table, real)


def test_linear(dtype: torch.dtype) -> None:
    real = measured(F.linear, leaf(dtype, B, S, D), leaf(dtype, FFN, D))
    shape = ("T·d", "f·d", "T·f")
    table = predicted(dtype.itemsize, lambda ops, i: ops.linear("x", i[0], i[1], shape), ["T·d", "f·d"], "T·f")
    agree(table, real)


def test_rotary(dtype: torch.dtype) -> None:
    rotary = rotary_table(S, HD, 10_000.0, "cpu")
    # The table is there before and after: a view of it is made inside.
    real = measured(lambda x, _: apply_rotary(x, rotary), leaf(dtype, B, S, H, HD), rotary)
    table = predicted(dtype.itemsize, lambda ops, i: ops.rotary("rotary", i[0], "T·d"), ["T·d"], "T·d")
    agree(table, real)


def test_attention(dtype: torch.dtype) -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)

    real = measured(attention, leaf(dtype, B, S, H, HD), leaf(dtype, B, S, K, HD), leaf(dtype, B, S, K, HD))
    inputs = ["T·d", "T·kv", "T·kv"]
    agree(predicted(dtype.itemsize, lambda ops, i: ops.attention("attention", *i), inputs, "T·d"), real)


def test_swiglu(dtype: torch.dtype) -> None:
    real = measured(lambda a, b: F.silu(a) * b, leaf(dtype, B, S, FFN), leaf(dtype, B, S, FFN))
    table = predicted(
        dtype.itemsize, lambda ops, i: ops.multiply("mul", ops.silu("silu", i[0]), i[1]), ["T·f", "T·f"], "T·f"
    )
    agree(table, real)


def test_embedding(dtype: torch.dtype) -> None:
    tokens = torch.randint(V, (B, S))
    real = measured(lambda weight, tokens: F.embedding(tokens, weight), leaf(dtype, V, D), tokens)
    table = predicted(dtype.itemsize, lambda ops, i: ops.embedding("embedding", i[0]), ["V·d"], "T·d")
    agree(table, real)


def test_cross_entropy(dtype: torch.dtype) -> None:
    labels = torch.randint(V, (B, S))
    real = measured(lambda logits, labels: cross_entropy_sum(logits, labels), leaf(dtype, B, S, V), labels)
    table = predicted(dtype.itemsize, lambda ops, i: cross_entropy(ops, i[0]), ["T·V"], "1")
    agree(table, real)
