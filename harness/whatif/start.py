"""What a device held before its recorded history: segments and blocks, from the final segments and the history.

Requests are recorded, roundings are not. A block that is there at the end has its size in the snapshot; one that was
freed in the history ends where the allocator would have ended it: free blocks of the large pool are larger than 1 MiB,
so what is left up to the next block is part of it if it is smaller (torch's `should_split`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import attrgetter

from harness.allocator import Allocator, Block, Settings
from harness.allocator.expandable import ADDRESS_SPACE_BYTES
from harness.allocator.restore import Piece, restore_segment
from harness.allocator.settings import LARGE_SEGMENT_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES
from harness.memory.replay import records_requests
from harness.memory.snapshot import PENDING_STATES, Action, Device


class ContradictionError(Exception):
    """The history and the final segments cannot both be true; the message says where."""


@dataclass(slots=True)
class HeldBlock:
    """A block from before the history. `size` is None where only the request is known (bytes)."""

    address: int
    stream: int
    requested_bytes: int
    size: int | None
    pending: bool


@dataclass(slots=True)
class HeldRange:
    """Reserved memory from before the history: a segment, or a mapped range of an expandable one (bytes)."""

    address: int
    size: int
    stream: int
    expandable: bool
    small: bool
    private: bool

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass(slots=True)
class Start:
    """What was there before the history, by address."""

    ranges: list[HeldRange] = field(default_factory=list)
    blocks: list[HeldBlock] = field(default_factory=list)

    @property
    def reserved_bytes(self) -> int:
        return sum(held.size for held in self.ranges)


_by_address = attrgetter("address")


def find_start(device: Device) -> Start:
    """What `device` held before its history. Raises ContradictionError."""
    return Start(sorted(_ranges(device), key=_by_address), sorted(_blocks(device), key=_by_address))


def _blocks(device: Device) -> list[HeldBlock]:
    """The blocks that are freed or completed in the history, or there at its end, without being allocated in it."""
    history = device.history
    found: list[HeldBlock] = []
    allocated: set[int] = set()
    pending: set[tuple[int, int]] = set()
    requests = records_requests(history)
    for action, address, size, stream in zip(
        history.action, history.address, history.size, history.stream, strict=True
    ):
        if action == Action.ALLOC:
            allocated.add(address)
        elif action == Action.FREE_REQUESTED or (action == Action.FREE_COMPLETED and not requests):
            if address not in allocated:
                found.append(HeldBlock(address, stream, size, None, False))
            allocated.discard(address)
            pending.add((address, stream))
        elif action == Action.FREE_COMPLETED:
            if (address, stream) not in pending:
                found.append(HeldBlock(address, stream, size, None, True))
            pending.discard((address, stream))
    for block in device.blocks():
        if block.state in PENDING_STATES:
            if (block.address, block.stream) not in pending:
                found.append(HeldBlock(block.address, block.stream, block.requested_size, block.size, True))
        elif block.state != "inactive" and block.address not in allocated:
            found.append(HeldBlock(block.address, block.stream, block.requested_size, block.size, False))
    return found


def _ranges(device: Device) -> list[HeldRange]:
    """The final segments with the history's changes undone, the last first."""
    ranges = [
        HeldRange(s.address, s.total_size, s.stream, s.expandable, s.small, s.private_pool) for s in device.segments
    ]
    ranges.sort(key=_by_address)
    history = device.history
    for index in range(len(history) - 1, -1, -1):
        action = history.action[index]
        address, size, stream = history.address[index], history.size[index], history.stream[index]
        if action in (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP):
            expandable = action == Action.SEGMENT_UNMAP
            small = _is_small_range(ranges, address, size, stream) if expandable else size == SMALL_SEGMENT_BYTES
            held = HeldRange(address, size, stream, expandable, small, False)
            ranges.insert(bisect_left(ranges, address, key=_by_address), held)
        elif action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
            _take_out(ranges, address, size, f"event {index}")
    return ranges


def _is_small_range(ranges: list[HeldRange], address: int, size: int, stream: int) -> bool:
    """Which pool an unmapped range was of: that of the nearest mapped range of its stream, if there is one."""
    near = [held for held in ranges if held.expandable and held.stream == stream]
    if not near:
        return size % LARGE_SEGMENT_BYTES != 0
    return min(near, key=lambda held: abs(held.address - address)).small


