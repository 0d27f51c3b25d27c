"""What really lives on the CPU between operators, and what is really sent: the truth that the ledger is held against.

Independent of the recorder's tracker, so that the two can be compared.
"""

from __future__ import annotations

import weakref
from collections import Counter
from functools import cache
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES = {
    "c10d._allgather_base_": "all_gather",
    "c10d._reduce_scatter_base_": "reduce_scatter",
    "c10d.allreduce_": "all_reduce",
    "c10d.alltoall_base_": "all_to_all",
    "c10d.send": "send",
    "c10d.recv_": "recv",
    "_c10d_functional.all_gather_into_tensor": "all_gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional.all_reduce": "all_reduce",
}


WRAPPERS = ("DTensor", "AsyncCollectiveTensor", "Float8TrainingTensor")
"""Subclasses whose operators run on the plain tensors in them, under the mode again."""


class Live(TorchDispatchMode):
    """Sums the storages that operators returned, once each, while they live; `peak` since `restart`.

    `sent` counts (group size, kind) -> [collectives, bytes of the full side].
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions run compiled; the operators that they call are seen."""
        return True

    def __init__(self, *seeds: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.references: dict[int, Any] = {}
        self.peak = 0
        self.sent: dict[tuple[int, str], Counter[str]] = {}
        for tensor in seeds:
            self._see(tensor)

    def now(self) -> int:
        alive = {key: storage for key, ref in self.references.items() if (storage := ref()) is not None}
        self.references = {key: self.references[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())

    def restart(self) -> None:
        self.peak = self.now()
        self.sent.clear()

    def _see(self, tensor: torch.Tensor) -> bool:
        """Whether its storage was not known."""
        for name in ("_local_tensor", "elem", "_data"):
            tensor = getattr(tensor, name, tensor)
        storage = tensor.untyped_storage()
        known = self.references.get(storage._cdata)
        is_new = storage.device.type == "cpu" and (known is None or known() is None)
        if is_new:
            self.references[storage._cdata] = weakref.ref(storage)
        return is_new

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__name__ in WRAPPERS for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        seen = [self._see(value) for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        if any(seen) or not _views(func):
            self.peak = max(self.peak, self.now())
        name = str(func).rsplit(".", 1)[0]
        if name in COLLECTIVES:
            self._count(COLLECTIVES[name], name, args, result)
        return result

    def _count(self, kind: str, name: str, args: Any, result: Any) -> None:
        tensors = [t for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
        size = max(t.numel() * t.element_size() for t in tensors)
        entry = self.sent.setdefault((_group_size(args), kind), Counter())
        entry["count"] += 1
        entry["bytes"] += size


@cache
def _views(func: Any) -> bool:
    """Whether an operator only looks at memory that is there in another way: half of all do, and none raises a peak,
    but for those that hand over what no operator made (`lift_fresh`). Higher-order operators have no schema."""
    returns = func._schema.returns if hasattr(func, "_schema") else ()
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _group_size(args: Any) -> int:
    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    for arg in args:
        if isinstance(arg, str) and arg not in ("sum", "avg", "max"):
            return int(resolve(arg).size())
        if isinstance(arg, torch.ScriptObject):
            return int(distributed_c10d.ProcessGroup.unbox(arg).size())
    raise AssertionError(f"no process group in {args}")
