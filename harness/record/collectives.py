"""Ranges around collectives on CPU, where no kernel carries their kind, group and bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from harness.record.wrappers import any_wrapper

Arguments = Mapping[str, Any]
BytesOf = Callable[[Arguments], int]


def nbytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(nbytes(item) for item in value)


def bytes_of(name: str) -> BytesOf:
    return lambda arguments: nbytes(arguments[name])


def bytes_times_group(name: str) -> BytesOf:
    """Where only one rank's part is at hand: its bytes times the size of the group."""
    return lambda arguments: nbytes(arguments[name]) * group_of(arguments).size()


def no_bytes(arguments: Arguments) -> int:
    return 0


# Operator -> kind, and the bytes of the full (unsharded) side: the output of an all-gather, the input of a
# reduce-scatter, the tensor of an all-reduce. Signatures: torch/csrc/distributed/c10d/Ops.cpp and Functional.cpp.
OPERATORS: dict[str, tuple[str, BytesOf]] = {
    "c10d::allgather_": ("all_gather", bytes_of("output_tensors")),
    "c10d::_allgather_base_": ("all_gather", bytes_of("output_tensor")),
    "c10d::allgather_coalesced_": ("all_gather", bytes_of("output_lists")),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", bytes_of("outputs")),
    "c10d::reduce_scatter_": ("reduce_scatter", bytes_of("input_tensors")),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", bytes_of("input_tensor")),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", bytes_of("inputs")),
    "c10d::allreduce_": ("all_reduce", bytes_of("tensors")),
    "c10d::allreduce_coalesced_": ("all_reduce", bytes_of("tensors")),
    "c10d::alltoall_": ("all_to_all", bytes_of("input_tensors")),
    "c10d::alltoall_base_": ("all_to_all", bytes_of("input")),
    "c10d::send": ("send", bytes_of("tensors")),
    "c10d::recv_": ("recv", bytes_of("tensors")),
    "c10d::recv_any_source_": ("recv", bytes_of("tensors")),
    "c10d::broadcast_": ("broadcast", bytes_of("tensors")),
    "c10d::reduce_": ("reduce", bytes_of("tensors")),
    "c10d::gather_": ("other", bytes_times_group("input_tensors")),
    "c10d::scatter_": ("other", bytes_times_group("output_tensors")),
    "c10d::barrier": ("barrier", no_bytes),
    "c10d::monitored_barrier_": ("barrier", no_bytes),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", bytes_times_group("input")),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", bytes_times_group("input")),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", bytes_times_group("inputs")),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", bytes_of("input")),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", bytes_of("input")),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", bytes_of("inputs")),
    "_c10d_functional::all_reduce": ("all_reduce", bytes_of("input")),
    "_c10d_functional::all_reduce_": ("all_reduce", bytes_of("input")),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", bytes_of("inputs")),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", bytes_of("inputs")),
    "_c10d_functional::all_to_all_single": ("all_to_all", bytes_of("input")),
    "_c10d_functional::broadcast": ("broadcast", bytes_of("input")),
    "_c10d_functional::broadcast_": ("broadcast", bytes_of("input")),
    "_c10d_functional::isend": ("send", bytes_of("tensor")),
    "_c10d_functional::irecv": ("recv", bytes_of("tensor")),
    "_c10d_functional::batch_p2p_ops": ("send_recv", bytes_of("tensors")),
}
WAIT = "_c10d_functional::wait_tensor"


def group_of(arguments: Arguments) -> dist.ProcessGroup:
    """The process group of a call: an object, that object boxed for the dispatcher, or its name."""
    group = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, str):
        c10d: Any = dist.distributed_c10d
        group = c10d._resolve_process_group(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def group_label(group: dist.ProcessGroup) -> str:
    """The description of a group (`mesh_tp`, `default_pg`), else its name; free of the separator."""
    described = group.group_desc not in ("", "undefined")
    return re.sub(r"[:\s]", "_", group.group_desc if described else group.group_name)


@cache
def _parameter_names(func: torch._ops.OpOverload) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


class CommRanges(TorchDispatchMode):
    """Opens `comm:<kind>:<group>:<seq>:<bytes>` around each outermost c10d operator.

    `seq` counts the calls of a group from 0 at the start of the trace window, so that ranks can be matched.
    Outermost, because a mode is off inside its own handler: what a functional collective calls in turn is not seen.
    The range of an asynchronous call ends when the call returns; waiting for a functional collective has a range of
    its own, `comm:wait:<group or ->:<seq>`.

    Not for CUDA: NCCL kernels carry kind, group and bytes themselves, and a mode slows the host.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Otherwise torch.compile would leave everything eager while the mode is on."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: Counter[str] = Counter()
        self._issued: dict[int, tuple[str, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*args, **kwargs)
        if any_wrapper(types):
            return NotImplemented
        name = func._schema.name
        if name == WAIT:
            group, seq = self._issued.pop(_storage_id(args[0]), ("-", 0))
            with record_function(f"comm:wait:{group}:{seq}"):
                return func(*args, **kwargs)
        if name not in OPERATORS:
            return func(*args, **kwargs)

        kind, full_bytes = OPERATORS[name]
        arguments = {**dict(zip(_parameter_names(func), args, strict=False)), **kwargs}
        group = group_label(group_of(arguments))
        seq = self._calls[group]
        self._calls[group] += 1
        with record_function(f"comm:{kind}:{group}:{seq}:{full_bytes(arguments)}"):
            result = func(*args, **kwargs)
        if name.startswith("_c10d_functional::"):
            for tensor in [result] if isinstance(result, torch.Tensor) else result:
                self._issued[_storage_id(tensor)] = (group, seq)
        return result


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
