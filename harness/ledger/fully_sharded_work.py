"""What one of FSDP2's units has the device do, on which stream and after what.

torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py, torch 2.11:

- `unshard`: the shards are cast and copied into the all-gather's input on a stream of their own, gathered on another;
  asynchronously both are given to the compute stream, and NCCL's own stream gathers.
- `wait_for_unshard`: the compute stream waits for that and copies the parameters out.
- `post_backward`: the compute stream waits for the last unit's reduce-scatter, copies the gradients into the input of
  this one's, which has its own stream; an all-reduce over replicas follows on another.
- `finalize_backward`: the compute stream waits for the last reduction of every unit.

All-gathers and reduce-scatters of one process group are one communicator's, and so one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.ledger.layout import Parameter
from harness.ledger.simulate import ALL_GATHER, ALL_REDUCE, COMPUTE, COPY_IN, EXCHANGE, REDUCE_SCATTER

if TYPE_CHECKING:
    from harness.ledger.hardware_points import CollectiveKind, KernelKind
    from harness.ledger.program import Program

FORWARD_PARTS = 4
"""Copy-in, all-gather, copy-out, and what follows."""
BACKWARD_PARTS = 6
"""Those, and before them the reduce-scatter's copy-in and itself."""


class ShardingWork:
    """What the units of a rank share."""

    def __init__(self, program: Program, *, shards: int, element: int, reduce_element: int, asynchronous: bool) -> None:
        self.program, self.shards, self.asynchronous = program, shards, asynchronous
        self.element, self.reduce_element = element, reduce_element
        self.reduced: int | None = None
        """The event after the last reduce-scatter."""


class UnitWork:
    """One unit; its lines are those of all layers where it is one."""

    def __init__(self, shared: ShardingWork, name: str, parameters: Sequence[Parameter]) -> None:
        self._shared, self._parameters = shared, parameters
        self._part = "layers" if name.startswith("layers.") else name
        self._elements = sum(parameter.padded(shared.shards) for parameter in parameters)
        self._gathered: int | None = None
        self._done: int | None = None

    def gather(self) -> None:
        shared, program = self._shared, self._shared.program
        host_ns = self._host_ns()
        copies, gathers = (COMPUTE, EXCHANGE) if shared.asynchronous else (COPY_IN, ALL_GATHER)
        if shared.element != 4:
            local = self._elements // shared.shards
            self._copies("all_gather_copy_in", (4 + 3 * shared.element) * local, host_ns, stream=copies)
        program.wait_stream(gathers, copies)
        size = shared.element * self._elements
        self._sends("all_gather", program.fsdp_axis, "parameters", size, gathers, host_ns)
        self._gathered = program.record(gathers)

    def copy_out(self) -> None:
        host_ns = self._host_ns()
        self._shared.program.wait(self._gathered)
        self._copies("all_gather_copy_out", 2 * self._shared.element * self._elements, host_ns)
        self._shared.program.busy(host_ns)

    def copy_one_by_one(self) -> None:
        """Without an all-gather: each parameter cast, then copied."""
        element, program, host_ns = self._shared.element, self._shared.program, self._host_ns()
        program.busy(2 * host_ns)
        each = host_ns // (2 * len(self._parameters))
        for parameter in self._parameters:
            elements = parameter.rows * parameter.columns
            if element != 4:
                self._copies("narrow", (4 + element) * elements, each)
            self._copies("elementwise", 2 * element * elements, each, is_copy=True)
        program.busy(host_ns)

    def keep_gradient(self, parameter: Parameter, *, adds: bool) -> None:
        """In the dtype of the reduction: made of the one that came, or that added to it."""
        element, wide = self._shared.element, self._shared.reduce_element
        elements = parameter.rows * parameter.columns
        if adds:
            self._sums("elementwise", (2 * wide + element) * elements)
        elif element != wide:
            self._sums("widen", (element + wide) * elements)

    def reduce(self, present: Sequence[Parameter], *, element: int, adds: bool) -> None:
        """`element`: bytes of the gradients'; `adds`: to what an earlier micro-batch left."""
        shared, program, wide = self._shared, self._shared.program, self._shared.reduce_element
        host_ns = self._host_ns(backward=True)
        if program.sequence_parallel:
            for norm in (parameter for parameter in present if parameter.monomial == "d"):
                self._sends("all_reduce", "tp", "gradients of norms", element * norm.rows)
        program.wait(shared.reduced)
        program.wait(self._done)
        elements = sum(parameter.padded(shared.shards) for parameter in present)
        local = elements // shared.shards
        self._copies("reduce_scatter_copy_in", (element + wide) * elements, host_ns)
        program.wait_stream(REDUCE_SCATTER, COMPUTE)
        last = REDUCE_SCATTER
        if shared.shards == 1:
            for is_copy in (False, True):  # divided, then copied
                self._copies("elementwise", 2 * wide * elements, host_ns, stream=last, is_copy=is_copy)
        self._sends("reduce_scatter", program.fsdp_axis, "gradients", wide * elements, last, host_ns)
        shared.reduced = program.record(last)
        if program.sizes["dp_replicate"] > 1:
            program.wait_stream(ALL_REDUCE, last)
            last = ALL_REDUCE
            self._sends("all_reduce", "dp_replicate", "gradients", wide * local, last)
        if wide != 4:
            self._sums("widen", (4 + wide) * local, last)
        if adds:
            self._sums("elementwise", 12 * local, last)
        self._done = program.record(last)

    def finalize(self) -> None:
        self._shared.program.wait(self._done)

    def _copies(
        self, kind: KernelKind, size: int, host_ns: int, *, stream: str = COMPUTE, is_copy: bool = False
    ) -> None:
        self._shared.program.moves(
            kind, "copies of FSDP2", size, stream=stream, host_ns=host_ns, part=self._part, is_copy=is_copy
        )

    def _sums(self, kind: KernelKind, size: int, stream: str = COMPUTE) -> None:
        self._shared.program.moves(kind, "sums of gradients", size, stream=stream, part=self._part)

    def _sends(
        self, kind: CollectiveKind, axis: str, what: str, size: int, stream: str = COMPUTE, host_ns: int | None = None
    ) -> None:
        self._shared.program.collective(kind, axis, what, size, stream=stream, host_ns=host_ns, part=self._part)

    def _host_ns(self, *, backward: bool = False) -> int:
        """What the host needs before each thing that it issues for a unit."""
        program, several = self._shared.program, self._shared.shards > 1
        if backward or program.graph.runs_backward:
            return program.host_ns("fsdp_backward_unit" if several else "cast_backward_unit", BACKWARD_PARTS)
        return program.host_ns("fsdp_forward_unit" if several else "cast_forward_unit", FORWARD_PARTS)
