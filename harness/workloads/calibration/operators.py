"""Matrix products and attention, as the trainer's linear layers and attention call them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
import torch.nn.functional as F  # noqa: N812, torch's own name for it

from harness.ledger.hardware_points import Attention, Direction, DType, Layout, MatrixProduct
from harness.trainer.build import DTYPES
from harness.workloads.calibration.clock import Clock, Operation
from harness.workloads.calibration.sizes import Linear, Shape, Sizes


def matrix_products(clock: Clock, sizes: Sizes) -> list[MatrixProduct]:
    return [
        *_products(clock, "bfloat16", sizes.tokens, sizes.linears),
        *_products(clock, "float32", sizes.float32_tokens, sizes.float32_linears),
    ]


def _products(
    clock: Clock, dtype: DType, token_counts: Sequence[int], linears: Sequence[Linear]
) -> Iterator[MatrixProduct]:
    for outputs, inputs in linears:
        weight = _random(clock, dtype, outputs, inputs)
        for tokens in token_counts:
            yield from _of_a_linear(clock, dtype, weight, tokens)


def _of_a_linear(clock: Clock, dtype: DType, weight: torch.Tensor, tokens: int) -> Iterator[MatrixProduct]:
    outputs, inputs = weight.shape
    x, gradient = _random(clock, dtype, tokens, inputs), _random(clock, dtype, tokens, outputs)
    products: dict[Layout, tuple[Operation, tuple[int, int, int]]] = {
        "forward": (lambda: F.linear(x, weight), (tokens, outputs, inputs)),
        "input_gradient": (lambda: torch.mm(gradient, weight), (tokens, inputs, outputs)),
        "weight_gradient": (lambda: torch.mm(gradient.t(), x), (outputs, inputs, tokens)),
    }
    for layout, (operation, (m, n, k)) in products.items():
        taken = clock.measure(operation)
        yield MatrixProduct(dtype=dtype, layout=layout, m=m, n=n, k=k, ns=taken.ns, spread_pct=taken.spread_pct)


def attention(clock: Clock, sizes: Sizes) -> list[Attention]:
    by_dtype: dict[DType, tuple[Shape, ...]] = {"bfloat16": sizes.attention, "float32": sizes.float32_attention}
    return [
        point for dtype, shapes in by_dtype.items() for shape in shapes for point in _of_a_shape(clock, dtype, shape)
    ]


def _of_a_shape(clock: Clock, dtype: DType, shape: Shape) -> Iterator[Attention]:
    def heads(count: int, tokens: int) -> torch.Tensor:
        """[batch, heads, tokens, head_dim] in the layout that the projections leave."""
        made = _random(clock, dtype, shape.batch, tokens, count, shape.head_dim)
        return made.transpose(1, 2).requires_grad_()

    q = heads(shape.heads, shape.queries)
    k, v = heads(shape.kv_heads, shape.keys), heads(shape.kv_heads, shape.keys)
    grouped = shape.heads != shape.kv_heads

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=grouped)

    out = forward()
    gradient = torch.randn_like(out)
    operations: dict[Direction, Operation] = {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True),
    }
    for direction, operation in operations.items():
        taken = clock.measure(operation)
        yield Attention(dtype=dtype, direction=direction, **asdict(shape), ns=taken.ns, spread_pct=taken.spread_pct)


def _random(clock: Clock, dtype: DType, *shape: int) -> torch.Tensor:
    """Random numbers, since what a GPU's power allows depends on the bits that change."""
    return torch.randn(*shape, device=clock.device, dtype=DTYPES[dtype])
