"""All-gather → matrix product → reduce-scatter, over and over: what a sharded layer does, without the layer.

The host issues an iteration faster than the device runs it, and frees each buffer as soon as it was read. Where memory
goes back to the stream it came from, the next iteration takes the same blocks; where `record_stream` marks them, freed
blocks wait for the device and stack up (`meshscope memory` names the functions below as their sites).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from harness.trainer.collectives import all_gather_single, reduce_scatter_single
from harness.workloads.workload import Workload

if TYPE_CHECKING:
    from harness.record.recorder import Recorder


class Collectives(Workload):
    """Shard [rows, dim] and weight [dim, dim] live as long as the run; an iteration makes the gathered shards
    [world · rows, dim], their product with the weight, and this rank's rows of the sum over ranks."""

    def allocate(self) -> None:
        pattern = self.config.collectives
        self.shard = self.random(pattern.rows, pattern.dim)
        self.weight = self.random(pattern.dim, pattern.dim) / pattern.dim**0.5
        self.group = dist.distributed_c10d._get_default_group()
        self.functional: Any = torch.ops._c10d_functional

    def step(self, recorder: Recorder, checksum: torch.Tensor) -> None:
        with recorder.phase("collectives"), recorder.category("communication"):
            for _ in range(self.config.collectives.iterations):
                gathered = self.all_gather()
                product = self.multiply(gathered)
                del gathered
                reduced = self.reduce_scatter(product)
                del product
                checksum += torch.linalg.vector_norm(reduced, dtype=torch.float32)
                del reduced

    def all_gather(self) -> torch.Tensor:
        if self.config.collectives.api == "functional":
            output = self.functional.all_gather_into_tensor(self.shard, self.world_size, self.group.group_name)
            return cast(torch.Tensor, self.functional.wait_tensor(output))
        output = self.shard.new_empty(self.world_size * self.shard.shape[0], self.shard.shape[1])
        _wait(all_gather_single(output, self.shard, async_op=self.config.collectives.async_op))
        return output

    def multiply(self, gathered: torch.Tensor) -> torch.Tensor:
        return torch.mm(gathered, self.weight)

    def reduce_scatter(self, product: torch.Tensor) -> torch.Tensor:
        if self.config.collectives.api == "functional":
            output = self.functional.reduce_scatter_tensor(product, "sum", self.world_size, self.group.group_name)
            return cast(torch.Tensor, self.functional.wait_tensor(output))
        output = torch.empty_like(self.shard)
        _wait(reduce_scatter_single(output, product, async_op=self.config.collectives.async_op))
        return output


def _wait(work: dist.Work | None) -> None:
    """A work holds its output as long as it lives, so no name is kept for it."""
    if work is not None:
        work.wait()
