"""Tied embeddings of a pipeline: its first and its last stage each have the matrix.

Both begin with the same values and get the sum of both gradients, so that every update leaves them the same, as in
Megatron-LM (megatron/core/distributed/finalize_model_grads.py:_allreduce_word_embedding_grads).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.pipeline.plan import Plan
from harness.trainer.model.decoder import EMBEDDING, HEAD, Decoder


class TiedEnds:
    """What this rank's part of the model, `model`, has of the two ends: neither, one or both.

    `copies`: the parameters that stand for one that another end, or the embedding on this rank, has too.
    """

    def __init__(self, model: Decoder, plan: Plan, mesh: DeviceMesh) -> None:
        parameters = dict(model.named_parameters())
        self._ends = [parameters[name] for name in (EMBEDDING, HEAD) if name in parameters]
        self.copies = frozenset(parameters[name] for name in (HEAD,) if name in parameters)
        self._group, self._device_type = mesh.get_group("pp"), mesh.device_type
        self._other_end = plan.other_end(self._group.rank())

    @torch.no_grad()
    def add_up_gradients(self) -> None:
        """Between backward and the gradient norm. Two ranks send each other theirs: one send and one receive."""
        gradients = [_local(end.grad) for end in self._ends if end.grad is not None]
        if self._other_end is not None:
            (own,) = gradients
            sent = own.to(self._device_type)
            received = torch.empty_like(sent)
            both = [
                dist.P2POp(operation, tensor, group=self._group, group_peer=self._other_end)
                for operation, tensor in ((dist.isend, sent), (dist.irecv, received))
            ]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            own.add_(received.to(own.device))
        elif gradients:
            embedding, head = gradients
            head.copy_(embedding.add_(head))

    @torch.no_grad()
    def copy_to_head(self, optimizer: torch.optim.Optimizer) -> None:
        """Where this rank has both ends, after the embedding and its states were loaded."""
        if len(self._ends) == 2:
            embedding, head = self._ends
            _local(head).copy_(_local(embedding))
            for name, value in optimizer.state.get(embedding, {}).items():
                _local(optimizer.state[head][name]).copy_(_local(value))


def one_matrix(of_name: dict[str, Any]) -> dict[str, Any]:
    """Values of parameters, by name, with those of both ends under the embedding's name: its own, else the head's."""
    found = {name: value for name, value in of_name.items() if name != HEAD}
    return {EMBEDDING: of_name[HEAD], **found} if HEAD in of_name else found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
