"""Replaying a device's history: absolute curves over time, and the life of every block.

The curves are anchored at the end, where the segments give absolute values: base = final value − net change of
the history. So a history whose oldest events were dropped still gives absolute values for what is left.
Allocated and active are in requested bytes (events record no other size), reserved in real bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from harness.memory.snapshot import PENDING_STATES, Action, Device, Frames, History

Int64 = npt.NDArray[np.int64]
_NONE = -1


@dataclass(frozen=True, slots=True)
class Peak:
    """The first maximum of a curve: `index` into the history (-1: the level before its first event)."""

    bytes: int
    index: int
    time_us: int | None


@dataclass(frozen=True, slots=True)
class Timeline:
    """Memory of one device over its history: element k of a curve is the level after event k (bytes).

    `allocated` and `active` count requested bytes, `reserved` real bytes; `base_*` are the levels before the first
    event. `time_us` is None when the history carries no times. active − allocated is what waits for a stream.
    """

    device: int
    time_us: Int64 | None
    allocated: Int64
    active: Int64
    reserved: Int64
    base_allocated: int
    base_active: int
    base_reserved: int

    def peak(self, curve: Literal["allocated", "active", "reserved"]) -> Peak:
        """The first maximum of a curve, the level before the first event included."""
        values: Int64 = getattr(self, curve)
        base: int = getattr(self, f"base_{curve}")
        index = int(values.argmax()) if len(values) else _NONE
        if index == _NONE or base >= values[index]:
            return Peak(base, _NONE, None)
        return Peak(int(values[index]), index, None if self.time_us is None else int(self.time_us[index]))


@dataclass(frozen=True, slots=True)
class Final:
    """What the segments hold at the end (bytes): `requested_*` as asked for, the others rounded."""

    allocated: int
    active: int
    reserved: int
    requested_allocated: int
    requested_pending: int


@dataclass(slots=True)
class BlockLife:
    """One block from allocation to reuse; the indices point into the history.

    `allocated_at` is None for a block that was there before the history; `requested_at` and `completed_at` are
    None where the history holds no such event. `held_as` is the category of what still holds the block at the end,
    where that is known; `phase` and `step` say when it was allocated (see `harness.memory.labels`).
    """

    size: int
    stream: int
    frames: Frames
    metadata: str
    allocated_at: int | None = None
    requested_at: int | None = None
    completed_at: int | None = None
    held_as: str | None = None
    phase: str | None = None
    step: int | None = None


@dataclass(slots=True)
class Lives:
    """Every block the history or the final segments know, and what did not add up. `pending_throughout`: freed before
    the history, and not reusable at its end."""

    blocks: list[BlockLife]
    pending_throughout: list[BlockLife] = field(default_factory=list)
    unknown_frees: int = 0
    unfreed_reuses: int = 0
    missing_at_end: int = 0


def final_levels(device: Device) -> Final:
    """The final levels of a device, from its segments."""
    return Final(
        allocated=sum(segment.allocated_size for segment in device.segments),
        active=sum(segment.active_size for segment in device.segments),
        reserved=sum(segment.total_size for segment in device.segments),
        requested_allocated=sum(b.requested_size for b in device.blocks() if b.state == "active_allocated"),
        requested_pending=sum(b.requested_size for b in device.blocks() if b.state in PENDING_STATES),
    )


def records_requests(history: History) -> bool:
    """Whether frees are recorded when requested; if not, only their completion is known.

    A block that was allocated and completed within the history must have been requested within it.
    """
    if int(Action.FREE_REQUESTED) in history.action:
        return True
    allocated: set[int] = set()
    for action, address in zip(history.action, history.address, strict=True):
        if action == Action.ALLOC:
            allocated.add(address)
        elif action == Action.FREE_COMPLETED and address in allocated:
            return False
    return True


def replay(device: Device) -> Timeline | None:
    """The curves of a device, or None without a history."""
    history = device.history
    if not len(history):
        return None
    action = np.array(history.action, dtype=np.int8)
    size = np.array(history.size, dtype=np.int64)
    freed = Action.FREE_REQUESTED if records_requests(history) else Action.FREE_COMPLETED
    final = final_levels(device)

    def curve(end: int, plus: list[Action], minus: list[Action]) -> tuple[Int64, int]:
        change = np.where(np.isin(action, plus), size, 0) - np.where(np.isin(action, minus), size, 0)
        level = np.cumsum(change)
        base = end - int(level[-1])
        return level + base, base

    allocated, base_allocated = curve(final.requested_allocated, [Action.ALLOC], [freed])
    active, base_active = curve(
        final.requested_allocated + final.requested_pending, [Action.ALLOC], [Action.FREE_COMPLETED]
    )
    reserved, base_reserved = curve(
        final.reserved,
        [Action.SEGMENT_ALLOC, Action.SEGMENT_MAP],
        [Action.SEGMENT_FREE, Action.SEGMENT_UNMAP],
    )
    times = None if history.time_us is None else np.array(history.time_us, dtype=np.int64)
    return Timeline(device.index, times, allocated, active, reserved, base_allocated, base_active, base_reserved)


def history_state(timeline: Timeline | None, lives: Lives) -> Literal["complete", "truncated", "none"]:
    """`complete`: the history starts from an allocator that holds nothing; `none`: there is no history."""
    if timeline is None:
        return "none"
    nothing_before = timeline.base_allocated == timeline.base_active == timeline.base_reserved == 0
    return "complete" if nothing_before and not lives.unknown_frees else "truncated"


def follow_blocks(device: Device) -> Lives:
    """The life of every block of a device, those from before the history included."""
    history = device.history
    lives = Lives([])
    live: dict[int, BlockLife] = {}
    pending: dict[tuple[int, int], BlockLife] = {}
    has_requests = records_requests(history)
    for index, action in enumerate(history.action):
        if action > Action.FREE_COMPLETED:
            continue
        address, size, stream = history.address[index], history.size[index], history.stream[index]
        if action == Action.ALLOC:
            lives.unfreed_reuses += address in live
            block = BlockLife(size, stream, history.frames[index], history.metadata[index], allocated_at=index)
            lives.blocks.append(block)
            live[address] = block
            continue
        completed = action == Action.FREE_COMPLETED
        known = pending.pop((address, stream), None) if completed and has_requests else live.pop(address, None)
        if known is None:
            # Allocated before the history began; the frames of a free are not those of its allocation.
            lives.unknown_frees += 1
            known = BlockLife(size, stream, (), "")
            lives.blocks.append(known)
        if completed:
            known.completed_at = index
            if known.requested_at is None:
                known.requested_at = None if has_requests else index
        else:
            known.requested_at = index
            pending[address, stream] = known
    _join_final_blocks(device, lives, live, pending)
    return lives


def _join_final_blocks(
    device: Device,
    lives: Lives,
    live: dict[int, BlockLife],
    pending: dict[tuple[int, int], BlockLife],
) -> None:
    """Adds the blocks that were there before the history and still are, and says what holds those that live at the
    end; counts those that should be there."""

    found = 0
    addresses = [holder.address for holder in device.holders]
    for block in device.blocks():
        if block.state == "active_allocated":
            life = live.get(block.address)
            if life is not None:
                found += 1
            else:
                life = BlockLife(block.requested_size, block.stream, block.frames, "")
                lives.blocks.append(life)
            first = bisect_left(addresses, block.address)
            if first < len(addresses) and addresses[first] < block.address + block.size:
                life.held_as = device.holders[first].category
        elif block.state in PENDING_STATES:
            freed = pending.get((block.address, block.stream))
            if freed is None:
                lives.pending_throughout.append(BlockLife(block.requested_size, block.stream, block.frames, ""))
            elif freed.allocated_at is None:
                freed.frames = block.frames
    lives.missing_at_end = len(live) - found


def live_at(lives: Lives, index: int, *, has_requests: bool) -> list[BlockLife]:
    """The blocks that are allocated right after event `index` (-1: before the first one)."""

    def is_live(block: BlockLife) -> bool:
        if block.allocated_at is not None and block.allocated_at > index:
            return False
        if block.requested_at is None:
            # Freed before the history, only completed within it.
            return not (has_requests and block.completed_at is not None)
        return block.requested_at > index

    return [block for block in lives.blocks if is_live(block)]
