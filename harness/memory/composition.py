"""What the memory at a device's allocated peak consists of, by category or by allocation site; and what was pending
when most was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from harness.memory.categories import UNKNOWN, category_of
from harness.memory.frames import has_python_frames
from harness.memory.replay import BlockLife, Lives, Timeline, live_at, records_requests
from harness.memory.snapshot import Action, Device
from harness.memory.stacking import block_site


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes (requested) and number of the blocks that have `name` in common."""

    name: str
    blocks: int
    bytes: int


def composition_by_category(device: Device, timeline: Timeline, lives: Lives) -> list[Share]:
    """The allocated peak by category, largest first; the shares add up to the peak exactly.

    What the history and the final segments disagree on is counted as `unknown`.
    """
    has_stacks = any(has_python_frames(frames) for frames in device.history.frames)
    return _composition(device, timeline, lives, lambda b: category_of(b, history_has_stacks=has_stacks))


def composition_by_site(device: Device, timeline: Timeline, lives: Lives) -> list[Share]:
    """The allocated peak by allocation site, largest first; adds up like `composition_by_category`."""
    return _composition(device, timeline, lives, block_site)


def pending_by_site(device: Device, timeline: Timeline, lives: Lives) -> tuple[list[Share], int | None]:
    """What was freed and not reusable yet at the allocation at which most was (`Stacking.max_pending_bytes`), by
    allocation site, largest first, and the time of that allocation (µs, None without a clock). The shares add up to
    those bytes; empty where the history does not record free requests or nothing was pending."""
    history = device.history
    allocations = np.flatnonzero(np.array(history.action, dtype=np.int8) == Action.ALLOC)
    if not records_requests(history) or not allocations.size:
        return [], None
    pending = (timeline.active - timeline.allocated)[allocations]
    most = int(pending.max())
    if most <= 0:
        return [], None
    index = int(allocations[pending.argmax()])
    waiting = [*lives.pending_throughout, *(block for block in lives.blocks if _is_pending(block, index))]
    time_us = None if timeline.time_us is None else int(timeline.time_us[index])
    return _shares(waiting, block_site, most), time_us


def _is_pending(block: BlockLife, index: int) -> bool:
    if block.requested_at is None:
        return block.completed_at is not None and block.completed_at > index
    return block.requested_at <= index and (block.completed_at is None or block.completed_at > index)


def _composition(device: Device, timeline: Timeline, lives: Lives, name_of: Callable[[BlockLife], str]) -> list[Share]:
    peak = timeline.peak("allocated")
    live = live_at(lives, peak.index, has_requests=records_requests(device.history))
    return _shares(live, name_of, peak.bytes)


def _shares(live: list[BlockLife], name_of: Callable[[BlockLife], str], expected: int) -> list[Share]:
    totals: dict[str, tuple[int, int]] = {}
    for name, size in _named(live, name_of, expected):
        blocks, total = totals.get(name, (0, 0))
        totals[name] = (blocks + 1, total + size)
    shares = (Share(name, blocks, total) for name, (blocks, total) in totals.items())
    return sorted(shares, key=lambda share: (-share.bytes, share.name))


def _named(live: list[BlockLife], name_of: Callable[[BlockLife], str], expected: int) -> Iterable[tuple[str, int]]:
    for block in live:
        yield name_of(block), block.size
    if unexplained := expected - sum(block.size for block in live):
        yield UNKNOWN, unexplained
