"""Blocks of memory, the pools that hold the free ones, and the driver they came from.

As in torch's `c10/cuda/CUDACachingAllocator.cpp`: blocks of a segment form a list by address; a pool keeps its free
blocks ordered by (stream, size, address), here one sorted list a stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from harness.allocator.settings import ROUND_LARGE_BYTES


@dataclass(frozen=True, slots=True)
class ExpandableSegment:
    """A range of addresses whose pages are mapped as needed (sizes in bytes)."""

    address: int
    size: int
    page: int


class Block:
    """A piece of a segment: `size` bytes at `address`, of which `requested_bytes` were asked for.

    Neither allocated nor pending: free. Pending: freed, but a stream may still use it. An unmapped block is address
    space of an expandable segment without memory behind it.
    """

    __slots__ = (
        "address",
        "age_base",
        "allocated",
        "expandable",
        "mapped",
        "next",
        "pending",
        "pool",
        "previous",
        "requested_bytes",
        "size",
        "stream",
    )

    def __init__(
        self, pool: Pool, stream: int, address: int, size: int, expandable: ExpandableSegment | None = None
    ) -> None:
        self.pool = pool
        self.stream = stream
        self.address = address
        self.size = size
        self.requested_bytes = 0
        self.allocated = False
        self.pending = False
        self.mapped = True
        self.expandable = expandable
        self.previous: Block | None = None
        self.next: Block | None = None
        self.age_base = 0

    @property
    def is_free(self) -> bool:
        return not (self.allocated or self.pending)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.previous is None and self.next is None

    def cut(self, size: int) -> Block:
        """Shortens this block to `size`; the rest, in no pool yet, follows it."""
        rest = Block(self.pool, self.stream, self.address + size, self.size - size, self.expandable)
        rest.mapped = self.mapped
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size = size
        return rest

    def give_way(self) -> Block:
        """A free block in this one's place; this one is in no segment any more."""
        block = Block(self.pool, self.stream, self.address, self.size, self.expandable)
        block.previous, block.next = self.previous, self.next
        if self.previous is not None:
            self.previous.next = block
        if self.next is not None:
            self.next.previous = block
        self.allocated = self.pending = False
        return block

    def absorb(self, other: Block | None) -> None:
        """Takes in a neighbour that is free and, as this one, mapped or not; does nothing otherwise."""
        if other is None or other.allocated or other.pending or other.mapped != self.mapped:
            return
        self.pool.remove(other)
        if self.previous is other:
            self.address = other.address
            self.previous = other.previous
            if self.previous is not None:
                self.previous.next = self
        else:
            self.next = other.next
            if self.next is not None:
                self.next.previous = self
        self.size += other.size


_by_address = attrgetter("address")


class Pool:
    """The free blocks of one size class, those of requests up to 1 MiB or above, of the default or a private pool."""

    __slots__ = ("free", "private", "searches", "small", "unmapped")

    def __init__(self, private: int, *, small: bool) -> None:
        self.private = private
        self.small = small
        self.searches = 0
        """Requests since the start, counted where garbage is collected: what the age of a free block is counted in."""
        self.free: dict[int, tuple[list[tuple[int, ...]], list[Block]]] = {}
        """Stream -> (size, address) of its free blocks in order, and the blocks."""
        self.unmapped: dict[int, list[Block]] = {}
        """Stream -> its unmapped blocks by address."""

    def insert(self, block: Block) -> None:
        """Makes a mapped or unmapped block known as free."""
        if not block.mapped:
            insort(self.unmapped.setdefault(block.stream, []), block, key=_by_address)
            return
        block.age_base = self.searches
        keys, blocks = self.free.setdefault(block.stream, ([], []))
        key = (block.size, block.address)
        at = bisect_left(keys, key)
        keys.insert(at, key)
        blocks.insert(at, block)

    def remove(self, block: Block) -> None:
        if not block.mapped:
            unmapped = self.unmapped[block.stream]
            del unmapped[bisect_left(unmapped, block.address, key=_by_address)]
            return
        keys, blocks = self.free[block.stream]
        at = bisect_left(keys, (block.size, block.address))
        del keys[at], blocks[at]

    def at_least(self, stream: int, size: int) -> tuple[list[Block], int]:
        """The free blocks of a stream by (size, address), and the place of the first of at least `size` bytes."""
        keys, blocks = self.free.get(stream, ([], []))
        return blocks, bisect_left(keys, (size,))

    def free_blocks(self) -> Iterator[Block]:
        """Every free mapped block by (stream, size, address); the pool must not change meanwhile."""
        for stream in sorted(self.free):
            yield from self.free[stream][1]

    def age(self, block: Block) -> int:
        return self.searches - block.age_base


class Driver:
    """What CUDA's driver is asked for: hands out addresses, and counts bytes and calls. Mapping and unmapping pages
    counts too, as in torch's `num_device_alloc` and `num_device_free`.

    Addresses fall, as cudaMalloc's mostly do: of equally large free blocks that of the newer segment is taken. It
    matters: on recordings of H200s rising addresses gave up to 9 % more reserved bytes, falling ones the recorded ones.
    """

    def __init__(self, below: int = 1 << 47) -> None:
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.allocations = 0
        self.frees = 0
        self._lowest = below

    def malloc(self, size: int, stream: int) -> int:
        """The address of a new segment for a stream."""
        address = self.reserve(size)
        self._grew(size)
        return address

    def free(self, address: int, size: int, stream: int) -> None:
        """Takes a segment back."""
        self._shrank(size)

    def reserve(self, size: int) -> int:
        """A range of addresses, with nothing behind it yet."""
        self._lowest -= -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        return self._lowest

    def map(self, address: int, size: int, stream: int) -> None:
        """Puts memory behind a range of an expandable segment."""
        self._grew(size)

    def unmap(self, address: int, size: int, stream: int) -> None:
        """Takes the memory behind a range of an expandable segment back."""
        self._shrank(size)

    def restore(self, size: int) -> None:
        """Counts memory that was reserved before, in no call."""
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _grew(self, size: int) -> None:
        self.allocations += 1
        self.restore(size)

    def _shrank(self, size: int) -> None:
        self.frees += 1
        self.reserved_bytes -= size
