"""As much of autograd as decides lifetimes: what a node keeps, the order of backward, how gradients are summed.

torch: torch/csrc/autograd/engine.cpp (latest node first), input_buffer.cpp (`can_accumulate_inplace`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.ledger.recompute import Frame
from harness.ledger.sizes import Size
from harness.ledger.tape import Storage, Tape

ACCUMULATE_GRAD = 1 << 62
"""Order of the nodes that store gradients: they run as soon as they are ready."""


@dataclass(slots=True)
class Gradient:
    """A view keeps its base alive, which is why torch never adds in place into one, nor does it into a DTensor
    (`isTensorSubclassLike`), whose sums are DTensors. `whole` is what the gradient was cut from, and lives until it is
    stored or summed."""

    storage: Storage
    is_view: bool = False
    is_dtensor: bool = False
    whole: Storage | None = None


Backward = Callable[[Gradient], Sequence[Gradient | None]]
Wanted = Literal["both", "inputs", "weights"]


class Node:
    """One operation of backward. `backward` takes the gradient of the output and returns one per entry of `inputs`;
    what the operation saved lives in that closure and goes with it.

    Where only inputs are wanted (`Graph.wanted`), it returns in the place of a weight's gradient what that will be
    computed from, and is called again with it, for the weight alone. `weight`: it stores the gradient of the parameter
    at this place.
    """

    __slots__ = ("backward", "inputs", "instant", "order", "weight")

    def __init__(
        self,
        order: int,
        inputs: Sequence[Node | None],
        backward: Backward,
        instant: str | None,
        *,
        weight: int | None = None,
    ) -> None:
        self.order, self.inputs, self.instant, self.weight = order, tuple(inputs), instant, weight
        self.backward: Backward | None = backward

    def __lt__(self, other: Node) -> bool:
        """Of two nodes that are ready, the one recorded later runs first."""
        return self.order > other.order


Kept = tuple[Node, Gradient]


@dataclass(slots=True)
class Tensor:
    storage: Storage
    node: Node | None = None


class Graph:
    """Records nodes and runs them backwards.

    `sums_in_place`: false where gradients are summed out of place always, as under a TorchDispatchMode, which is
    how storages are tracked on the CPU.
    """

    def __init__(self, tape: Tape, *, sums_in_place: bool) -> None:
        self.tape = tape
        self.sums_in_place = sums_in_place
        self.recorded = 0
        self.instant: str | None = None
        self.wanted: Wanted = "both"
        self.frame: Frame | None = None
        """Of the checkpointed region that is being computed."""
        self.runs_backward = self.unpacks = False
        """`unpacks`: what a checkpointed region saved for the operation that runs."""
        self.on_sum: Callable[[Size], None] | None = None
        """Told the size of gradients that are added up."""

    @property
    def computes_again(self) -> bool:
        """This is backward, which computes a checkpointed region again."""
        return self.frame is not None and self.frame.computes_again

    def release(self, saved: list[Storage]) -> None:
        """An operation lets go of what it saved as soon as it has it at hand, unless it will run again."""
        if self.wanted != "inputs":
            saved.clear()

    def record(self, inputs: Sequence[Tensor], backward: Backward, *, saves: bool = True) -> Node:
        """`saves`: backward needs something of forward, which a checkpointed region does not keep."""
        self.recorded += 1
        if saves and self.frame is not None:
            backward = self.frame.record(backward)
        return Node(self.recorded, [x.node for x in inputs], backward, self.instant)

    def backward(self, root: Node, gradient: Gradient, wanted: Wanted = "both") -> list[Kept]:
        """Runs every node below `root` once all gradients of its output have arrived.

        With `inputs` wanted nothing that was saved goes, no weight gets a gradient, and what `backward_weights` needs
        for them is returned, in the order of backward (torch/distributed/pipelining/_backward.py).
        """
        self.wanted, self.runs_backward = wanted, True
        kept: list[Kept] = []
        missing = self._consumers(root)
        arrived: dict[Node, Gradient] = {root: gradient}
        del gradient
        ready = [root]
        instant = None
        while ready:
            node = heapq.heappop(ready)
            if node.instant not in (instant, None):
                instant = node.instant
                self.tape.instant(f"backward: {instant}")
            assert node.backward is not None
            results = list(node.backward(arrived.pop(node)))
            if wanted == "both":
                node.backward = None
            for below in reversed(node.inputs):
                result = results.pop()
                if below is None:
                    continue
                if wanted == "inputs" and below.weight is not None:
                    assert result is not None
                    kept.append((node, result))
                    continue
                if result is not None:
                    arrived[below] = self._sum(arrived.pop(below), result, kept) if below in arrived else result
                del result
                missing[below] -= 1
                if missing[below] == 0 and below in arrived:
                    heapq.heappush(ready, below)
        self.runs_backward = False
        return kept

    def backward_weights(self, kept: list[Kept]) -> None:
        """Gives weights their gradients, in the order of the parameters; nodes without weights keep what they saved
        until the last is done. On GPUs each is made from a copy of the gradient that was kept: torch 2.11, with which
        these were measured, takes the `sum` of one (stage_backward_weight), 2.13 that one itself."""
        self.wanted, self.runs_backward = "weights", True
        kept.sort(key=lambda one: _weight(one[0]), reverse=True)
        while kept:
            node, gradient = kept.pop()
            if self.sums_in_place:
                copied = Gradient(self.tape.allocate(gradient.storage.category, gradient.storage.size))
            assert node.backward is not None
            results = list(node.backward(copied if self.sums_in_place else gradient))
            node.backward = None
            del gradient
            for below, result in zip(node.inputs, results, strict=True):
                if below is not None and below.weight is not None:
                    assert below.backward is not None
                    assert result is not None
                    below.backward(result)
            del results
        self.runs_backward = False

    def _sum(self, first: Gradient, second: Gradient, kept: list[Kept]) -> Gradient:
        """In place only where nobody else holds the first."""
        if self.on_sum is not None:
            self.on_sum(first.storage.size)
        is_held = first.is_view or first.is_dtensor or any(one.storage is first.storage for _, one in kept)
        if self.sums_in_place and not is_held:
            return first
        return Gradient(self.tape.allocate(first.storage.category, first.storage.size), is_dtensor=first.is_dtensor)

    def _consumers(self, root: Node) -> Counter[Node]:
        found: Counter[Node] = Counter()
        seen, stack = {root}, [root]
        while stack:
            for below in stack.pop().inputs:
                if below is not None:
                    found[below] += 1
                    if below not in seen:
                        seen.add(below)
                        stack.append(below)
        return found


def _weight(node: Node) -> int:
    """The place of the parameter that a node has among its inputs."""
    return next(below.weight for below in node.inputs if below is not None and below.weight is not None)
