"""Putting what a device held before its history into the allocator model, block by block where it was.

Requests are recorded, roundings are not. A block that is there at the end has its size in the snapshot; one that was
freed in the history ends where the allocator would have ended it: in the large pool, what a request leaves of a free
block is a block of its own if it is larger than 1 MiB (torch's `should_split`), so less than that up to the next block,
or to one allocated there while it lives, is part of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import groupby

from harness.allocator import Allocator, Block, Settings
from harness.allocator.expandable import ADDRESS_SPACE_BYTES
from harness.allocator.restore import Piece, restore_segment
from harness.allocator.settings import SMALL_BYTES
from harness.whatif.start import ContradictionError, HeldBlock, HeldRange, Start, by_address, owner_of


def lay_out(start: Start, allocator: Allocator, recorded: Settings) -> dict[int, Block]:
    """Puts what was there into a new allocator, where it was; returns the blocks by address.

    `recorded` are the settings that made it. Raises ContradictionError.
    """
    fixed = [held.address for held in start.ranges if not held.expandable]
    found: dict[int, Block] = {}
    for segment in _segments(start.ranges):
        first = segment[0]
        if first.expandable and segment[-1].end - first.address > ADDRESS_SPACE_BYTES // 2:
            raise ContradictionError(
                f"the expandable segment at {first.address:#x} ends further off than memory is large"
            )
        pieces = list(_pieces(segment, start, recorded))
        beyond = bisect_left(fixed, segment[-1].end)
        found |= restore_segment(
            allocator,
            pieces,
            stream=first.stream,
            small=first.small,
            private=int(first.private),
            expandable=first.expandable,
            upto=fixed[beyond] if beyond < len(fixed) else None,
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
    expandable = sorted((held for held in ranges if held.expandable), key=lambda held: (*owner_of(held), held.address))
    for _, group in groupby(expandable, key=owner_of):
        yield list(group)


def _pieces(segment: list[HeldRange], start: Start, recorded: Settings) -> Iterator[Piece]:
    """What tiles a segment: its blocks, free space between them, and the unmapped space between its ranges."""
    blocks = start.blocks
    position = start.bases.get(owner_of(segment[0]), segment[0].address)
    for held in segment:
        if held.address > position:
            yield Piece(position, held.address - position, mapped=False)
        position = held.address
        inside = blocks[bisect_left(blocks, position, key=by_address) : bisect_left(blocks, held.end, key=by_address)]
        ends = [block.address for block in inside[1:]] + [held.end]
        for block, upto in zip(inside, ends, strict=False):  # one end more where nothing is inside
            if block.address < position:
                raise ContradictionError(f"the block at {block.address:#x} overlaps the one before it")
            if block.address > position:
                yield Piece(position, block.address - position)
            room = min(upto, start.ends.get(block.address, upto)) - block.address
            size = block.size or _size(block, room, held, recorded)
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
