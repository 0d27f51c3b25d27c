"""Putting an allocator into a known state: for replays that start in the middle of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.allocator.blocks import Block, ExpandableSegment
from harness.allocator.expandable import address_space
from harness.allocator.model import Allocator


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a segment, in bytes. `requested_bytes` is None where it is free; `mapped` is False where an expandable
    segment has no memory behind it."""

    address: int
    size: int
    requested_bytes: int | None = None
    pending: bool = False
    mapped: bool = True


def restore_segment(
    allocator: Allocator,
    pieces: Sequence[Piece],
    *,
    stream: int,
    small: bool,
    private: int,
    expandable: bool,
    upto: int | None = None,
) -> dict[int, Block]:
    """Adds a segment of adjacent pieces, in order of address, and returns its blocks that are not free, by address.

    An expandable segment gets address space behind the last piece, as far as the address `upto`.
    """
    pool = allocator.pool(private, small=small)
    segment = None
    if expandable:
        page = allocator.settings.page_bytes(small=small)
        address, end = pieces[0].address, pieces[-1].address + pieces[-1].size
        behind = address + address_space(page)
        behind = behind if upto is None else min(behind, upto)
        segment = ExpandableSegment(address, max(behind, end) - address, page)
        if behind > end:
            pieces = [*pieces, Piece(end, behind - end, mapped=False)]
    taken = {}
    last: Block | None = None
    for piece in pieces:
        block = Block(pool, stream, piece.address, piece.size, segment)
        block.mapped = piece.mapped
        block.previous = last
        if last is not None:
            last.next = block
        last = block
        if piece.mapped:
            allocator.driver.restore(piece.size)
        if piece.requested_bytes is None:
            pool.insert(block)
        else:
            allocator.adopt(block, piece.requested_bytes, pending=piece.pending)
            taken[block.address] = block
    return taken
