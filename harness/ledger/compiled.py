"""Decoder layers that torch.compile made one graph of: what they keep for backward.

torch._functorch.partitioners.min_cut_rematerialization_partition decides by the graph alone: matrix products and
attention are never computed again, what goes into one in backward is kept, elementwise results between them are not.
Of a layer that leaves, beside its input and in elements: the two norms' outputs (gathered, with sequence parallelism),
queries, keys and values, the attention's output and log-sum-exps, what the attention hands to the residual stream, the
outputs of w1 and w3 and their product, and 4 bytes a row of each norm. Not kept: silu's output, the sum that the second
norm is given, float32 copies. With full or selective checkpointing a region is computed again up to what its last
product is given: nobody needs what comes after.

Kernels of inductor hold no temporaries between elementwise operators (`cuda`). With `cpu` every operator's result is
seen, as backend aot_eager runs them one by one.
"""

from __future__ import annotations

from harness.config import DTYPE_BYTES, Trainer
from harness.ledger.autograd import Gradient, Tensor
from harness.ledger.operators import LOGITS, Operators, Target
from harness.ledger.recompute import Keeps
from harness.ledger.sizes import Quantities
from harness.ledger.tape import Storage


class CompiledOperators:
    """Those of `ops` that keep less in a compiled layer."""

    def __init__(self, ops: Operators) -> None:
        self.ops = ops

    def rms_norm(
        self, category: str, x: Tensor, weight: Tensor, stream: str, rows: str, made_of: list[Tensor]
    ) -> Tensor:
        """As `Operators.rms_norm`; keeps its input, or what that is the sum of (`made_of`, which it empties), and 4
        bytes a row."""
        ops = self.ops
        node, adds, kept = x.node, bool(made_of), [tensor.storage for tensor in made_of or [x]]
        made_of.clear()
        saved: list[Storage] = [*kept, ops.new(category, 4, rows)]
        if ops.target == "cpu":
            scale = self._normalise(category, stream)
            del scale
        out = Tensor(ops.new(category, ops.e, stream))
        del kept

        def backward(gradient: Gradient, saved: list[Storage] = saved) -> list[Gradient | None]:
            if ops.target == "cuda":
                ops.graph.release(saved)
                return [ops.gradient(ops.e, stream), Gradient(ops.new("unsharded gradients", ops.e, "d"))]
            return self._norm_backward(category, stream, rows, gradient, saved, adds=adds)

        out.node = ops.graph.record([Tensor(x.storage, node), weight], backward)
        return out

    def _normalise(self, category: str, stream: str) -> Storage:
        """The float32 copy, its squares and both products, of which the last is what remains to be cast."""
        ops = self.ops
        wide = ops.new(category, 4, stream) if ops.e != 4 else None
        squares = ops.new(category, 4, stream)
        del squares
        normalised = ops.new(category, 4, stream)
        del wide
        product = ops.new(category, 4 if ops.e != 4 else 0, stream)
        del normalised
        return product

    def _norm_backward(
        self, category: str, stream: str, rows: str, gradient: Gradient, saved: list[Storage], *, adds: bool
    ) -> list[Gradient | None]:
        ops, casts = self.ops, self.ops.e != 4
        wide_gradient = ops.gradient(4, stream) if casts else gradient
        del gradient
        x = ops.new(category, ops.e, stream) if adds else saved[0]
        wide = ops.new(category, 4, stream) if casts else x
        del x
        ops.graph.release(saved)
        normalised = ops.new(category, 4, stream)
        products = ops.gradient(4, stream)
        del normalised
        to_normalised = ops.gradient(4, stream)
        del wide_gradient
        to_weight = Gradient(ops.new("unsharded gradients", ops.e, "d"))
        del products
        products = ops.gradient(4, stream)
        to_input = ops.gradient(4, stream)
        del to_normalised
        to_scale = ops.gradient(4, rows)
        del products
        to_squares, power = ops.gradient(4, stream), ops.gradient(4, stream)
        del to_scale, wide
        doubled = ops.gradient(4, stream)
        del power
        through_squares = ops.gradient(4, stream)
        del to_squares, doubled
        total = ops.gradient(4, stream)
        del to_input, through_squares
        return [ops.gradient(ops.e, stream) if casts else total, to_weight]

    def silu(self, category: str, x: Tensor) -> Tensor:
        """On GPUs part of the kernel that multiplies, and of that one's backward."""
        ops, saved = self.ops, x.storage
        if ops.target == "cpu":
            return ops.silu(category, x)
        out = Tensor(ops.new(category, 0, "T·f/t"))

        def backward(gradient: Gradient, saved: Storage = saved) -> list[Gradient]:
            return [gradient]

        out.node = ops.graph.record([x], backward)
        return out

    def multiply(self, category: str, x: Tensor, y: Tensor) -> Tensor:
        """silu's output `x` by `y`; keeps `y` alone, unless this is computed again, once for all that need it."""
        ops, one_by_one, shares = self.ops, self.ops.target == "cpu", self.ops.graph.computes_again
        saved = [y.storage, x.storage] if shares else [y.storage]
        out = Tensor(ops.new(category, ops.e, "T·f/t"))

        def backward(gradient: Gradient, saved: list[Storage] = saved) -> list[Gradient]:
            again = saved.pop() if shares else ops.new(category, ops.e if one_by_one else 0, "T·f/t")
            to_y = ops.gradient(ops.e, "T·f/t")
            del again
            to_x = ops.gradient(ops.e, "T·f/t") if one_by_one else gradient
            saved.clear()
            return [to_x, to_y]

        out.node = ops.graph.record([x, y], backward)
        return out


