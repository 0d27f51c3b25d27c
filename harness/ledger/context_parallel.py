"""Context-parallel attention: what it holds, block by block, as harness.trainer.context_parallel goes.

With T tokens of this rank, in bytes of compute elements (e), per layer: the all-gather saves 2e·T·kv·c/t of keys and
values instead of 2e·T·kv/t, the ring no more than without context parallelism; backward needs as much again for their
gradients (all-gather), or 2·(e + 4)·T·kv/t for each of the two tensors that are on their way and there (ring).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from harness.config import Trainer
from harness.context_parallel import Block, sources, visible
from harness.ledger.autograd import Gradient, Tensor
from harness.ledger.operators import ACTIVATION_GRADIENTS, Operators
from harness.ledger.simulate import COMPUTE, EXCHANGE
from harness.ledger.tape import Storage

if TYPE_CHECKING:
    from harness.ledger.hardware_points import CollectiveKind, KernelKind

KEYS = "activations: keys and values over cp"

Part = Literal["all", "head", "tail"]
Share = tuple[int, Storage]
Attended = tuple[Storage, Storage]
"""Output and log-sum-exps."""


class ContextParallel:
    """Attention of one rank of `cp`."""

    def __init__(self, ops: Operators, config: Trainer.Config, rank: int) -> None:
        layout = config.parallelism
        self.ops, self.rank, self.size = ops, rank, layout.cp
        self.exchange, self.balance = layout.cp_attention, layout.cp_load_balance

    def new(self, category: str, coefficient: int, monomial: str, part: Part = "all") -> Storage:
        return self.ops.new(category, coefficient if part == "all" else coefficient // 2, monomial)

    def attention(self, category: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """In place of `Operators.attention`; every product of queries with keys is a kernel of the flash type."""
        e = self.ops.e
        self.runs("elementwise", "all", (2 * 2 * e, "T·kv/t"))  # keys and values in one tensor
        shared, shares = self._start(self.new(KEYS, 2 * e, "T·kv/t"))
        total: Attended | None = None
        for source, kv in shares:
            block = visible(self.rank, source, self.balance)
            if block is not None:
                total = self._merged(category, total, self._attend(category, block), block)
            del kv
        assert total is not None
        if e != 4:
            self.runs("narrow", "all", (4 + e, "T·d/t"))
        out = Tensor(total[0] if e == 4 else self.new(category, e, "T·d/t"))
        saved = q.storage, shared, out.storage, total[1]
        del total

        def backward(gradient: Gradient, saved: tuple[Storage, ...] = saved) -> list[Gradient]:
            return self._backward(gradient, saved[1])

        out.node = self.ops.graph.record([q, k, v], backward)
        return out

    def _backward(self, gradient: Gradient, shared: Storage) -> list[Gradient]:
        casts = self.ops.e != 4
        exchange: _Gathered | _Ring = (_Gathered if self.exchange == "allgather" else _Ring)(self, shared)
        to_q: Storage | None = None
        for source, kv in exchange.shares():
            block = visible(self.rank, source, self.balance)
            to_kv: list[Storage] = []
            if block is not None:
                to_block, *to_kv = self._gradients(block)
                if to_q is not None or casts:
                    self.runs(
                        "elementwise" if to_q else "widen", block.queries, (self.ops.e + (8 if to_q else 4), "T·d/t")
                    )
                if to_q is None:
                    to_q = self.new(ACTIVATION_GRADIENTS, 4, "T·d/t") if casts else to_block
                del to_block
            del kv
            exchange.add(to_kv)
        assert to_q is not None
        own = exchange.gradients()
        if casts:
            self.runs("narrow", "all", (4 + self.ops.e, "T·d/t"))
            if self.exchange == "ring":
                self.runs("narrow", "all", (2 * (4 + self.ops.e), "T·kv/t"))
        if casts and self.exchange == "ring":
            own = self.new(ACTIVATION_GRADIENTS, 2 * self.ops.e, "T·kv/t")
        to_q = self.new(ACTIVATION_GRADIENTS, self.ops.e, "T·d/t") if casts else to_q
        return [Gradient(storage, is_view=True) for storage in (to_q, own, own)]

    def _start(self, own: Storage) -> tuple[Storage, Iterator[Share]]:
        if self.exchange == "ring":
            return own, self.round(own)
        gathered = self.new(KEYS, 2 * self.ops.e, "T·kv·c/t")
        arrived = self.sends("all_gather", "keys and values", 2 * self.ops.e, "T·kv·c/t")

        def shares(own: Storage) -> Iterator[Share]:
            yield self.rank, own
            self.waits(arrived)
            del own
            for source in sources(self.rank, self.size)[1:]:
                yield source, gathered

        return gathered, shares(own)

    def round(self, kv: Storage) -> Iterator[Share]:
        order = sources(self.rank, self.size)
        for source in order:
            wait = self.pass_on(kv) if source != order[-1] else None
            yield source, kv
            if wait is not None:
                kv = wait()

    def pass_on(self, storage: Storage) -> Callable[[], Storage]:
        received = self.ops.tape.allocate(storage.category, storage.size)
        sent = [storage]
        arrived = self.sends("all_to_all", "keys and values", storage.size.coefficient, storage.size.monomial)

        def wait() -> Storage:
            self.waits(arrived)
            sent.clear()
            return received

        return wait

    def runs(self, kind: KernelKind, part: Part, *terms: tuple[int, str]) -> None:
        """A kernel as of `Operators.runs`, on half of these elements where only a part is meant."""
        whole = 1 if part == "all" else 2
        self.ops.runs(
            kind, "blocks of attention", *((coefficient // whole, monomial) for coefficient, monomial in terms)
        )

    def sends(self, kind: CollectiveKind, what: str, coefficient: int, monomial: str) -> int | None:
        """Asynchronously, once the compute stream is here; returns what to wait for."""
        program = self.ops.program
        if program is None:
            return None
        program.wait_stream(EXCHANGE, COMPUTE)
        program.collective(kind, "cp", what, self.ops.quantities.size(coefficient, monomial).bytes, stream=EXCHANGE)
        return program.record(EXCHANGE)

    def waits(self, arrived: int | None) -> None:
        if self.ops.program is not None:
            self.ops.program.wait(arrived)

    def multiplies(self, block: Block, *, backward: bool) -> None:
        if self.ops.program is not None:
            queries, keys = (1.0 if part == "all" else 0.5 for part in (block.queries, block.keys))
            self.ops.program.attention(backward=backward, queries=queries, keys=keys, causal=block.causal)

    def _attend(self, category: str, block: Block) -> Attended:
        self.multiplies(block, backward=False)
        out = self.new(category, self.ops.e, "T·d/t", block.queries)
        return out, self.new(category, 4, "T·H/t", block.queries)

    def _merged(self, category: str, total: Attended | None, found: Attended, block: Block) -> Attended:
        casts = self.ops.e != 4
        if casts:
            self.runs("widen", block.queries, (4 + self.ops.e, "T·d/t"))
        if total is not None:
            self.runs("elementwise", block.queries, (12, "T·d/t"))
            for _ in range(3):  # of the log-sum-exps: difference, weight, sum
                self.runs("elementwise", block.queries, (12, "T·H/t"))
        if total is None:
            return self.new(category, 4, "T·d/t") if casts else found[0], found[1]
        wide = self.new(category, 4, "T·d/t", block.queries) if casts else found[0]
        difference = self.new(category, 4, "T·H/t", block.queries)
        weight = self.new(category, 4, "T·H/t", block.queries)
        del wide, difference, weight
        return total

    def _gradients(self, block: Block) -> list[Storage]:
        """The log-sum-exps are copied where they are not contiguous: a CPU kernel's are laid out by tokens."""
        self.multiplies(block, backward=True)
        e, cuda = self.ops.e, self.ops.target == "cuda"
        is_contiguous = cuda and block.queries == "all"
        rows = None if is_contiguous else self.new(ACTIVATION_GRADIENTS, 4, "T·H/t", block.queries)
        found = [
            self.new(ACTIVATION_GRADIENTS, e, monomial, part)
            for monomial, part in (("T·d/t", block.queries), ("T·kv/t", block.keys), ("T·kv/t", block.keys))
        ]
        if cuda:
            of_queries, of_keys = (1 if part == "all" else 2 for part in (block.queries, block.keys))
            self.ops.attention_workspace(of_queries, of_keys)
        del rows
        return found


