"""Head and loss over one chunk of the sequence after the other, so that the logits never exist whole.

As torchtitan's ChunkedLossWrapper (torchtitan/components/loss.py): the head is gathered once for all chunks, its
gradient is reduced with the last, and what lies before it goes backward afterwards, from the gradients of all chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from harness import config
from harness.errors import UsageError
from harness.trainer.loss import Loss, cross_entropy_sum
from harness.trainer.model.decoder import Decoder

if TYPE_CHECKING:
    from harness.record.recorder import Recorder


class ChunkedLoss:
    """`training.loss_chunks` equal parts of every sequence, on a model that FSDP2 shards with `head_in_chunks`.

    `group`: the tensor-parallel ranks, which share the vocabulary; with sequence parallelism each also has an equal
    part of the hidden states, of which a chunk takes as much from everyone. `loss`: `cross_entropy_sum`, or what
    torch.compile made of it. Raises `UsageError` where torch's FSDP2 cannot run a part of a unit (before 2.13).
    """

    def __init__(
        self,
        config: config.Trainer.Config,
        model: Decoder,
        group: dist.ProcessGroup | None,
        recorder: Recorder,
        loss: Loss = cross_entropy_sum,
    ) -> None:
        chunks, layout = config.training.loss_chunks, config.parallelism
        if not hasattr(FSDPState, "_force_complete_incomplete_states"):
            raise UsageError(
                f"training.loss_chunks={chunks}: the FSDP2 of torch {torch.__version__} runs units whole, torch 2.13 "
                "can run the head alone; set it to 1"
            )
        assert model.lm_head is not None
        self._model, self._head = model, model.lm_head
        self._chunks, self._group, self._recorder, self._loss = chunks, group, recorder, loss
        self._parts = group.size() if group is not None and layout.sequence_parallel else 1
        self._frees = layout.reshard_after_forward != "never"

    def run(self, tokens: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor, *, reduces: bool) -> torch.Tensor:
        """Forward and backward of one micro-batch: the sum over its labels of -log p, over `valid`, 0-d float32.

        tokens, labels: int64 [batch, seq]. `reduces`: gradients are reduced over data-parallel ranks.
        """
        phase = self._recorder.phase
        with phase("forward"):
            hidden = self._model(tokens, head=False)
            gradient = torch.empty_like(hidden)
        total = torch.zeros((), device=hidden.device)
        with self._head_gathered():
            for number in range(self._chunks):
                if number == self._chunks - 1:
                    cast(FSDPModule, self._head).set_requires_gradient_sync(reduces, recurse=False)
                with phase("forward"):
                    own = self._part(hidden, number).detach().contiguous().requires_grad_()
                    loss = self._loss(self._head(own), self._labels(labels, number), self._group) / valid
                with phase("backward"):
                    loss.backward()
                assert own.grad is not None
                self._part(gradient, number).copy_(own.grad)
                total += loss.detach()
                del own, loss
        with phase("backward"):
            hidden.backward(gradient)
        return total

    @contextmanager
    def _head_gathered(self) -> Iterator[None]:
        unit = cast(FSDPModule, self._head)
        unit.set_requires_gradient_sync(False, recurse=False)
        unit.set_reshard_after_backward(False, recurse=False)
        with self._recorder.phase("forward"):
            unit.unshard()
        yield
        unit.set_reshard_after_backward(True, recurse=False)
        if self._frees:
            unit.reshard()

    def _part(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x.chunk(self._chunks, dim=1)[number]

    def _labels(self, labels: torch.Tensor, number: int) -> torch.Tensor:
        """Those of the hidden states that the head's all-gather puts together: a part of each rank's."""
        by_rank: torch.Tensor = labels.unflatten(1, (self._parts, self._chunks, -1))
        return by_rank[:, :, number].flatten(1)
