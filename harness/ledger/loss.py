"""Operator tables of the cross-entropy, plain and vocabulary-parallel, of one of k chunks of the sequence."""

from __future__ import annotations

from typing import Literal

from harness.ledger.autograd import Gradient, Tensor
from harness.ledger.hardware import UnmeasuredError
from harness.ledger.operators import LOGITS, Operators
from harness.ledger.tape import Storage

VocabParallelLoss = Literal["in_place", "dtensor"]
"""`in_place`: harness.trainer.loss. `dtensor`: torch.distributed.tensor.parallel.loss_parallel."""


def cross_entropy(ops: Operators, logits: Tensor) -> Tensor:
    """F.cross_entropy(logits.float()): saves float32 log-probabilities, backward needs two more of their size.

    Forward 10·T·V bytes (bfloat16 logits, float32 copy, log-probabilities), backward 12·T·V.
    """
    casts = ops.e != 4
    node = logits.node
    if casts:
        ops.runs("widen", "cross-entropy", (6, "T·V/k"))
    ops.runs("log_softmax", "cross-entropy", (8, "T·V/k"))
    wide = ops.new(LOGITS, 4, "T·V/k") if casts else logits.storage
    log_probabilities = ops.new(LOGITS, 4, "T·V/k")
    del wide

    saved = [log_probabilities]
    del log_probabilities

    def backward(gradient: Gradient, saved: list[Storage] = saved) -> list[Gradient]:
        ops.runs("fill", "cross-entropy", (4, "T·V/k"))
        ops.runs("log_softmax_backward", "cross-entropy", (12, "T·V/k"))
        if casts:
            ops.runs("narrow", "cross-entropy", (6, "T·V/k"))
        to_log_probabilities = Gradient(ops.new(LOGITS, 4, "T·V/k"))
        to_logits = Gradient(ops.new(LOGITS, 4, "T·V/k"))
        del to_log_probabilities
        ops.graph.release(saved)
        return [Gradient(ops.new(LOGITS, ops.e, "T·V/k")) if casts else to_logits]

    out = Tensor(ops.new(LOGITS, 4, "1"))
    out.node = ops.graph.record([Tensor(logits.storage, node)], backward)
    return out


def vocab_parallel_cross_entropy(ops: Operators, logits: Tensor, implementation: VocabParallelLoss) -> Tensor:
    """Vocabulary sharded over tp.

    `in_place` saves the shifted float32 logits and turns them into the gradient: 10·T·V/t forward, 6·T·V/t backward
    (bfloat16). `dtensor` saves float32 log-probabilities; its backward holds those, a one-hot gradient and the two
    products of their difference: 16·T·V/t.
    """
    if implementation == "in_place":
        return _in_place(ops, logits)
    return _dtensor(ops, logits)


def _in_place(ops: Operators, logits: Tensor) -> Tensor:
    def whole(*coefficients: int) -> None:
        """A kernel for each, that reads and writes so many bytes an element of this rank's logits."""
        for coefficient in coefficients:
            ops.runs("elementwise", "cross-entropy", (coefficient, "T·V/t/k"))

    def over_ranks(what: str) -> None:
        if ops.program is not None:
            ops.program.collective("all_reduce", "tp", what, ops.quantities.size(4, "T/k").bytes)

    ops.runs("widen", "cross-entropy", (4 + ops.e, "T·V/t/k"))
    whole(4)
    over_ranks("largest logits")
    whole(8, 8, 4)  # shifted, exponential, and its sum
    over_ranks("sums of exponentials")
    over_ranks("logits of the targets")
    shifted = ops.new(LOGITS, 4, "T·V/t/k")
    largest = ops.new(LOGITS, 4, "T/k")
    exponential = ops.new(LOGITS, 4, "T·V/t/k")
    log_total = ops.new(LOGITS, 4, "T/k")
    del exponential, largest
    own, elsewhere, ignored = ops.new(LOGITS, 8, "T/k"), ops.new(LOGITS, 1, "T/k"), ops.new(LOGITS, 1, "T/k")
    target = ops.new(LOGITS, 4, "T/k")
    saved = [shifted, log_total, own, elsewhere, ignored]
    del shifted, log_total, own, elsewhere, ignored, target

    def backward(gradient: Gradient, saved: list[Storage] = saved) -> list[Gradient]:
        whole(8, 8, 8, 8)  # shifted by the logarithm, exponential, times the gradient, ignored ones masked
        if ops.e != 4:
            ops.runs("narrow", "cross-entropy", (6, "T·V/t/k"))
        return [Gradient(ops.new(LOGITS, ops.e, "T·V/t/k") if ops.e != 4 else saved[0])]

    out = Tensor(ops.new(LOGITS, 4, "1"))
    out.node = ops.graph.record([logits], backward)
    return out


def _dtensor(ops: Operators, logits: Tensor) -> Tensor:
    if ops.program is not None:
        raise UnmeasuredError("the loss of torch's loss_parallel is not timed")
    wide = ops.new(LOGITS, 4, "T·V/t/k") if ops.e != 4 else logits.storage
    shifted = ops.new(LOGITS, 4, "T·V/t/k")
    exponential = ops.new(LOGITS, 4, "T·V/t/k")
    del exponential
    log_probabilities = ops.new(LOGITS, 4, "T·V/t/k")
    del wide, shifted

    saved = [log_probabilities]
    del log_probabilities

    def backward(gradient: Gradient, saved: list[Storage] = saved) -> list[Gradient]:
        one_hot, probabilities, difference = (ops.new(LOGITS, 4, "T·V/t/k") for _ in range(3))
        del one_hot, probabilities
        ops.graph.release(saved)
        return [Gradient(ops.new(LOGITS, ops.e, "T·V/t/k") if ops.e != 4 else difference)]

    out = Tensor(ops.new(LOGITS, 4, "1"))
    out.node = ops.graph.record([logits], backward)
    return out
