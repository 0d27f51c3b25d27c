"""Activations that are sent down a line of ranks, as the forward of a pipeline does.

ProcessGroupNCCL still calls `record_stream` on what is sent and received (ProcessGroupNCCL.cpp:pointToPoint), whatever
is set: an activation that is freed right after `wait()` stays active until the allocator sees that the device has sent
it. References do not help, since the same happens once they end; buffers that are used again do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from harness.workloads.config import MIB
from harness.workloads.workload import Workload

if TYPE_CHECKING:
    from harness.record.recorder import Recorder

BUFFERS = 2


class PointToPoint(Workload):
    """The first rank makes activations, every other receives them from its predecessor; each halves them and sends them
    on to its successor, if it has one."""

    def allocate(self) -> None:
        pattern = self.config.point_to_point
        self.source = self.random(pattern.activation_mib * MIB // self.dtype.itemsize)
        self.previous = self.rank - 1 if self.rank > 0 else None
        self.next = self.rank + 1 if self.rank + 1 < self.world_size else None
        self.buffers = [torch.empty_like(self.source) for _ in range(BUFFERS)] if pattern.buffers == "reused" else []

    def step(self, recorder: Recorder, checksum: torch.Tensor) -> None:
        held = []
        with recorder.phase("point_to_point"), recorder.category("communication"):
            for number in range(self.config.point_to_point.sends):
                activation = self.buffers[number % BUFFERS] if self.buffers else self.new_activation()
                if self.previous is None:
                    torch.mul(self.source, 0.5, out=activation)
                else:
                    self.transfer(dist.irecv, activation, self.previous)
                    activation.mul_(0.5)
                if self.next is not None:
                    self.transfer(dist.isend, activation, self.next)
                checksum += torch.linalg.vector_norm(activation, dtype=torch.float32)
                if self.config.point_to_point.buffers == "held":
                    held.append(activation)
                del activation

    def new_activation(self) -> torch.Tensor:
        return torch.empty_like(self.source)

    def transfer(self, operation: Callable[..., Any], activation: torch.Tensor, peer: int) -> None:
        """Starts `operation`, isend or irecv, and makes the current stream wait for it."""
        works = (
            dist.batch_isend_irecv([dist.P2POp(operation, activation, peer)])
            if self.config.point_to_point.batched
            else [operation(activation, peer)]
        )
        for work in works:
            work.wait()
