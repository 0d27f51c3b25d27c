"""Live tensor storages on CPU, where no allocator keeps statistics: bytes now, at the peak, and of which category."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from harness.record.held import Watched
from harness.record.memory import Reading
from harness.record.wrappers import any_wrapper, plain_tensors

OTHER = "other"


@dataclass(slots=True)
class _Live:
    size_bytes: int
    category: str
    reference: weakref.ref[torch.UntypedStorage]


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of every live storage on CPU, each once however many tensors view it.

    Storages enter when an operator returns or takes them, or are there when the tracker starts; they leave when
    they are freed, whoever held them (saved tensors of autograd included), since weak references tell. Memory that
    an operator allocates and frees inside is not seen, so peaks are those between operators. Of a compiled region the
    operators that it calls are seen: with inductor not what its own kernels allocate for each other.

    Only what runs between `enter` and `exit` of the mode is seen at once; what is allocated outside is found by the
    next `adopt_existing`. `category` labels what is allocated from now on.
    """

    supports_higher_order_operators = True
    name = "tensor_storages"

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Otherwise torch.compile would leave everything eager while the mode is on."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.category = OTHER
        self._live: dict[int, _Live] = {}
        self._bytes: Counter[str] = Counter()
        self._total = 0
        self._peak = 0
        self._step_peak = 0
        self._composition: dict[str, int] = {}

    def __enter__(self) -> StorageTracker:
        # FSDP2 frees and refills its gathered parameters through this method, which no operator shows.
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._make_resize()  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _make_resize(self) -> Any:
        original = self._resize

        def resize_(storage: torch.UntypedStorage, *size: Any, **named: Any) -> Any:
            result = original(storage, *size, **named)
            self._see_storage(storage, self.category)
            return result

        return resize_

    def close(self) -> None:
        """Forgets every storage; their ends are no longer followed."""
        self._live.clear()

    def adopt_existing(self, watched: Watched | None = None) -> None:
        """Takes in every storage that Python can reach, by what holds it.

        Parameters and their gradients, optimizer states, the rest as `other`; what is `watched` as it says there.
        A holder outweighs the label of the phase in which a storage was first seen. Saved tensors whose Python
        object is gone are met when an operator takes them.
        """
        objects = gc.get_objects()
        # By type and not isinstance, which would run the code of any object that fakes its class.
        tensors = [o for o in objects if issubclass(type(o), torch.Tensor) and not is_lazy(o)]
        parameters = [t for t in tensors if isinstance(t, torch.nn.Parameter)]
        optimizers = [o for o in objects if issubclass(type(o), torch.optim.Optimizer)]
        del objects
        states = [s for o in optimizers for s in tree_iter(list(o.state.values())) if isinstance(s, torch.Tensor)]
        gradients = [p.grad for p in parameters if p.grad is not None]
        for tensor in tensors:
            self._see(tensor, OTHER)
        # The last one wins where storages are shared.
        held = (("gradient", gradients), ("optimizer_state", states), ("parameter", parameters))
        for category, holders in held:
            for holder in holders:
                self._see(holder, category, reclassify=True)
        for item in watched.held() if watched is not None else ():
            self._see_storage(item.storage, item.category, reclassify=True)

    def reset(self) -> None:
        self._peak = self._total

    def start_step(self) -> None:
        """Peaks and composition count from here."""
        self._peak = self._step_peak = self._total
        self._composition = dict(self._bytes)

    def read(self) -> Reading:
        """Bytes live now, and the peak since the last call or `reset`; allocated and active are the same thing here."""
        peak, self._peak = self._peak, self._total
        return Reading((self._total, self._total, None, None), (peak, peak, None, None))

    def peak_composition(self) -> list[dict[str, Any]]:
        """[{category, bytes}] at the step's peak, largest first; they add up to the peak."""
        items = sorted(self._composition.items(), key=lambda item: (-item[1], item[0]))
        return [{"category": category, "bytes": size} for category, size in items if size]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any_wrapper(types) and not isinstance(func, torch._ops.HigherOrderOperator):
            return NotImplemented
        result = func(*args, **kwargs)
        for value in tree_iter((args, kwargs, result)):
            if isinstance(value, torch.Tensor):
                self._see(value, self.category)
        return result

    def _see(self, tensor: torch.Tensor, category: str, *, reclassify: bool = False) -> None:
        for plain in plain_tensors(tensor):
            if plain.layout is torch.strided and plain.device.type == "cpu":
                self._see_storage(plain.untyped_storage(), category, reclassify=reclassify)

    def _see_storage(self, storage: torch.UntypedStorage, category: str, *, reclassify: bool = False) -> None:
        if storage.device.type != "cpu":  # a fake tensor claims a device that its storage lacks
            return
        key, size = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is None:
            self._live[key] = _Live(size, category, weakref.ref(storage, partial(self._freed, key)))
            self._change(category, size)
            return
        if known.size_bytes != size:
            change, known.size_bytes = size - known.size_bytes, size
            self._change(known.category, change)
        if reclassify and known.category != category:
            self._bytes[known.category] -= size
            self._bytes[category] += size
            known.category = category

    def _freed(self, key: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        known = self._live.pop(key)
        self._change(known.category, -known.size_bytes)

    def _change(self, category: str, size: int) -> None:
        self._bytes[category] += size
        self._total += size
        self._peak = max(self._peak, self._total)
        if self._total > self._step_peak:
            self._step_peak = self._total
            self._composition = dict(self._bytes)
