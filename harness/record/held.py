"""What holds the storages of a model and its optimizer: labels by address, for memory older than any window."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from harness.errors import UsageError
from harness.record.wrappers import plain_tensors

T = TypeVar("T")


class Held(NamedTuple):
    """A storage with what it is: parameter, optimizer_state, gradient or buffer, and its name."""

    storage: torch.UntypedStorage
    category: str
    name: str


class Watched:
    """Models and optimizers, which stay free to go: only weak references are kept.

    Parameters are those of the moment of `add`: while FSDP2 has a module's parameters gathered it puts others in
    their place (torch/distributed/fsdp/_fully_shard/_fsdp_param.py:to_unsharded). States, gradients and buffers are
    those of the moment of asking.
    """

    def __init__(self) -> None:
        self._names: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
        self._models: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []

    def add(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
        """Raises UsageError for anything that is neither a module nor an optimizer."""
        for name, value, kind in (("model", model, nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
            if value is not None and not isinstance(value, kind):
                wanted, got = f"torch.{kind.__module__.split('.')[1]}.{kind.__name__}", type(value).__name__
                raise UsageError(f"recorder.watch({name}=…) takes a {wanted}, got a {got}")
        if model is not None:
            self._models.append(weakref.ref(model))
            for name, parameter in model.named_parameters():
                self._names.setdefault(parameter, name)
        if optimizer is not None:
            self._optimizers.append(weakref.ref(optimizer))
            for position, group in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(group["params"]):
                    self._names.setdefault(parameter, f"param_groups.{position}.{index}")

    def held(self) -> Iterator[Held]:
        """Every storage with memory, once, whatever views it; where it has several holders, the first of:
        parameter, optimizer_state, gradient, buffer."""
        seen: set[int] = set()
        for category, name, tensor in self._tensors():
            for plain in plain_tensors(tensor):
                if plain.layout is not torch.strided:
                    continue
                storage = plain.untyped_storage()
                if storage.device.type in ("cpu", "cuda") and storage.nbytes() and storage._cdata not in seen:
                    seen.add(storage._cdata)
                    yield Held(storage, category, name)

    def labels(self, device_type: str) -> list[dict[str, Any]]:
        """[{device (index), address, size (bytes), category, name}] of the storages on devices of a type, in plain
        values for a pickle."""
        return [
            {
                "device": held.storage.device.index or 0,
                "address": held.storage.data_ptr(),
                "size": held.storage.nbytes(),
                "category": held.category,
                "name": held.name,
            }
            for held in self.held()
            if held.storage.device.type == device_type
        ]

    def _tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        parameters = [(name, parameter) for parameter, name in self._names.items() if not is_lazy(parameter)]
        for name, parameter in parameters:
            yield "parameter", name, parameter
        for optimizer in _alive(self._optimizers):
            for parameter, state in optimizer.state.items():
                name = self._names.get(parameter, "?")
                for key, value in state.items() if isinstance(state, dict) else [("state", state)]:
                    for tensor in tree_iter(value):
                        if isinstance(tensor, torch.Tensor):
                            yield "optimizer_state", f"{name}.{key}", tensor
        for name, parameter in parameters:
            if parameter.grad is not None:
                yield "gradient", name, parameter.grad
        for model in _alive(self._models):
            for name, buffer in model.named_buffers():
                yield "buffer", name, buffer


def _alive(references: Iterable[weakref.ref[T]]) -> Iterator[T]:
    return (value for reference in references if (value := reference()) is not None)
