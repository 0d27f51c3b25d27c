"""Operator tables: what each operator of the decoder allocates, saves for backward, and needs in between.

Two targets. `cuda` knows fused kernels and their workspaces (checked against allocator snapshots of H200s, torch 2.11,
cuDNN attention). `cpu` is what a TorchDispatchMode sees: every storage an operator returns (checked against torch on
this machine in tests/ledger/test_operators.py). Sizes are monomials over T tokens, d width, f feed-forward width,
kv width of the keys, H heads, V vocabulary, t tensor-parallel degree; `e` is the bytes of a compute element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from harness.ledger.autograd import Gradient, Graph, Tensor
from harness.ledger.recompute import Result
from harness.ledger.sizes import Quantities
from harness.ledger.tape import Storage, Tape
from harness.ledger.workspaces import CUBLAS_BYTES, CUDNN_BYTES, Line, attention_backward, embedding_backward

if TYPE_CHECKING:
    from harness.ledger.hardware_points import KernelKind, Layout
    from harness.ledger.program import Program

Target = Literal["cuda", "cpu"]

ACTIVATION_GRADIENTS = "activation gradients"
WORKSPACE = "kernel workspaces"
LOGITS = "logits and loss"


class Operators:
    """Forward of every operator on symbolic tensors; each records its backward."""

    def __init__(self, tape: Tape, quantities: Quantities, *, target: Target, element: int) -> None:
        self.tape, self.quantities, self.target, self.e = tape, quantities, target, element
        self.graph = Graph(tape, sums_in_place=target == "cuda")
        self.program: Program | None = None
        """Where what the device runs is written down, if its time is wanted."""
        self.handles: dict[str, Storage] = {}
        self.adds_up_gradients = False
        """Gradients of several backwards are added up before they are reduced, as in a pipeline."""
        self.in_compiled_layer = False
        self.is_last_part = False
        """Only what a compiled layer returns is made of what follows: it is computed once."""

    def new(self, category: str, coefficient: int, monomial: str) -> Storage:
        if self.is_last_part and self.graph.computes_again:
            coefficient = 0
        return self.tape.allocate(category, self.quantities.size(coefficient, monomial))

    def workspace(self, lines: list[Line], *, beside: int = 0) -> None:
        """One block of several lines, and some bytes beside, that comes and goes. On GPUs."""
        if self.target != "cuda" or not lines:
            return
        sizes = [self.quantities.size(*line) for line in lines]
        inside = [self.tape.allocate(WORKSPACE, size, parts=()) for size in sizes[:-1]]
        block = self.tape.allocate(WORKSPACE, sizes[-1], parts=[beside + sum(size.bytes for size in sizes)])
        del block, inside

    def attention_workspace(self, of_queries: int = 1, of_keys: int = 1) -> None:
        lines = attention_backward(self.e, grouped=self._grouped, of_queries=of_queries, of_keys=of_keys)
        self.workspace(lines, beside=CUDNN_BYTES)

    def gradient(self, coefficient: int, monomial: str, *, is_view: bool = False) -> Gradient:
        return Gradient(self.new(ACTIVATION_GRADIENTS, coefficient, monomial), is_view)

    def runs(self, kind: KernelKind, what: str, *terms: tuple[int, str]) -> None:
        """A kernel that reads and writes these bytes an element of these elements; none where that is nothing."""
        if self.program is not None:
            self.program.kernel(kind, what, *terms)

    def attends(self, *, backward: bool) -> None:
        if self.program is not None:
            self.program.attention(backward=backward)

    def multiplies(self, shape: tuple[str, str, str], layout: Layout) -> None:
        if self.program is not None:
            self.program.product(shape, layout)

    def kept(self, compute: Callable[[], Result], *, is_product: bool = False, always: bool = False) -> Result:
        """What an operator returns whose result selective checkpointing keeps, where this is such a region."""
        frame = self.graph.frame
        if frame is None or self.is_last_part:
            return compute()
        return frame.kept(compute, is_product=is_product, always=always)

    def cublas(self, thread: str) -> None:
        """The workspace of a handle, made with the first product, once there is room for the result."""
        if self.target == "cuda" and thread not in self.handles:
            self.handles[thread] = self.new("cuBLAS workspaces", CUBLAS_BYTES, "handle")

    # ---------------------------------------------------------------------------------------------- linear, add

    def linear(self, category: str, x: Tensor, weight: Tensor, shape: tuple[str, str, str]) -> Tensor:
        """x·Wᵀ with `shape` = monomials of input, weight and output. Saves its input.

        Backward computes the weight's gradient, then the input's; both are views (of the transposed product, and of
        the product made in 2-D).
        """
        e, (inner, matrix, outer), saved = self.e, shape, [x.storage]
        lets_go = self.in_compiled_layer

        def product() -> Storage:
            self.multiplies(shape, "forward")
            result = self.new(category, e, outer)
            self.cublas("forward")
            return result

        out = Tensor(self.kept(product, is_product=True))

        def backward(gradient: Gradient, saved: list[Storage] = saved) -> list[Gradient | None]:
            wanted = self.graph.wanted
            if wanted != "inputs":
                self.multiplies(shape, "weight_gradient")
            if wanted != "weights":
                self.multiplies(shape, "input_gradient")
            if wanted == "inputs":
                to_input = self.gradient(e, inner, is_view=True)
                self.cublas("backward")
                return [to_input, gradient]
            to_weight = Gradient(self.new("unsharded gradients", e, matrix), is_view=True)
            self.cublas("backward")
            if lets_go:
                saved.clear()
            if wanted == "weights":
                return [None, to_weight]
            is_dtensor = self.quantities.values["t"] > 1
            return [Gradient(self.new(ACTIVATION_GRADIENTS, e, inner), is_view=True, is_dtensor=is_dtensor), to_weight]

        out.node = self.graph.record([x, weight], backward)
        return out

    def add(self, category: str, x: Tensor, branch: Tensor, monomial: str) -> Tensor:
        """The residual: saves nothing, hands its gradient to both sides without a copy."""
        self.runs("elementwise", "residual", (3 * self.e, monomial))
        out = Tensor(self.new(category, self.e, monomial))
        out.node = self.graph.record([x, branch], lambda gradient: [gradient, gradient], saves=False)
        return out

    # ---------------------------------------------------------------------------------------------- normalisation

    def rms_norm(self, category: str, x: Tensor, weight: Tensor, stream: str, rows: str) -> Tensor:
        """RMSNorm of `stream` elements in `rows` rows.

        CUDA: one kernel, saves its input and 4 bytes a row. CPU: composed of elementwise operators in float32
        (ATen/native/layer_norm.cpp `rms_norm_composite`), saves the input in float32 and the normalised input.
        """
        self.runs("rms_norm", "norms", (2 * self.e, stream))
        if self.target == "cuda":
            return self._rms_norm_fused(category, x, weight, stream, rows)
        casts = self.e != 4
        wide = self.new(category, 4, stream) if casts else x.storage
        squares = self.new(category, 4, stream)
        mean = self.new(category, 4, rows)
        del squares
        scale = self.new(category, 4, rows)
        del mean
        normalised = self.new(category, 4, stream)
        product = self.new(category, 4, stream)
        out = Tensor(self.new(category, self.e, stream) if casts else product)
        del product

        saved = [wide, scale, normalised]
        del wide, scale, normalised

        def backward(gradient: Gradient, saved: list[Storage] = saved) -> list[Gradient | None]:
            self.runs("rms_norm_backward", "norms", (5 * self.e, stream))
            wide, scale, normalised = saved
            self.graph.release(saved)
            if self.graph.wanted == "weights":  # of the product alone, from the wide gradient
                products = self.gradient(4, stream)
                return [None, Gradient(self.new("unsharded gradients", self.e, "d"))]
            wide_gradient = self.gradient(4, stream) if casts else gradient
            del gradient
            to_normalised = self.gradient(4, stream)
            if self.graph.wanted == "inputs":
                to_weight = wide_gradient
            else:
                products = self.gradient(4, stream)
                to_weight = Gradient(self.new("unsharded gradients", self.e, "d"))
                del products
            del wide_gradient, normalised
            to_input = self.gradient(4, stream)
            products = self.gradient(4, stream)
            to_scale = self.gradient(4, rows)
            del products, to_normalised, scale
            to_squares = self.gradient(4, stream)
            del to_scale
            power, doubled, through_squares = (self.gradient(4, stream) for _ in range(3))
            del power, doubled, to_squares, wide
            total = self.gradient(4, stream)
            del to_input, through_squares
            return [self.gradient(self.e, stream) if casts else total, to_weight]

        out.node = self.graph.record([x, weight], backward)
        return out

    def _rms_norm_fused(self, category: str, x: Tensor, weight: Tensor, stream: str, rows: str) -> Tensor:
        out = Tensor(self.new(category, self.e, stream))
        saved = x.storage, self.new(category, 4, rows)

        def backward(gradient: Gradient, saved: tuple[Storage, Storage] = saved) -> list[Gradient | None]:
            self.runs("rms_norm_backward", "norms", (5 * self.e, stream))
            wanted = self.graph.wanted
            to_input = None if wanted == "weights" else self.gradient(self.e, stream)
            if wanted == "inputs":
                return [to_input, gradient]
            return [to_input, Gradient(self.new("unsharded gradients", self.e, "d"))]

        out.node = self.graph.record([x, weight], backward)
        return out

    # ---------------------------------------------------------------------------------------------- attention

    def rotary(self, category: str, x: Tensor, heads: str) -> Tensor:
        """Rotation in float32 as complex numbers; saves nothing of its input, only the shared table."""
        casts = self.e != 4
        self._rotates(heads)
        wide = self.new(category, 4, heads) if casts else x.storage
        rotated = self.new(category, 4, heads)
        out = Tensor(self.new(category, self.e, heads) if casts else rotated)
        del wide, rotated

        def backward(gradient: Gradient) -> list[Gradient]:
            self._rotates(heads)
            self.runs("elementwise", "rotary", (8, "S·hd"))  # the table, conjugated
            wide = self.gradient(4, heads, is_view=True) if casts else gradient
            del gradient
            conjugate = self.new(WORKSPACE, 4, "S·hd")
            rotated = self.gradient(4, heads, is_view=True)
            del wide, conjugate
            return [self.gradient(self.e, heads, is_view=True) if casts else rotated]

        out.node = self.graph.record([x], backward)
        return out

    def _rotates(self, heads: str) -> None:
        self.runs("widen", "rotary", (6 if self.e != 4 else 0, heads))
        self.runs("rotary", "rotary", (8, heads))
        self.runs("narrow", "rotary", (6 if self.e != 4 else 0, heads))

    def attention(self, category: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal scaled dot-product attention; the result is [batch, seq, dim].

        CUDA has no kernel for float32 with fewer key than query heads: torch falls back to plain operators.
        """
        if self.target == "cuda" and self.e == 4 and self._grouped:
            return self._attention_math(category, q, k, v)
        return self._attention_flash(category, q, k, v)

    @property
    def _grouped(self) -> bool:
        return self.quantities.values["H"] != self.quantities.values["K"]

    def _attention_flash(self, category: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Flash-type kernels (cuDNN, flash, CPU flash): save q, k, v, the output and 4 bytes a row. What backward needs
        beside on CUDA: `workspaces.attention_backward`."""
        e = self.e

        def attend() -> tuple[Storage, Storage]:
            self.attends(backward=False)
            return self.new(category, e, "T·d/t"), self.new(category, 4, "T·H/t")

        attended, rows = self.kept(attend)
        out = Tensor(attended)
        saved = q.storage, k.storage, v.storage, rows, out.storage

        def backward(gradient: Gradient, saved: tuple[Storage, ...] = saved) -> list[Gradient]:
            self.attends(backward=True)
            gradients = [self.gradient(e, heads, is_view=True) for heads in ("T·d/t", "T·kv/t", "T·kv/t")]
            self.attention_workspace()
            return gradients

        out.node = self.graph.record([q, k, v], backward)
        return out

    def _attention_math(self, category: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Plain operators (ATen/native/transformers/attention.cpp `_scaled_dot_product_attention_math`): keys and
        values repeated for every query head, and whole [seq, seq] matrices, of which the softmax is saved.

        The softmax compares its input with -inf (1 byte an element); its backward multiplies gradient and output
        first. Both were settled by one measurement (H200, torch 2.11, FSDP8, 4 layers): without the product backward
        is one matrix short, and with the copy that `_safe_softmax` of other versions makes forward is one too many.
        """
        self.attends(backward=False)
        e, heads, matrix = self.e, "T·d/t", "T·S·H/t"
        scaled_q = self.new(category, e, heads)
        ones = self.new(category, 1, "S·S")
        lower = self.new(category, 1, "S·S")
        del ones
        bias = self.new(category, e, "S·S")
        del lower
        repeated_k, repeated_v = self.new(category, e, heads), self.new(category, e, heads)
        scaled_k = self.new(category, e, heads)
        scores = self.new(category, e, matrix)
        masked = self.new(category, e, matrix)
        del scores
        probabilities = self.new(category, e, matrix)
        is_masked = self.new(category, 1, matrix)
        del is_masked, masked
        by_heads = self.new(category, e, heads)
        del bias, repeated_k
        out = Tensor(self.new(category, e, heads))
        del by_heads
        saved = [scaled_q, scaled_k, repeated_v, probabilities]
        del scaled_q, scaled_k, repeated_v, probabilities

        def backward(gradient: Gradient, saved: list[Storage] = saved) -> list[Gradient]:
            self.attends(backward=True)
            scaled_q, scaled_k, repeated_v, probabilities = saved
            self.graph.release(saved)
            to_repeated_v = self.gradient(e, heads)
            to_probabilities = self.gradient(e, matrix)
            del gradient, repeated_v
            to_scores = self.gradient(e, matrix)
            product = self.new(WORKSPACE, e, matrix)
            del product, to_probabilities, probabilities
            to_scaled_k, to_scaled_q = self.gradient(e, heads), self.gradient(e, heads)
            del to_scores, scaled_q, scaled_k
            to_repeated_k = self.gradient(e, heads)
            del to_scaled_k
            to_k = self.gradient(e, "T·kv/t", is_view=True)
            del to_repeated_k
            to_v = self.gradient(e, "T·kv/t", is_view=True)
            del to_repeated_v
            to_q = self.gradient(e, heads, is_view=True)
            del to_scaled_q
            return [to_q, to_k, to_v]

        out.node = self.graph.record([q, k, v], backward)
        return out

    def copy_heads(self, category: str, x: Tensor) -> Tensor:
        """The copy that bringing [batch, heads, seq, head_dim] back to [batch, seq, dim] costs where the kernel's
        output is laid out by heads."""
        self.runs("strided_copy", "copy of heads", (2 * self.e, "T·d/t"))
        out = Tensor(self.new(category, self.e, "T·d/t"))
        out.node = self.graph.record([x], lambda gradient: [gradient], saves=False)
        return out

    # ---------------------------------------------------------------------------------------------- feed-forward

    def silu(self, category: str, x: Tensor) -> Tensor:
        e, saved = self.e, x.storage
        self.runs("elementwise", "gate", (2 * e, "T·f/t"))
        out = Tensor(self.new(category, e, "T·f/t"))

        def backward(gradient: Gradient, saved: Storage = saved) -> list[Gradient]:
            self.runs("elementwise", "gate", (3 * e, "T·f/t"))
            return [self.gradient(e, "T·f/t")]

        out.node = self.graph.record([x], backward)
        return out

    def multiply(self, category: str, x: Tensor, y: Tensor) -> Tensor:
        e, saved = self.e, (x.storage, y.storage)
        self.runs("elementwise", "gate", (3 * e, "T·f/t"))
        out = Tensor(self.new(category, e, "T·f/t"))

        def backward(gradient: Gradient, saved: tuple[Storage, Storage] = saved) -> list[Gradient]:
            for _ in saved:
                self.runs("elementwise", "gate", (3 * e, "T·f/t"))
            return [self.gradient(e, "T·f/t"), self.gradient(e, "T·f/t")]

        out.node = self.graph.record([x, y], backward)
        return out

    # ---------------------------------------------------------------------------------------------- embedding

    def embedding(self, category: str, weight: Tensor) -> Tensor:
        """Look-up of T rows; keeps only the token numbers, which are the batch itself.

        Under tensor parallelism the gradient comes with the rows of all ranks: DTensor has `embedding_dense_backward`
        make it whole, and FSDP2 has this rank's rows copied out of it when it reduces (`adds_up_gradients`: not yet).
        """
        self.runs("embedding", "look-up", (2 * self.e, "T·d"))
        out = Tensor(self.new(category, self.e, "T·d"))

        def backward(gradient: Gradient) -> list[Gradient]:
            self.runs("fill", "look-up", (self.e, "V·d"))
            self.runs("embedding_backward", "look-up", (2 * self.e, "T·d"))
            whole = self.new("unsharded gradients", self.e, "V·d")
            self.workspace(embedding_backward(self.quantities.values["T"], self.quantities.values["V"]))
            if self.quantities.values["t"] == 1 or self.adds_up_gradients:
                return [Gradient(whole)]
            del gradient
            return [Gradient(self.new("unsharded gradients", self.e, "V·d/t"), whole=whole)]

        out.node = self.graph.record([weight], backward)
        return out
