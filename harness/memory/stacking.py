"""Stacking: blocks that were freed but could not be reused yet, because a stream they were lent to still ran.

A block is stacked when at least one allocation on its device fell between its `free_requested` and the first
later `free_completed` of the same address and stream: that allocation could not have it. Sizes are requested
bytes; sites are those of the blocks' allocations, since a completed free carries the stack of an unrelated call.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from harness.memory.frames import BEFORE_HISTORY, NO_STACK, allocation_site
from harness.memory.replay import BlockLife, Lives, Timeline, records_requests
from harness.memory.snapshot import PENDING_STATES, Action, Device


@dataclass(frozen=True, slots=True)
class SiteStacking:
    """The stacked blocks that one place allocated on one stream: their number and bytes."""

    site: str
    stream: int
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Stacking:
    """Stacking of one device over its history; None where the history cannot tell.

    `max_pending_bytes` is the most that was pending (freed, not reusable) at any allocation, blocks freed before
    the history included; `pending_at_end_bytes` is what the final segments hold in that state; `byte_seconds`
    sums size × time between free and reuse over the stacked blocks. `sites` is ordered by bytes.
    """

    blocks: int | None
    max_pending_bytes: int | None
    pending_at_end_bytes: int
    byte_seconds: float | None
    sites: list[SiteStacking]


def measure_stacking(device: Device, timeline: Timeline | None, lives: Lives) -> Stacking:
    """Stacking of a device; everything but `pending_at_end_bytes` is None without recorded free requests."""
    history = device.history
    at_end = sum(block.requested_size for block in device.blocks() if block.state in PENDING_STATES)
    if timeline is None or not records_requests(history):
        return Stacking(None, None, at_end, None, [])
    is_alloc = np.array(history.action, dtype=np.int8) == Action.ALLOC
    allocations = np.cumsum(is_alloc)
    stacked = []
    microseconds_bytes = 0
    for block in lives.blocks:
        freed, reusable = block.requested_at, block.completed_at
        if freed is None or reusable is None or allocations[reusable] == allocations[freed]:
            continue
        stacked.append(block)
        if history.time_us is not None:
            microseconds_bytes += block.size * (history.time_us[reusable] - history.time_us[freed])
    pending = (timeline.active - timeline.allocated)[is_alloc]
    return Stacking(
        blocks=len(stacked),
        max_pending_bytes=int(pending.max()) if len(pending) else 0,
        pending_at_end_bytes=at_end,
        byte_seconds=None if history.time_us is None else microseconds_bytes / 1e6,
        sites=_by_site(stacked),
    )


def block_site(block: BlockLife) -> str:
    """Where a block was allocated: `file:line:function`, or why that is unknown."""
    site = allocation_site(block.frames)
    return BEFORE_HISTORY if site == NO_STACK and block.allocated_at is None else site


def _by_site(blocks: list[BlockLife]) -> list[SiteStacking]:
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for block in blocks:
        groups[block_site(block), block.stream].append(block.size)
    found = [SiteStacking(site, stream, len(sizes), sum(sizes)) for (site, stream), sizes in groups.items()]
    return sorted(found, key=lambda item: (-item.bytes, item.site, item.stream))
