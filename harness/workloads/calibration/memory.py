"""Device memory that torch's allocator does not hold: the CUDA context, and what NCCL takes for each process group."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist

from harness.ledger.hardware_points import CollectiveKind, OutsideMemory
from harness.workloads.calibration.collectives import call

GROUPS = 3
KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "send")
"""In this order in each group: the first connects the ranks; sends take connections of their own."""


def outside_bytes(device: torch.device) -> int:
    """Bytes in use on the device that torch's allocator did not reserve (cudaMemGetInfo): of the whole device, so that
    it is a rank's own only where nothing else runs there."""
    torch.cuda.synchronize(device)
    gc.collect()
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def context_bytes(device: torch.device) -> int:
    """Of a process that has used the device, and has not yet joined a group."""
    torch.ones(1, device=device).add_(1)
    return outside_bytes(device)


def group_memory(device: torch.device) -> list[dict[str, Any]]:
    """For each of `GROUPS` new groups over all ranks, the growth in bytes with each kind's first collective."""
    whole = torch.ones(2**20 * dist.get_world_size(), device=device)
    found = []
    for index in range(GROUPS):
        before = start = outside_bytes(device)
        group = dist.new_group(list(range(dist.get_world_size())))
        assert group is not None
        grown = {}
        for kind in KINDS:
            call(kind, whole, group)()
            now = outside_bytes(device)
            grown[kind], before = now - before, now
        found.append({"group": index, "bytes": before - start, "first_of_kind_bytes": grown})
    return found


def outside_memory(device: torch.device, context: int) -> list[OutsideMemory]:
    ranks = dist.get_world_size()
    found = [OutsideMemory(kind="context", ranks=ranks, group=0, bytes=max(0, context))]
    for group in group_memory(device) if ranks > 1 else ():
        grown = group["first_of_kind_bytes"]
        send = max(0, grown["send"])
        first = max(0, group["bytes"] - grown["send"])
        found += [
            OutsideMemory(kind="first_collective", ranks=ranks, group=group["group"], bytes=first),
            OutsideMemory(kind="first_send", ranks=ranks, group=group["group"], bytes=send),
        ]
    return found
