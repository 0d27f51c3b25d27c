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
    """`name` as people know the unit; `elements` are those of its padded parameters, gathered."""

    def __init__(self, shared: ShardingWork, name: str, parameters: Sequence[Parameter]) -> None:
        self._shared, self._name, self._parameters = shared, name, parameters
        self._elements = sum(parameter.padded(shared.shards) for parameter in parameters)
        self._gathered: int | None = None
        self._done: int | None = None

    def gather(self) -> None:
        shared, program = self._shared, self._shared.program
        host_ns = self._host_ns()
        copies, gathers = (COMPUTE, EXCHANGE) if shared.asynchronous else (COPY_IN, ALL_GATHER)
        local = self._elements // shared.shards
        if shared.element != 4:
            size = (4 + 3 * shared.element) * local
            program.moves("all_gather_copy_in", "copies of FSDP2", size, stream=copies, host_ns=host_ns)
        program.wait_stream(gathers, copies)
        program.collective(
            "all_gather",
            program.fsdp_axis,
            f"parameters of {self._name}",
            shared.element * self._elements,
            stream=gathers,
            host_ns=host_ns,
        )
        self._gathered = program.record(gathers)

    def copy_out(self) -> None:
        shared, program = self._shared, self._shared.program
        host_ns = self._host_ns()
        program.wait(self._gathered)
        size = 2 * shared.element * self._elements
        program.moves("all_gather_copy_out", "copies of FSDP2", size, host_ns=host_ns)
        program.busy(host_ns)

    def copy_one_by_one(self) -> None:
        """Without an all-gather: each parameter cast, then copied."""
        shared, program = self._shared, self._shared.program
        host_ns = self._host_ns()
        program.busy(2 * host_ns)
        each = host_ns // (2 * len(self._parameters))
        for parameter in self._parameters:
            elements = parameter.rows * parameter.columns
            if shared.element != 4:
                program.moves("narrow", "copies of FSDP2", (4 + shared.element) * elements, host_ns=each)
            program.moves("elementwise", "copies of FSDP2", 2 * shared.element * elements, host_ns=each)
        program.busy(host_ns)

    def keep_gradient(self, parameter: Parameter, *, adds: bool) -> None:
        """In the dtype of the reduction: made of the one that came, or that added to it."""
        shared, program = self._shared, self._shared.program
        elements = parameter.rows * parameter.columns
        if adds:
            size = (2 * shared.reduce_element + shared.element) * elements
            program.moves("elementwise", "sums of gradients", size)
        elif shared.element != shared.reduce_element:
            program.moves("widen", "sums of gradients", (shared.element + shared.reduce_element) * elements)

    def reduce(self, present: Sequence[Parameter], *, adds: bool) -> None:
        """`adds`: to what an earlier micro-batch left."""
        shared, program = self._shared, self._shared.program
        if program.sequence_parallel:
            for parameter in present:
                if parameter.monomial == "d":
                    size = shared.element * parameter.rows
                    program.collective("all_reduce", "tp", "gradients of norms", size)
        host_ns = self._host_ns(backward=True)
        program.wait(shared.reduced)
        program.wait(self._done)
        elements = sum(parameter.padded(shared.shards) for parameter in present)
        size = (shared.element + shared.reduce_element) * elements
        program.moves("reduce_scatter_copy_in", "copies of FSDP2", size, host_ns=host_ns)
        program.wait_stream(REDUCE_SCATTER, COMPUTE)
        what = f"gradients of {self._name}"
        last = REDUCE_SCATTER
        if shared.shards == 1:
            for _ in range(2):  # divided, then copied
                program.moves(
                    "elementwise", "copies of FSDP2", 2 * shared.reduce_element * elements, stream=last, host_ns=host_ns
                )
        else:
            program.collective(
                "reduce_scatter",
                program.fsdp_axis,
                what,
                shared.reduce_element * elements,
                stream=last,
                host_ns=host_ns,
            )
        shared.reduced = program.record(last)
        local = elements // shared.shards
        if program.sizes["dp_replicate"] > 1:
            program.wait_stream(ALL_REDUCE, last)
            last = ALL_REDUCE
            program.collective("all_reduce", "dp_replicate", what, shared.reduce_element * local, stream=last)
        if shared.reduce_element != 4:
            program.moves("widen", "sums of gradients", (4 + shared.reduce_element) * local, stream=last)
        if adds:
            program.moves("elementwise", "sums of gradients", 12 * local, stream=last)
        self._done = program.record(last)

    def finalize(self) -> None:
        self._shared.program.wait(self._done)

    def _host_ns(self, *, backward: bool = False) -> int:
        """What the host needs before each thing that it issues for a unit."""
        program, several = self._shared.program, self._shared.shards > 1
        if backward or program.graph.runs_backward:
            return program.host_ns("fsdp_backward_unit" if several else "cast_backward_unit", BACKWARD_PARTS)
        return program.host_ns("fsdp_forward_unit" if several else "cast_forward_unit", FORWARD_PARTS)
