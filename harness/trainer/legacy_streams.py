"""How collectives keep their tensors alive: by references, as torch does since 2.8, or by `record_stream` as before.

A collective reads and writes its tensors on a stream of its own, so their memory must not be given away before it is
done. Up to torch 2.7 ProcessGroupNCCL told the allocator (`record_stream`): memory that is freed then waits, counted as
active but not as allocated, until the allocator sees that the other stream got there, which a host that runs ahead of
the device notices late; freed blocks stack up. Since 2.8 (pytorch#150398) the work holds references until `wait()`, and
the memory goes back to the stream that it came from. `RecordStreams` brings the old behaviour back for any torch.

Every collective, functional or not, from Python, C++ or the autograd engine, ends in an operator of the namespace
`c10d` (torch/csrc/distributed/c10d/Ops.cpp). Their kernels for the dispatch key BackendSelect are free, lie directly
above those of the backends, and cost nothing outside collectives; a dispatch mode would slow every operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from harness.config import CollectiveMemory

# Of Ops.cpp; not among them are barriers, which have no tensors, and point-to-point, which still records streams.
COLLECTIVES = (
    "allreduce_",
    "allreduce_coalesced_",
    "allgather_",
    "_allgather_base_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "broadcast_",
    "reduce_",
    "gather_",
    "scatter_",
)
SPARED_IF_SYNCHRONOUS = frozenset({"_allgather_base_", "_reduce_scatter_base_"})
"""What torch 2.2 to 2.7 recorded for asynchronous calls only, for FSDP's sake (pytorch#111431)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Issued:
    """A collective that was just issued: inputs and outputs, and the work to wait for; NCCL gives None for a
    synchronous one, which runs on the current stream."""

    operator: str
    group: dist.ProcessGroup
    tensors: Sequence[torch.Tensor]
    work: dist.Work | None


class RecordStreams:
    """Keeps the tensors of each collective alive as ProcessGroupNCCL did up to torch 2.7.

    Then, the stream of the communicator was recorded on inputs and outputs when the collective was issued
    (ProcessGroupNCCL.cpp:collective). It cannot be reached from here, so a side stream of each group stands for it: it
    waits for the collective, which also ends the references that today's torch holds
    (WorkNCCL::synchronizeStream), and is recorded instead. Whoever uses the result still waits for the work itself.
    """

    def __init__(self) -> None:
        self._sides: dict[tuple[str, torch.device], torch.cuda.Stream] = {}

    def __call__(self, issued: Issued) -> None:
        on_device = [tensor for tensor in issued.tensors if tensor.is_cuda]
        if not on_device:
            return
        device = on_device[0].device
        side = self._side(issued.group.group_name, device)
        if issued.work is None:
            side.wait_stream(torch.cuda.current_stream(device))
        else:
            with torch.cuda.stream(side):
                issued.work.wait()
        for tensor in on_device:
            tensor.record_stream(side)

    def _side(self, group: str, device: torch.device) -> torch.cuda.Stream:
        if (group, device) not in self._sides:
            self._sides[group, device] = torch.cuda.Stream(device)
        return self._sides[group, device]


def collective_memory(policy: CollectiveMemory) -> AbstractContextManager[None]:
    """What `Training.Config.collective_memory` says, for all collectives of this process inside the `with`."""
    if policy == "references":
        return nullcontext()
    return after_collectives(RecordStreams(), spare_synchronous=policy == "record_stream_async")


@contextmanager
def after_collectives(act: Callable[[Issued], None], *, spare_synchronous: bool = False) -> Iterator[None]:
    """Calls `act` for each collective once it is issued and before anyone can free its tensors.

    `spare_synchronous` leaves out synchronous calls of `SPARED_IF_SYNCHRONOUS`.
    """
    with torch.library._scoped_library("c10d", "IMPL") as library:
        for name in COLLECTIVES:
            operator = getattr(torch.ops.c10d, name).default
            spared = spare_synchronous and name in SPARED_IF_SYNCHRONOUS
            kernel = partial(_issue, operator, [a.name for a in operator._schema.arguments], act, spared)
            library.impl(name, kernel, "BackendSelect", with_keyset=True)
        yield


def _issue(
    operator: torch._ops.OpOverload,
    parameters: Sequence[str],
    act: Callable[[Issued], None],
    spared: bool,
    keys: torch._C.DispatchKeySet,
    *args: Any,
    **kwargs: Any,
) -> Any:
    result = operator.redispatch(keys.remove(torch._C.DispatchKey.BackendSelect), *args, **kwargs)
    arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
    synchronous = not arguments.get("async_op", arguments.get("asyncOp", True))  # the older spelling is torch 2.11's
    if not (synchronous and spared):
        act(
            Issued(
                operator=operator._schema.name.removeprefix("c10d::"),
                group=dist.ProcessGroup.unbox(arguments["process_group"]),
                tensors=list(_tensors(arguments.values())),
                work=dist.Work.unbox(result[-1] if isinstance(result, tuple) else result),
            )
        )
    return result


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