def _take_out(ranges: list[HeldRange], address: int, size: int, where: str) -> None:
    """Takes what an event added out of the ranges; mapped ranges may have grown together, or be mapped in parts."""
    end = address + size
    while address < end:
        at = bisect_right(ranges, address, key=_by_address) - 1
        held = ranges[at] if at >= 0 else None
        if held is None or held.end <= address:
            raise ContradictionError(f"{where} reserves {address:#x}, which nothing holds later")
        upto = min(end, held.end)
        before, after = address - held.address, held.end - upto
        if not held.expandable and (before or after):
            raise ContradictionError(f"{where} reserves {size} B at {address:#x}, of a segment of {held.size} B")
        rest = []
        if before:
            rest.append(HeldRange(held.address, before, held.stream, True, held.small, held.private))
        if after:
            rest.append(HeldRange(upto, after, held.stream, True, held.small, held.private))
        ranges[at : at + 1] = rest
        address = upto


def lay_out(start: Start, allocator: Allocator, recorded: Settings) -> dict[int, Block]:
    """Puts what was there into a new allocator, where it was; returns the blocks by address.

    `recorded` are the settings that made it. Raises ContradictionError.
    """
    for held, following in pairwise(start.ranges):
        if held.end > following.address:
            raise ContradictionError(f"the segments at {held.address:#x} and {following.address:#x} overlap")
    found: dict[int, Block] = {}
    for segment in _segments(start.ranges):
        first = segment[0]
        if first.expandable and segment[-1].end - first.address > ADDRESS_SPACE_BYTES // 2:
            raise ContradictionError(
                f"the expandable segment at {first.address:#x} ends further off than memory is large"
            )
        pieces = list(_pieces(segment, start.blocks, recorded))
        found |= restore_segment(
            allocator,
            pieces,
            stream=first.stream,
            small=first.small,
            private=int(first.private),
            expandable=first.expandable,
        )
    for block in start.blocks:
        if block.address not in found:
            raise ContradictionError(f"the block at {block.address:#x} lies in no segment")
    return found


def _segments(ranges: list[HeldRange]) -> Iterator[list[HeldRange]]:
    """Each segment's ranges: one, or those of an expandable segment, of which a pool and stream has one."""
    for held in ranges:
        if not held.expandable:
            yield [held]

    def owner(held: HeldRange) -> tuple[bool, bool, int]:
        return held.private, held.small, held.stream

    expandable = sorted((held for held in ranges if held.expandable), key=lambda held: (*owner(held), held.address))
    for _, group in groupby(expandable, key=owner):
        yield list(group)


def _pieces(segment: list[HeldRange], blocks: list[HeldBlock], recorded: Settings) -> Iterator[Piece]:
    """What tiles a segment: its blocks, free space between them, and the unmapped space between its ranges."""
    position = segment[0].address
    for held in segment:
        if held.address > position:
            yield Piece(position, held.address - position, mapped=False)
        position = held.address
        inside = blocks[bisect_left(blocks, position, key=_by_address) : bisect_left(blocks, held.end, key=_by_address)]
        ends = [block.address for block in inside[1:]] + [held.end]
        for block, upto in zip(inside, ends, strict=False):  # one end more where nothing is inside
            if block.address < position:
                raise ContradictionError(f"the block at {block.address:#x} overlaps the one before it")
            if block.address > position:
                yield Piece(position, block.address - position)
            size = block.size or _size(block, upto - block.address, held, recorded)
            yield Piece(block.address, size, block.requested_bytes, block.pending)
            position = block.address + size
        if position > held.end:
            raise ContradictionError(f"the block before {position:#x} ends behind its segment")
        if position < held.end:
            yield Piece(position, held.end - position)
        position = held.end


def _size(block: HeldBlock, room: int, held: HeldRange, recorded: Settings) -> int:
    """The size a block was given out of `room`, the bytes up to the next block or the segment's end."""
    size = recorded.round_bytes(block.requested_bytes)
    if held.small or held.expandable:
        return size
    bound = recorded.max_split_size_bytes
    whole = bound is not None and size >= bound
    return room if whole or 0 <= room - size <= SMALL_BYTES else size
