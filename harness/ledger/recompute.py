"""Activation checkpointing: a region whose operators save nothing, and which is run again for the first that needs it.

torch: torch/utils/checkpoint.py (`_checkpoint_hook`, `_CachingTorchDispatchMode`, `_CachedTorchDispatchMode`); what is
saved beside the input: harness/trainer/activation_checkpoint.py, or torch.compile (`harness.ledger.compiled`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from harness.ledger.autograd import Backward, Gradient, Graph, Tensor

Region = Callable[["Tensor"], "Tensor"]
Result = TypeVar("Result")
Keeps = Callable[[int, bool], bool]
"""Of an operator that may be kept: how many matrix products there were in the region, with it, and whether it is one.
Others are attention and what leaves a tensor-parallel region."""


def keeps_nothing(products: int, is_product: bool) -> bool:
    """Full checkpointing."""
    return False


def keeps_every_other(products: int, is_product: bool) -> bool:
    """Selective checkpointing."""
    return not is_product or products % 2 == 1


def checkpointed(graph: Graph, region: Region, x: Tensor, keeps: Keeps, *, lets_go: bool = False) -> Tensor:
    """`region` of `x`, which is kept until the backward of all that the region would have saved is done, or with
    `lets_go` until the region has been computed again."""
    frame = Frame(graph, region, x, keeps, lets_go=lets_go)
    graph.frame = frame
    out = region(x)
    graph.frame = None
    return out


class Frame:
    """What is known of one region between its forward and its backward.

    The nodes of forward hold the frame; when the first of them is run, the region is computed again and leaves here
    what each needs, in the order of forward.
    """

    def __init__(self, graph: Graph, region: Region, x: Tensor, keeps: Keeps, *, lets_go: bool) -> None:
        self._graph, self._region, self._keeps, self._lets_go = graph, region, keeps, lets_go
        self._x = [x]
        self._saving_nodes = 0
        self._again: list[Backward | None] | None = None
        self._kept: deque[Any] = deque()
        self._products = 0

    def record(self, backward: Backward) -> Backward:
        """Stands for the `backward` of a node that saves something."""
        if self._again is not None:
            self._again.append(backward)
            return backward
        place = self._saving_nodes
        self._saving_nodes += 1

        def compute_again(gradient: Gradient) -> Sequence[Gradient | None]:
            if self._again is None:
                self._compute_again()
            assert self._again is not None
            backward, self._again[place] = self._again[place], None
            assert backward is not None
            arrived = [gradient]
            del gradient  # a name for it here would keep it beyond its last use there
            self._graph.unpacks = True
            results = backward(arrived.pop())
            self._graph.unpacks = False
            return results

        return compute_again

    def _compute_again(self) -> None:
        graph = self._graph
        interrupted = graph.tape.now
        graph.frame, self._again, self._products = self, [], 0
        self._region(self._x.pop() if self._lets_go else self._x[0])
        graph.frame = None
        if interrupted is not None:
            graph.tape.resume(interrupted)

    @property
    def computes_again(self) -> bool:
        return self._again is not None

    def kept(self, compute: Callable[[], Result], *, is_product: bool = False, always: bool = False) -> Result:
        """The result of an operator that is kept, if this one is."""
        if is_product:
            self._products += 1
        if not always and not self._keeps(self._products, is_product):
            return compute()
        if self._again is not None:
            result: Result = self._kept.popleft()
            return result
        result = compute()
        self._kept.append(result)
        return result
