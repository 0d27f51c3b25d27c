"""Redistributions of the tensor-parallel plan, as DTensor carries them out.

Sequence shards are dimension 1: a gathered tensor is put together by a copy unless the batch is 1
(`_maybe_view_chunk_cat`), and what is scattered is always rearranged first (`reduce_scatter_tensor`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.ledger.autograd import Gradient, Tensor
from harness.ledger.operators import ACTIVATION_GRADIENTS, Operators
from harness.ledger.tape import Storage

if TYPE_CHECKING:
    from harness.ledger.hardware_points import CollectiveKind

GATHERED = "activations: gathered over tp"


class Redistribution:
    """`sequence_parallel`: what lies between the regions is sharded over the sequence, else replicated.
    `keeps_received`: a layer that is computed again keeps what it gathers and reduces."""

    def __init__(self, ops: Operators, *, sequence_parallel: bool, keeps_received: bool = False) -> None:
        self.ops, self.sequence_parallel, self.keeps_received = ops, sequence_parallel, keeps_received
        self.active = ops.quantities.values["t"] > 1
        self.copies_gathered = ops.quantities.values["B"] > 1

    @property
    def stream(self) -> str:
        """Elements of the residual stream on one rank."""
        return "T·d/t" if self.active and self.sequence_parallel else "T·d"

    @property
    def rows(self) -> str:
        return "T/t" if self.active and self.sequence_parallel else "T"

    def enter(self, x: Tensor, per: str = "") -> Tensor:
        """Into a region of column-parallel products: gathered forward, gradient reduced backward. `per`: what part of
        the tokens, such as `/k`."""
        if not self.active:
            return x
        if not self.sequence_parallel:
            return self._through(x, x.storage, lambda: self._all_reduce(ACTIVATION_GRADIENTS, per))
        gathered = self._kept(lambda: self._all_gather(GATHERED, per))
        return self._through(x, gathered, lambda: self._reduce_scatter(ACTIVATION_GRADIENTS, per))

    def leave(self, category: str, partial: Tensor) -> Tensor:
        """Out of a row-parallel product (or the embedding): reduced forward, gradient gathered backward."""
        if not self.active:
            return partial
        if not self.sequence_parallel:
            reduced = self._kept(lambda: self._all_reduce(category))
            return Tensor(reduced, self.ops.graph.record([partial], lambda gradient: [gradient], saves=False))
        return self._through(partial, self._reduce_scatter(category), lambda: self._all_gather(ACTIVATION_GRADIENTS))

    def _through(self, x: Tensor, out: Storage, backward: Callable[[], Storage]) -> Tensor:
        node = self.ops.graph.record([x], lambda gradient: [Gradient(backward(), is_view=True)], saves=False)
        return Tensor(out, node)

    def _kept(self, compute: Callable[[], Storage]) -> Storage:
        return self.ops.kept(compute, always=True) if self.keeps_received else compute()

    def _all_gather(self, category: str, per: str = "") -> Storage:
        self._sends("all_gather", per)
        if self.copies_gathered:
            self.ops.runs("tp_gather_copy_out", "order of the gathered", (2 * self.ops.e, f"T·d{per}"))
        received = self.ops.new(category, self.ops.e, f"T·d{per}")
        return self.ops.new(category, self.ops.e, f"T·d{per}") if self.copies_gathered else received

    def _reduce_scatter(self, category: str, per: str = "") -> Storage:
        rearranged = self.ops.new(category, self.ops.e, f"T·d{per}")
        self.ops.runs("tp_scatter_copy_in", "order of the scattered", (2 * self.ops.e, f"T·d{per}"))

        def reduce() -> Storage:
            self._sends("reduce_scatter", per)
            return self.ops.new(category, self.ops.e, f"T·d/t{per}")

        reduced = self.ops.kept(reduce)
        del rearranged
        return reduced

    def _all_reduce(self, category: str, per: str = "") -> Storage:
        self._sends("all_reduce", per)
        return self.ops.new(category, self.ops.e, f"T·d{per}")

    def _sends(self, kind: CollectiveKind, per: str) -> None:
        """Eager tensor parallelism waits for each of its collectives: they are as if on the compute stream."""
        if self.ops.program is not None:
            size = self.ops.quantities.size(self.ops.e, f"T·d{per}").bytes
            self.ops.program.collective(kind, "tp", "activations", size)
