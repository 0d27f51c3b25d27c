"""Float8 linear layers as torchao makes them: what is converted and scaled when, and the memory of it.

torchao/float8/float8_linear.py (`matmul_with_hp_or_float8_args`), float8_training_tensor.py (`_ToFloat8ConstrFunc`),
float8_ops.py (`float8_mm`, `addmm_float8_unwrapped`), config.py (`from_recipe_name`). Nothing in float8 is kept for
backward: saved is the input, in the compute dtype, and both operands of a product are converted anew.

A layer multiplies T tokens of K features with a weight of N rows. An operand costs 1 byte an element and 4 a scale;
while it is converted, 8 to 9 bytes an element beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.float8 import COLUMN_PARALLEL, Recipe
from harness.ledger.autograd import Gradient, Tensor
from harness.ledger.operators import ACTIVATION_GRADIENTS, Operators
from harness.ledger.tape import Storage

OPERANDS = "float8: operands"
CONVERSION = "float8: conversion"
PRODUCTS = "float8: products"

DIMENSIONS = {"input": "TK", "weight": "KN", "gradient": "TN"}


@dataclass(frozen=True, slots=True)
class Conversion:
    """An operand converted with one scale for all values that differ in the dimensions `over` only."""

    operand: Literal["input", "weight", "gradient"]
    over: str

    def reduces(self, sharded: str) -> bool:
        """Whether the largest values are those of all tensor-parallel ranks, `sharded` being the dimension (of K and N)
        that is: DTensor then has them all-reduced, as float64."""
        return sharded in DIMENSIONS[self.operand] and sharded in self.over

    @property
    def scales(self) -> str:
        """The dimension along which there is a scale each, "" for a single one."""
        return "".join(d for d in DIMENSIONS[self.operand] if d not in self.over)


Pair = tuple[Conversion, Conversion]


def conversions(recipe: Recipe) -> tuple[Pair, Pair, Pair | None]:
    """Of the operands of a layer's output, input gradient and weight gradient (None: not in float8)."""
    if recipe == "tensorwise":
        x, weight, gradient = Conversion("input", "TKN"), Conversion("weight", "TKN"), Conversion("gradient", "TKN")
        return (x, weight), (gradient, weight), (gradient, x)
    output = Conversion("input", "K"), Conversion("weight", "K")
    if recipe == "rowwise_with_gw_hp":
        return output, (Conversion("gradient", "N"), Conversion("weight", "TKN")), None
    to_input = Conversion("gradient", "N"), Conversion("weight", "N")
    return output, to_input, (Conversion("gradient", "T"), Conversion("input", "T"))


def all_reduced(recipe: Recipe, name: str) -> tuple[list[str], list[str]]:
    """What of the linear layer `name` is all-reduced over tensor-parallel ranks in forward and in backward: for each
    all-reduce the dimension along which it has elements, "" for one of a single element."""
    sharded = "N" if name in COLUMN_PARALLEL else "K"
    output, to_input, to_weight = conversions(recipe)
    backward = (*to_input, *(to_weight or ()))
    return [c.scales for c in output if c.reduces(sharded)], [c.scales for c in backward if c.reduces(sharded)]


class Float8:
    """Float8Linear on symbolic tensors, with products in float8 or emulated in float32."""

    def __init__(self, ops: Operators, recipe: Recipe, *, emulate: bool) -> None:
        self.ops, self.recipe, self.emulate = ops, recipe, emulate

    def linear(self, category: str, x: Tensor, weight: Tensor, shape: tuple[str, str, str]) -> Tensor:
        """x·Wᵀ with `shape` = monomials of input, weight and output. Saves its input; backward computes the input's
        gradient first, and holds the operands of both products until it is done."""
        ops, (inner, matrix, outer), saved = self.ops, shape, x.storage
        ops.cublas("forward")
        elements = {"input": inner, "weight": matrix, "gradient": outer}
        sizes = {"T": "T", "K": inner.removeprefix("T·"), "N": outer.removeprefix("T·")}
        output, to_input, to_weight = conversions(self.recipe)

        def convert(pair: Pair) -> list[Storage]:
            found: list[Storage] = []
            for one in pair:
                found += self._converted(elements[one.operand], sizes.get(one.scales))
            return found

        operands = convert(output)
        # The one product with fast accumulation, which scales its own result whatever the scales.
        out = Tensor(
            ops.kept(lambda: self._product(category, inner, matrix, outer, scales_after=False), is_product=True)
        )
        del operands

        def backward(gradient: Gradient, saved: Storage = saved) -> list[Gradient | None]:
            ops.cublas("backward")
            scales_after = self.recipe != "tensorwise"
            operands = convert(to_input)
            # Kernels take both scales by row, or neither.
            repeated = ops.new(OPERANDS, 4, sizes["K"]) if to_input[0].scales and not to_input[1].scales else None
            made = self._product(ACTIVATION_GRADIENTS, outer, matrix, inner, copied=[matrix], scales_after=scales_after)
            del repeated
            result = Gradient(made, is_view=True)
            if to_weight is None:
                of_weight = ops.new("unsharded gradients", ops.e, matrix)
            else:
                operands += convert(to_weight)
                of_weight = self._product(
                    "unsharded gradients", outer, inner, matrix, copied=[outer, inner], scales_after=scales_after
                )
            return [result, Gradient(of_weight, is_view=True)]

        out.node = ops.graph.record([x, weight], backward)
        return out

    def _converted(self, elements: str, scales: str | None) -> list[Storage]:
        """An operand and its scales. Largest absolute values and scales are smaller than what follows them; a single
        largest value is kept by selective checkpointing."""
        ops = self.ops
        if scales is None:
            ops.kept(lambda: ops.new(OPERANDS, ops.e, "1"))
        found = [] if scales is None else [ops.new(OPERANDS, 4, scales)]
        wide = ops.new(CONVERSION, 4, elements) if ops.e != 4 else None
        scaled = ops.new(CONVERSION, 4, elements)
        del wide
        clamped = ops.new(CONVERSION, 4, elements)
        found.append(ops.new(OPERANDS, 1, elements))
        del scaled, clamped
        return found

    def _product(
        self, category: str, a: str, b: str, out: str, *, copied: Sequence[str] = (), scales_after: bool
    ) -> Storage:
        """The product of operands of `a` and `b` elements. `copied`: operands that are not in the one order that
        kernels take. `scales_after`: by row and column, without fast accumulation, the scales are multiplied into the
        result, as a matrix (torchao: that kernel is too slow)."""
        ops = self.ops
        copies = [ops.new(OPERANDS, 1, elements) for elements in copied]
        if not self.emulate:
            factors = ops.new(PRODUCTS, 4, out) if scales_after else None
            # Kernels that scale by row have no float32 results.
            narrow = ops.new(PRODUCTS, 2, out) if ops.e == 4 and self.recipe != "tensorwise" else None
            result = ops.new(category, ops.e, out)
            del factors, narrow, copies
            return result
        wide_a = ops.new(PRODUCTS, 4, a)
        values_a = ops.new(PRODUCTS, 4, a)
        del wide_a
        wide_b = ops.new(PRODUCTS, 4, b)
        values_b = ops.new(PRODUCTS, 4, b)
        del wide_b
        product = ops.new(category if ops.e == 4 else PRODUCTS, 4, out)
        del values_a, values_b
        result = product if ops.e == 4 else ops.new(category, ops.e, out)
        del copies
        return result
