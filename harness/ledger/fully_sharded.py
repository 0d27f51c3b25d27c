"""FSDP2's buffers: which exist when, as torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py holds them.

Per unit, in bytes of its N parameters (this tensor-parallel rank's part, dim 0 of each padded to a multiple of W):
gathered forward 2N all-gather output + 2N unsharded, and 2N of the unit before until the copy-out is done; backward
2N unsharded + 2N prefetched + 2N gradients + 4N reduce-scatter input of the unit after (bfloat16, float32 reduction).
A prefetch depth of D is 2N of D units that wait for their copy-out beside the one that runs, in forward as in backward;
asynchronous all-gathers hold nothing of the unit before. A process group of their own adds nothing that is allocated.

HSDP all-reduces the reduce-scatter output in place and holds it until the end of backward (AllReduceState): nothing
more where it is the gradient itself, one more copy where that is another tensor (another dtype, or added to an earlier
micro-batch's).

With CPU offload a unit's 4N/W of parameters and 4N/W of gradients are in host memory. The all-gather input is then
copied there, N/W elements in the dtype of the shard (4 bytes) if that is gathered, else cast one parameter after the
other; the reduce-scatter output goes once it has been copied to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from harness.ledger.autograd import ACCUMULATE_GRAD, Gradient, Graph, Node, Tensor
from harness.ledger.fully_sharded_work import ShardingWork, UnitWork
from harness.ledger.layout import Parameter
from harness.ledger.sizes import Quantities, Size
from harness.ledger.tape import ALL_GATHER, ALL_REDUCE, COMPUTE, REDUCE_SCATTER, Storage, Tape, of_root
from harness.ledger.workspaces import reduce_scatter_input

if TYPE_CHECKING:
    from harness.ledger.program import Program


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
        root: int = 0,
        host: Tape | None = None,
    ) -> None:
        """root: which of the rank's FSDP2 roots this is; host: where shards and what belongs to them are with CPU
        offload."""
        self.tape, self.quantities, self.replicated, self.async_unshard = tape, quantities, replicated, async_unshard
        self.root, self.host = root, host
        self.element, self.reduce_element = element, reduce_element
        self.shards = quantities.values["W"]
        self.units: list[Unit] = []
        self.reduces = True
        """Whether gradients are reduced as each backward ends."""
        self.frees = True
        """Whether parameters are freed as each backward ends."""
        self.all_gather_state: Storage | None = None
        self.reduce_scatter_state: Storage | None = None

    def write_down(self, program: Program) -> None:
        """What the units have the device do, from here on."""
        work = ShardingWork(
            program,
            shards=self.shards,
            element=self.element,
            reduce_element=self.reduce_element,
            asynchronous=self.async_unshard,
        )
        for unit in self.units:
            unit.work = UnitWork(work, unit.name, unit.parameters)

    def new(
        self,
        category: str,
        coefficient: int,
        monomial: str,
        *,
        stream: int = COMPUTE,
        parts: Sequence[int] | None = None,
    ) -> Storage:
        size = self.quantities.size(coefficient, monomial)
        return self.tape.allocate(category, size, stream=of_root(self.root, stream), parts=parts)

    def new_resident(
        self,
        category: str,
        coefficient: int,
        monomial: str,
        *,
        stream: int = COMPUTE,
        parts: Sequence[int] | None = None,
    ) -> Storage:
        """Of the shards: parameters, their gradients, optimizer states."""
        tape = self.host or self.tape
        return tape.allocate(category, self.quantities.size(coefficient, monomial), stream=stream, parts=parts)

    def new_copy_plan(self, to_reduce: Storage) -> None:
        """What the kernel that fills a reduce-scatter input is told."""
        if self.tape.allocator is not None:
            for line in reduce_scatter_input(to_reduce.size.bytes // self.shards):
                self.new("kernel workspaces", *line).free()

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
            if unit.work is not None:
                unit.work.finalize()


class Unit:
    """One `fully_shard` group. `symbol` names its padded parameters in formulas."""

    def __init__(
        self, sharding: Sharding, name: str, symbol: str, parameters: Sequence[Parameter], *, reshards: bool
    ) -> None:
        self.sharding, self.name, self.symbol, self.reshards = sharding, name, symbol, reshards
        self.parameters = parameters
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        self.first_place = sum(len(unit.parameters) for unit in sharding.units)
        sharding.units.append(self)
        self.shard: Storage
        self.sharded_gradients: dict[str, Storage] = {}
        self.gathered: Storage | None = None
        self.unsharded: list[Storage] = []
        self.gradients: dict[str, Gradient] = {}
        self.accumulated: dict[str, Storage] = {}
        self.all_reduce_state: Storage | None = None
        self.work: UnitWork | None = None
        """Where what it has the device do is written down, if its time is wanted."""

    def materialise(self) -> None:
        """Makes the shards of its parameters, one by one."""
        shared = self.sharding
        parts = [4 * parameter.padded(shared.shards) // shared.shards for parameter in self.parameters]
        self.shard = shared.new_resident("parameters", 4, f"{self.symbol}/W", parts=parts)

    def tensors(self) -> dict[str, Tensor]:
        """The unsharded parameters as leaves; their gradients come to this unit."""
        places = enumerate(self.parameters, self.first_place)
        return {p.name: Tensor(self.shard, self._accumulate_grad(p.name, place)) for place, p in places}

    def _accumulate_grad(self, name: str, place: int) -> Node:
        def accumulate(gradient: Gradient) -> list[Gradient | None]:
            self.gradients.setdefault(name, Gradient(gradient.storage))  # one that is there is added to in place
            return []

        return Node(ACCUMULATE_GRAD, (), accumulate, None, weight=place)

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

    def gather(self) -> None:
        """An all-gather outside forward and backward, on the compute stream (`get_all_gather_streams`): that of a
        pipeline's schedule or of the loss in chunks; `wait` has the copies out."""
        self._gather(COMPUTE)

    def wait(self) -> None:
        self._copy_out(forward=False)

    def free(self) -> None:
        self._free_unsharded()

    def zero_gradients(self) -> None:
        self.sharded_gradients.clear()

    def end_backward(self) -> None:
        """The post-backward, as the trainer has set it up."""
        if self.sharding.reduces:
            self.post_backward(frees=self.sharding.frees)
        else:
            self.keep_gradients()

    def keep_gradients(self) -> None:
        """A post-backward that reduces nothing: gradients are added up, in the dtype of the reduction, whole."""
        shared = self.sharding
        if self.work is not None:
            for parameter in self.parameters:
                if parameter.name in self.gradients:
                    self.work.keep_gradient(parameter, adds=parameter.name in self.accumulated)
        self._add_up()
        if shared.frees:
            self._free_unsharded()
        if shared.element != shared.reduce_element:
            for parameter in self.parameters:
                if parameter.name in self.gradients:
                    elements = self.gradients[parameter.name].storage.size.monomial
                    wide = shared.new("accumulated gradients", shared.reduce_element, elements)
                    self.accumulated[parameter.name] = wide
                    del self.gradients[parameter.name], wide

    def _take(self, name: str) -> Gradient:
        return Gradient(self.accumulated.pop(name)) if name in self.accumulated else self.gradients.pop(name)

    def _own_rows(self, parameter: Parameter, gradient: Gradient) -> Gradient:
        """A copy of this tensor-parallel rank's rows out of a gradient that has those of all."""
        size = gradient.storage.size
        if size.bytes <= size.coefficient * parameter.rows * parameter.columns:
            return gradient
        return Gradient(self.sharding.new(gradient.storage.category, size.coefficient, parameter.monomial))

    def _add_up(self) -> None:
        for name in self.accumulated:
            self.gradients.pop(name, None)

    def post_backward(self, *, frees: bool = True) -> None:
        """Frees the parameters, then the last unit's reduce-scatter input, then reduces the gradients that there are
        and adds them to those of earlier micro-batches."""
        self._add_up()
        shared = self.sharding
        present = [p for p in self.parameters if p.name in self.gradients or p.name in self.accumulated]
        symbol = self.symbol if len(present) == len(self.parameters) else f"N_{present[0].name}"
        gradients = [self._own_rows(parameter, self._take(parameter.name)) for parameter in present]
        if self.work is not None:
            adds = any(p.name in self.sharded_gradients for p in present)
            self.work.reduce(present, element=gradients[0].storage.size.coefficient, adds=adds)
        if frees:
            self._free_unsharded()
        shared.reduce_scatter_state = self.all_reduce_state = None
        to_reduce = shared.new("reduce-scatter input", shared.reduce_element, symbol)
        shared.new_copy_plan(to_reduce)
        held = gradients[-1] if shared.shards > 1 else None  # by the loop variable of foreach_reduce
        gradients.clear()
        new = [parameter.name for parameter in present if parameter.name not in self.sharded_gradients]
        stays = bool(new) and shared.host is None
        category = "gradients" if stays and shared.reduce_element == 4 else "reduce-scatter output"
        reduced = shared.new(category, shared.reduce_element, f"{symbol}/W", stream=REDUCE_SCATTER)
        if shared.shards == 1:
            divided = shared.new("reduce-scatter input", shared.reduce_element, symbol, stream=REDUCE_SCATTER)
            del divided
        all_reduced = reduced if shared.replicated else None
        if shared.reduce_element != 4:
            category = "gradients" if stays else "reduce-scatter output"
            stream = ALL_REDUCE if shared.replicated else REDUCE_SCATTER
            reduced = shared.new(category, 4, f"{symbol}/W", stream=stream)
        if shared.host is not None:
            reduced = shared.new_resident("gradients" if new else "gradients to add", 4, f"{symbol}/W")
        self.sharded_gradients.update(dict.fromkeys(new, reduced))
        shared.reduce_scatter_state, self.all_reduce_state = to_reduce, all_reduced
        del held

    def _gather(self, stream: int = ALL_GATHER) -> None:
        shared = self.sharding
        if shared.shards == 1 or self.gathered is not None or self.unsharded:
            return
        if shared.async_unshard:
            stream = COMPUTE
        if self.work is not None:
            self.work.gather()
        copies = self._gather_input(stream)
        self.gathered = shared.new("all-gather output", shared.element, self.symbol, stream=stream)
        del copies

    def _gather_input(self, stream: int) -> list[Storage]:
        """One cast of all; from host memory one parameter after the other (`FSDPParam.all_gather_inputs`)."""
        shared, element = self.sharding, self.sharding.element
        if shared.host is None:
            return [shared.new("all-gather input", element, f"{self.symbol}/W", stream=stream)] if element != 4 else []
        copies: list[Storage] = []
        for parameter in self.parameters:
            elements, monomial = parameter.padded(shared.shards) // shared.shards, f"{parameter.monomial}/W"
            kept = None
            for size in dict.fromkeys((4, element)):
                kept = shared.tape.allocate(
                    "all-gather input", Size(size, monomial, size * elements), stream=of_root(shared.root, stream)
                )
            assert kept is not None
            copies.append(kept)
        return copies

    def _copy_out(self, *, forward: bool) -> None:
        shared = self.sharding
        if self.unsharded:
            return
        if shared.shards == 1:
            self._copy_one_by_one()
            return
        if self.work is not None:
            self.work.copy_out()
        parts = [shared.element * parameter.padded(shared.shards) for parameter in self.parameters]
        self.unsharded = [shared.new("unsharded parameters", shared.element, self.symbol, parts=parts)]
        if forward:
            shared.all_gather_state = None if shared.async_unshard else self.gathered
        self.gathered = None

    def _free_unsharded(self) -> None:
        for storage in self.unsharded:
            storage.free()
        self.unsharded = []

    def _copy_one_by_one(self) -> None:
        """Without an all-gather each parameter is cast and copied; a cast lives until the next one is made
        (_fsdp_param_group.py:wait_for_unshard, `all_gather_input`)."""
        shared = self.sharding
        if self.work is not None:
            self.work.copy_one_by_one()
        cast: Storage | None = None
        for parameter in self.parameters:
            wide = shared.new("all-gather input", 4, parameter.monomial) if shared.host is not None else None
            is_cast = shared.element != 4
            cast = shared.new("all-gather input", shared.element, parameter.monomial) if is_cast else wide
            del wide
            self.unsharded.append(shared.new("unsharded parameters", shared.element, parameter.monomial))
        del cast


def before(graph: Graph, unit: Unit, x: Tensor) -> Tensor:
    """A unit's pre-forward; its post-backward runs once the gradient of `x` is complete."""
    unit.pre_forward()

    def backward(gradient: Gradient) -> list[Gradient]:
        unit.end_backward()
        return [gradient]

    return Tensor(x.storage, graph.record([x], backward))


def after(graph: Graph, unit: Unit, out: Tensor) -> Tensor:
    """A unit's post-forward; its pre-backward runs when the gradient of `out` arrives."""
    unit.post_forward()

    def backward(gradient: Gradient) -> list[Gradient]:
        unit.pre_backward()
        return [gradient]

    return Tensor(out.storage, graph.record([out], backward))