class _Gathered:
    """Gradients of the keys and values of all ranks in one tensor."""

    def __init__(self, cp: ContextParallel, shared: Storage) -> None:
        self._cp, self._shared = cp, shared
        cp.runs("fill", "all", (2 * cp.ops.e, "T·kv·c/t"))
        self._gradients = cp.new(ACTIVATION_GRADIENTS, 2 * cp.ops.e, "T·kv·c/t")

    def shares(self) -> Iterator[Share]:
        return ((source, self._shared) for source in sources(self._cp.rank, self._cp.size))

    def add(self, gradients: list[Storage]) -> None:
        for storage in gradients:
            self._cp.runs("elementwise", "all", (2 * storage.size.coefficient, storage.size.monomial))
        gradients.clear()

    def gradients(self) -> Storage:
        program, what = self._cp.ops.program, "gradients of keys and values"
        if program is not None:
            size = self._cp.ops.quantities.size(2 * self._cp.ops.e, "T·kv·c/t").bytes
            program.collective("reduce_scatter", "cp", what, size)
        return self._cp.new(ACTIVATION_GRADIENTS, 2 * self._cp.ops.e, "T·kv/t")


class _Ring:
    """Gradients of one rank's keys and values at a time, in float32."""

    def __init__(self, cp: ContextParallel, shared: Storage) -> None:
        self._cp, self._shared = cp, shared
        self._arriving: Callable[[], Storage] | None = None

    def shares(self) -> Iterator[Share]:
        return self._cp.round(self._shared)

    def add(self, gradients: list[Storage]) -> None:
        if self._arriving is None:
            self._cp.runs("fill", "all", (8, "T·kv/t"))
        total = self._cp.new(ACTIVATION_GRADIENTS, 8, "T·kv/t") if self._arriving is None else self._arriving()
        for storage in gradients:
            self._cp.runs(
                "elementwise", "all", (storage.size.coefficient, storage.size.monomial), (8, storage.size.monomial)
            )
        gradients.clear()
        self._arriving = self._cp.pass_on(total)

    def gradients(self) -> Storage:
        assert self._arriving is not None
        return self._arriving()
