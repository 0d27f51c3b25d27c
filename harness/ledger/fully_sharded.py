"""FSDP2's buffers: which exist when, as torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py holds them.

Per unit, in bytes of its N parameters (this tensor-parallel rank's part, dim 0 of each padded to a multiple of W):
gathered forward 2N all-gather output + 2N unsharded, and 2N of the unit before until the copy-out is done; backward
2N unsharded + 2N prefetched + 2N gradients + 4N reduce-scatter input of the unit after (bfloat16, float32 reduction).
A prefetch depth of D is 2N of D units that wait for their copy-out beside the one that runs, in forward as in backward;
asynchronous all-gathers hold nothing of the unit before. A process group of their own adds nothing that is allocated.

HSDP all-reduces the reduce-scatter output in place and holds it until the end of backward (AllReduceState): nothing
more where it is the gradient itself, one more copy where that is another tensor (another dtype, or added to an earlier
micro-batch's).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from harness.ledger.autograd import Gradient, Graph, Node, Tensor
from harness.ledger.layout import Parameter
from harness.ledger.sizes import Quantities
from harness.ledger.tape import Storage, Tape

ACCUMULATE_GRAD = 1 << 62
"""Order of the nodes that store parameter gradients: they run as soon as they are ready."""


class Sharding:
    """What all units share: the tape, the shard count and the buffers that outlive one unit."""

    def __init__(
        self,
        tape: Tape,
        quantities: Quantities,
        *,
        element: int,
        reduce_element: int,
        replicated: bool,
        async_unshard: bool,
    ) -> None:
        self.tape, self.quantities, self.replicated, self.async_unshard = tape, quantities, replicated, async_unshard
        self.element, self.reduce_element = element, reduce_element
        self.shards = quantities.values["W"]
        self.units: list[Unit] = []
        self.all_gather_state: Storage | None = None
        self.reduce_scatter_state: Storage | None = None

    def new(self, category: str, coefficient: int, monomial: str) -> Storage:
        return self.tape.allocate(category, self.quantities.size(coefficient, monomial))

    def set_prefetch(self, depth: int | Literal["default"], *, first: Unit) -> None:
        """Whom each unit gathers ahead; units are in the order in which their forward ends, which `first` begins."""
        in_order = [first, *(unit for unit in self.units if unit is not first)]
        forward, backward = (0, 1) if depth == "default" else (depth, depth)
        for place, unit in enumerate(in_order):
            unit.forward_prefetch = in_order[place + 1 : place + 1 + forward]
        for place, unit in enumerate(self.units):
            unit.backward_prefetch = self.units[max(0, place - backward) : place][::-1]

    def finalize_backward(self) -> None:
        """What the callback at the end of backward lets go."""
        self.reduce_scatter_state = None
        for unit in self.units:
            unit.all_reduce_state = None


class Unit:
    """One `fully_shard` group. `symbol` names its padded parameters in formulas."""

    def __init__(
        self, sharding: Sharding, name: str, symbol: str, parameters: Sequence[Parameter], *, reshards: bool
    ) -> None:
        self.sharding, self.name, self.symbol, self.reshards = sharding, name, symbol, reshards
        self.parameters = parameters
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        sharding.units.append(self)
        self.shard = sharding.new("parameters", 4, f"{symbol}/W")
        self.sharded_gradient: Storage | None = None
        self.gathered: Storage | None = None
        self.unsharded: Storage | None = None
        self.gradients: dict[str, Gradient] = {}
        self.all_reduce_state: Storage | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The unsharded parameters as leaves; their gradients come to this unit."""
        return {p.name: Tensor(self.shard, self._accumulate_grad(p.name)) for p in self.parameters}

    def _accumulate_grad(self, name: str) -> Node:
        def accumulate(gradient: Gradient) -> list[Gradient | None]:
            self.gradients[name] = Gradient(gradient.storage)
            return []

        return Node(ACCUMULATE_GRAD, (), accumulate, None)

    def pre_forward(self) -> None:
        self._gather()
        self._copy_out(forward=True)
        for unit in self.forward_prefetch:
            unit._gather()

    def post_forward(self) -> None:
        if self.reshards:
            self._free_unsharded()

    def pre_backward(self) -> None:
        self._gather()
        self._copy_out(forward=False)
        for unit in self.backward_prefetch:
            unit._gather()

    def post_backward(self) -> None:
        """Frees the parameters, then the last unit's reduce-scatter input, then reduces this unit's gradients and adds
        them to those of earlier micro-batches."""
        self._free_unsharded()
        shared = self.sharding
        shared.reduce_scatter_state = None
        gradients = [self.gradients.pop(parameter.name) for parameter in self.parameters]
        to_reduce = shared.new("reduce-scatter input", shared.reduce_element, self.symbol)
        held = gradients[-1] if shared.shards > 1 else None  # by the loop variable of foreach_reduce
        gradients.clear()
        is_gradient = self.sharded_gradient is None and shared.reduce_element == 4
        category = "gradients" if is_gradient else "reduce-scatter output"
        reduced = shared.new(category, shared.reduce_element, f"{self.symbol}/W")
        if shared.shards == 1:
            divided = shared.new("reduce-scatter input", shared.reduce_element, self.symbol)
            del divided
        all_reduced = reduced if shared.replicated else None
        if shared.reduce_element != 4:
            category = "gradients" if self.sharded_gradient is None else "reduce-scatter output"
            reduced = shared.new(category, 4, f"{self.symbol}/W")
        if self.sharded_gradient is None:
            self.sharded_gradient = reduced
        shared.reduce_scatter_state, self.all_reduce_state = to_reduce, all_reduced
        del held

    def _gather(self) -> None:
        shared = self.sharding
        if shared.shards == 1 or self.gathered is not None or self.unsharded is not None:
            return
        cast = shared.new("all-gather input", shared.element, f"{self.symbol}/W") if shared.element != 4 else None
        self.gathered = shared.new("all-gather output", shared.element, self.symbol)
        del cast

    def _copy_out(self, *, forward: bool) -> None:
        shared = self.sharding
        if self.unsharded is not None:
            return
        if shared.shards == 1:
            # Cast and copied one by one: the last cast lives beside all that was copied.
            self.unsharded = shared.new("unsharded parameters", shared.element, self.symbol)
            if shared.element != 4:
                shared.new("all-gather input", shared.element, self.parameters[-1].monomial)
            return
        self.unsharded = shared.new("unsharded parameters", shared.element, self.symbol)
        if forward:
            shared.all_gather_state = None if shared.async_unshard else self.gathered
        self.gathered = None

    def _free_unsharded(self) -> None:
        if self.unsharded is not None:
            self.unsharded.free()
            self.unsharded = None


def before(graph: Graph, unit: Unit, x: Tensor) -> Tensor:
    """A unit's pre-forward; its post-backward runs once the gradient of `x` is complete."""
    unit.pre_forward()

    def backward(gradient: Gradient) -> list[Gradient]:
        unit.post_backward()
        return [gradient]

    return Tensor(x.storage, graph.record([x], backward))


def after(graph: Graph, unit: Unit, out: Tensor) -> Tensor:
    """A unit's post-forward; its pre-backward runs when the gradient of `out` arrives."""
    unit.post_forward()

    def backward(gradient: Gradient) -> list[Gradient]:
        unit.pre_backward()
        return [gradient]

    return Tensor(out.storage, graph.record([out], backward))
