"""A micro-batch whose head and loss run over one chunk of the sequence after the other, as in
harness/trainer/chunked_loss.py.

Of k chunks, at once: 12·T·V/k of logits and loss, the gathered matrix, its gradient in float32 (added to by each chunk)
and what it is reduced from: with bfloat16 10·V·d/t bytes that no number of chunks makes less. The hidden states and
their gradient, 2·T·d bytes each, live until the backward of the micro-batch ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.ledger.autograd import ACCUMULATE_GRAD, Gradient, Node, Tensor
from harness.ledger.fully_sharded import Unit, before
from harness.ledger.operators import ACTIVATION_GRADIENTS, LOGITS
from harness.ledger.tape import Storage

if TYPE_CHECKING:
    from harness.ledger.step import Step


def forward_and_backward(step: Step, suffix: str) -> None:
    """`suffix` goes to the names of its instants."""
    ops, unit, sharding, chunks = step.ops, step.head, step.sharding, step.config.training.loss_chunks
    assert unit is not None, "a pipeline has no loss in chunks"
    step.suffix = suffix
    hidden = step.forward(head=False)
    gradient = ops.new(ACTIVATION_GRADIENTS, ops.e, step.plan.stream)
    unit.gather()
    unit.wait()
    reduces, sharding.frees = sharding.reduces, False
    for name, is_last in turns("chunk", "chunks", chunks, all_alike=False, folded=step.program is None):
        step.suffix = f", {name}{suffix}"
        sharding.reduces = reduces and is_last
        _chunk(step, unit, hidden.storage)
    sharding.reduces, sharding.frees = reduces, True
    if unit.reshards:
        unit.free()
    step.suffix = suffix
    node, hidden.node = hidden.node, None
    assert node is not None
    ops.graph.backward(node, Gradient(gradient))
    step.end_backward()


def turns(one: str, several: str, count: int, *, all_alike: bool, folded: bool = True) -> list[tuple[str, bool]]:
    """What stands for `count` passages, named so, each with whether it is the last: the first, one for those that are
    like the second, and the last unless it is like them too. Unless `folded` all of them."""
    if not folded:
        return [(f"{one} {number}", number == count) for number in range(1, count + 1)]
    found = [(f"{one} 1", count == 1)]
    middle = range(2, count + 1 if all_alike else count)
    if middle:
        found.append((f"{one} 2" if len(middle) == 1 else f"{several} 2 to {middle[-1]}", all_alike))
    if count > 1 and not all_alike:
        found.append((f"{one} {count}", True))
    return found


def _chunk(step: Step, unit: Unit, hidden: Storage) -> None:
    ops, plan = step.ops, step.plan
    arrived: list[Storage] = []

    def store(gradient: Gradient) -> list[Gradient | None]:
        arrived.append(gradient.storage)
        return []

    # Parts of several sequences, or of several ranks' parts of one, are copied together; one of one is a view.
    several = step.quantities.values["B"] > 1
    step.instant("head")
    own = ops.new(LOGITS, ops.e, f"{plan.stream}/k") if several else hidden
    x = before(ops.graph, unit, Tensor(own, Node(ACCUMULATE_GRAD, (), store, None)))
    matrix = unit.tensors()["tok_embeddings" if step.tied else "lm_head"]
    logits = ops.linear(LOGITS, plan.enter(x, "/k"), matrix, ("T·d/k", "V·d/t", "T·V/t/k"))
    del x
    step.instant("loss")
    labels = ops.new(LOGITS, 8, "T/k") if several or plan.stream != "T·d" else None
    loss = step.loss(logits)
    del logits, labels
    root, loss.node = loss.node, None
    assert root is not None
    ops.graph.backward(root, Gradient(ops.new(LOGITS, 4, "1")))
