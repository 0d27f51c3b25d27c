"""Tensor subclasses that hold other tensors (DTensor, AsyncCollectiveTensor): what a dispatch mode must let unfold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def is_wrapper(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")


def any_wrapper(kinds: Iterable[type]) -> bool:
    """Whether a mode has to return NotImplemented for these argument types: the wrapper then runs its operators on
    plain tensors, under the mode again (as torch/distributed/tensor/debug/_comm_mode.py does for DTensor)."""
    return any(is_wrapper(kind) for kind in kinds)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold memory: those inside a wrapper, else the tensor itself."""
    if not is_wrapper(type(tensor)):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for inner in (getattr(tensor, name) for name in names):
        if isinstance(inner, torch.Tensor):  # a DTensor lists its mesh, too
            yield from plain_tensors(inner)