PRODUCTS = ("wq", "wk", "wv", "wo", "w1", "w3", "w2")
"""In the order in which a layer computes them; `wo` stands for what leaves its region, too."""


def within_budget(config: Trainer.Config, quantities: Quantities) -> Keeps:
    """What `activation_checkpoint.memory_budget` leaves to be kept, approximately.

    torch fills a knapsack with the results that are dear to compute again, for the most operations saved
    (`choose_saved_values_set`); products of one width cost alike for each byte, and here the largest go first. The
    budget is a share of all that a layer without it keeps beside its input. Where all products and the attention fit
    in, torch keeps just these.
    """
    element = DTYPE_BYTES[config.training.mixed_precision_param]

    def bytes_of(coefficient: int, monomial: str) -> int:
        return quantities.size(coefficient, monomial).bytes

    queries, keys, hidden = bytes_of(element, "T·d/t"), bytes_of(element, "T·kv/t"), bytes_of(element, "T·f/t")
    scattered = config.parallelism.sequence_parallel
    sizes = {"w1": hidden, "w3": hidden, "attention": queries + bytes_of(4, "T·H/t"), "wq": queries}
    sizes |= {"wo": queries if scattered else bytes_of(element, "T·d"), "wk": keys, "wv": keys}
    norms = 2 * (bytes_of(element, "T·d") + bytes_of(4, "T"))
    left = config.activation_checkpoint.memory_budget * (sum(sizes.values()) + norms + hidden)
    kept = set()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if sizes[name] <= left:
            kept.add(name)
            left -= sizes[name]

    def keeps(products: int, is_product: bool) -> bool:
        name = PRODUCTS[products - 1]
        if is_product:
            return name in kept and (name != "wo" or config.parallelism.tp == 1)
        return ("attention" if name == "wv" else name) in kept

    return keeps


def keeps_attention(keeps: Keeps) -> bool:
    return keeps(PRODUCTS.index("wv") + 1, False)


def after_attention(keeps: Keeps) -> Keeps:
    """Of the part of a layer that begins with `wo`."""
    return lambda products, is_product: keeps(PRODUCTS.index("wo") + products, is_product)


def keeps_last_product(config: Trainer.Config) -> bool:
    """Selective checkpointing marks a layer's last product as one to keep. Nobody needs it, and so it is not kept,
    unless an all-reduce follows, behind which the partitioner does not look."""
    layout = config.parallelism
    return config.activation_checkpoint.mode == "selective" and layout.tp > 1 and not layout.sequence_parallel


def compiled_cross_entropy(ops: Operators, logits: Tensor) -> Tensor:
    """Cross-entropy in fused kernels: keeps the logits and 8 bytes a token, never a float32 copy; the gradient is the
    only other tensor of that size. 4·T·V bytes in all (bfloat16), where 12·T·V are needed without torch.compile."""
    node, saved = logits.node, [logits.storage, ops.new(LOGITS, 8, "T/k")]

    def backward(gradient: Gradient, saved: list[Storage] = saved) -> list[Gradient]:
        to_logits = ops.gradient(ops.e, "T·V/k")
        ops.graph.release(saved)
        return [to_logits]

    out = Tensor(ops.new(LOGITS, 4, "1"))
    out.node = ops.graph.record([Tensor(logits.storage, node)], backward)
    return out


def fuses_loss(config: Trainer.Config, target: Target) -> bool:
    wanted = config.compile
    return wanted.loss and wanted.backend == "inductor" and target == "cuda" and config.parallelism.tp == 1


def compilation_notes(config: Trainer.Config, target: Target) -> list[str]:
    """What of a prediction is less than exact because torch.compile decides it, a line each."""
    notes, wanted = [], config.compile
    if wanted.blocks:
        what = "of fused kernels are approximated" if target == "cuda" else "are those of backend aot_eager"
        notes.append(f"compiled blocks: saved activations as torch's partitioner keeps them; temporaries {what}")
        if config.activation_checkpoint.mode == "memory_budget":
            notes.append("memory budget: saved activations are approximated as the largest products that fit into it")
        if wanted.cuda_graphs:
            notes.append("CUDA graphs: the private memory pool that they keep is not predicted")
    if wanted.loss and wanted.backend == "inductor" and not fuses_loss(config, target):
        notes.append("compiled loss: predicted as without torch.compile, an upper bound")
    return notes
