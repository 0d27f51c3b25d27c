"""A model of torch's CUDA caching allocator: the same requests in the same order reserve the same bytes.

Follows `c10/cuda/CUDACachingAllocator.cpp` of torch 2.11 to 2.13 (`DeviceCachingAllocator`), named function by
function below. Left out: what a failing driver does below the limit, callbacks that free memory, and captures of CUDA
graphs (their private pools are there).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.allocator import expandable
from harness.allocator.blocks import Block, Driver, Pool
from harness.allocator.settings import MIN_BLOCK_BYTES, SMALL_BYTES, Settings
from harness.errors import MeshscopeError
from harness.text import size


class OutOfMemoryError(MeshscopeError):
    """The limit does not allow a request, whatever is given back (all in bytes)."""

    def __init__(
        self,
        *,
        requested_bytes: int,
        limit_bytes: int,
        reserved_bytes: int,
        allocated_bytes: int,
        largest_free_bytes: int,
    ) -> None:
        self.requested_bytes = requested_bytes
        self.limit_bytes = limit_bytes
        self.reserved_bytes = reserved_bytes
        self.allocated_bytes = allocated_bytes
        self.largest_free_bytes = largest_free_bytes
        super().__init__(
            f"out of memory: {size(requested_bytes)} asked for with {size(reserved_bytes)} of {size(limit_bytes)} "
            f"reserved, {size(allocated_bytes)} allocated; largest free block {size(largest_free_bytes)}"
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjacent blocks with memory behind them, as one `cudaMalloc` or the mapped range of an expandable segment has."""

    stream: int
    pool: Pool
    blocks: list[Block]

    @property
    def address(self) -> int:
        return self.blocks[0].address

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)


class Allocator:
    """One device's allocator. Streams are numbers; `pool` 0 is the default pool, others are private ones.

    `limit_bytes` is what `torch.cuda.set_per_process_memory_fraction` allows (None: no limit, and no garbage
    collection, which torch does under a limit only). `driver` decides addresses.
    """

    def __init__(self, settings: Settings, limit_bytes: int | None = None, driver: Driver | None = None) -> None:
        self.settings = settings
        self.limit_bytes = limit_bytes
        self.driver = driver or Driver()
        self.allocated_bytes = 0
        self.active_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_active_bytes = 0
        self.retries = 0
        """How often everything cached had to be given back before a request could be served."""
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._active: set[Block] = set()
        self._pending: dict[Block, None] = {}
        self._collects = limit_bytes is not None and settings.garbage_collection_threshold > 0

    @property
    def reserved_bytes(self) -> int:
        return self.driver.reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        return self.driver.peak_reserved_bytes

    def reset_peaks(self) -> None:
        self.driver.peak_reserved_bytes = self.driver.reserved_bytes
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_active_bytes = self.active_bytes

    def malloc(self, size_bytes: int, stream: int = 0, pool: int = 0) -> Block:
        """A block for `size_bytes` (>= 0). Raises OutOfMemoryError where the limit does not allow it."""
        size = self.settings.round_bytes(size_bytes)
        home = self.pool(pool, small=size <= SMALL_BYTES)
        block = self._take(home, stream, size) or self._new_block(home, stream, size)
        if self._splits(block, size):
            home.insert(block.cut(size))
        self._activate(block, size_bytes)
        return block

    def free(self, block: Block) -> None:
        """Frees a block that no other stream uses: it can be reused at once."""
        self.request_free(block)
        self.complete_free(block)

    def request_free(self, block: Block) -> None:
        """Frees a block that another stream may still use (`record_stream`): it stays active until `complete_free`."""
        if not block.allocated:
            raise ValueError(f"the block at {block.address:#x} is not allocated")
        block.allocated = False
        block.pending = True
        self.allocated_bytes -= block.size
        self._pending[block] = None

    def complete_free(self, block: Block) -> None:
        """Makes a block whose free was requested reusable; does nothing where running short of memory did already."""
        if not block.pending:
            return
        del self._pending[block]
        self._active.remove(block)
        self.active_bytes -= block.size
        block.pending = False
        self._make_reusable(block)

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache()`: waits for pending blocks and gives back what no block uses (torch's
        `release_cached_blocks`)."""
        for block in self._pending:
            self._active.remove(block)
            self.active_bytes -= block.size
            # Its owner still holds it, to complete it later: it must not be handed out again.
            self._make_reusable(block.give_way())
        self._pending.clear()
        for small in (False, True):
            if (0, small) in self._pools:
                self._release_pool(self._pools[0, small])

    def segments(self) -> Iterator[Segment]:
        """What is reserved, in order of pools, streams and addresses."""
        blocks = [*self._active, *(block for pool in self._pools.values() for block in pool.free_blocks())]
        heads = (block for block in blocks if block.previous is None or not block.previous.mapped)
        for head in sorted(heads, key=lambda b: (b.pool.private, b.pool.small, b.stream, b.address)):
            inside = []
            block: Block | None = head
            while block is not None and block.mapped:
                inside.append(block)
                block = block.next
            yield Segment(head.stream, head.pool, inside)

    def pool(self, private: int, *, small: bool) -> Pool:
        key = (private, small)
        if key not in self._pools:
            self._pools[key] = Pool(private, small=small)
        return self._pools[key]

    def adopt(self, block: Block, requested_bytes: int, *, pending: bool = False) -> None:
        """Takes a block that is in no pool as handed out before; for replays that start in the middle."""
        self._activate(block, requested_bytes)
        if pending:
            self.request_free(block)

    def _make_reusable(self, block: Block) -> None:
        """torch's `free_block`."""
        block.absorb(block.previous)
        block.absorb(block.next)
        block.pool.insert(block)

    def _activate(self, block: Block, requested_bytes: int) -> None:
        block.allocated = True
        block.requested_bytes = requested_bytes
        self._active.add(block)
        self.allocated_bytes += block.size
        self.active_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self.active_bytes > self.peak_active_bytes:
            self.peak_active_bytes = self.active_bytes

    def _take(self, pool: Pool, stream: int, size: int) -> Block | None:
        """The best fitting free block, out of its pool (torch's `get_free_block`)."""
        if self._collects:
            pool.searches += 1
        blocks, at = pool.at_least(stream, size)
        if at == len(blocks):
            return None
        if blocks[at].expandable is not None:
            at = self._best_expandable(blocks, at)
            if at == len(blocks):
                return None
        block = blocks[at]
        bound = self.settings.max_split_size_bytes
        if bound is not None:
            if size < bound <= block.size:
                return None
            if size >= bound and block.size >= size + self.settings.max_non_split_rounding_bytes:
                return None
        pool.remove(block)
        return block

    def _best_expandable(self, blocks: list[Block], at: int) -> int:
        """Where to take from, `at` being an expandable block: what can grow least; none of them where they are off."""
        if not self.settings.expandable_segments:
            while at < len(blocks) and blocks[at].expandable is not None:
                at += 1
            return at
        while (
            at + 1 < len(blocks)
            and blocks[at].expandable is not None
            and expandable.expandable_size(blocks[at + 1]) < expandable.expandable_size(blocks[at])
        ):
            at += 1
        return at

    def _splits(self, block: Block, size: int) -> bool:
        """torch's `should_split`."""
        rest = block.size - size
        if block.pool.small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK_BYTES
        bound = self.settings.max_split_size_bytes
        return rest > SMALL_BYTES and (bound is None or size < bound)

    def _new_block(self, pool: Pool, stream: int, size: int) -> Block:
        """A block of new memory, after giving back cached memory where the limit is in the way."""
        if self._collects:
            self._collect_garbage()
        block = self._ask_driver(pool, stream, size)
        if block is None and self._release_oversize(pool, stream, size):
            block = self._ask_driver(pool, stream, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._ask_driver(pool, stream, size)
        if block is None:
            assert self.limit_bytes is not None  # nothing else refuses
            free = (b.size for p in self._pools.values() for b in p.free_blocks())
            raise OutOfMemoryError(
                requested_bytes=size,
                limit_bytes=self.limit_bytes,
                reserved_bytes=self.reserved_bytes,
                allocated_bytes=self.allocated_bytes,
                largest_free_bytes=max(free, default=0),
            )
        return block

    def _ask_driver(self, pool: Pool, stream: int, size: int) -> Block | None:
        """torch's `alloc_block`; None where the limit is in the way."""
        segment = self.settings.segment_bytes(size)
        if self.limit_bytes is not None and self.reserved_bytes + segment > self.limit_bytes:
            return None
        if self.settings.expandable_segments:
            return expandable.grow(pool, stream, size, self.settings.page_bytes(small=pool.small), self.driver)
        return Block(pool, stream, self.driver.malloc(segment, stream), segment)

    def _collect_garbage(self) -> None:
        """Gives back whole free segments of the large pool, those unused for longest first, above a threshold (torch's
        `garbage_collect_cached_blocks`)."""
        assert self.limit_bytes is not None
        threshold = int(self.settings.garbage_collection_threshold * self.limit_bytes)
        excess = self.reserved_bytes - threshold
        large = self._pools.get((0, False))
        if excess <= 0 or large is None:
            return
        candidates = [block for block in large.free_blocks() if block.is_whole]
        ages = sum(large.age(block) for block in candidates)
        while candidates and excess > 0:
            mean = ages / len(candidates)
            old = [block for block in candidates if large.age(block) >= mean]
            for block in old:
                ages -= large.age(block)
                excess -= block.size
                self._release(block)
            candidates = [block for block in candidates if large.age(block) < mean]

    def _release_oversize(self, pool: Pool, stream: int, size: int) -> bool:
        """Gives back a free block that is large enough and may not be split, or several of them, the largest first;
        whether that was enough (torch's `release_available_cached_blocks`)."""
        bound = self.settings.max_split_size_bytes
        if bound is None or self.settings.expandable_segments:  # parts of those cannot be given back so
            return False
        wanted = max(size, bound)
        blocks, at = pool.at_least(stream, wanted)
        if at < len(blocks):
            self._release(blocks[at])
            return True
        released = 0
        while released < wanted and blocks and blocks[-1].size >= bound:
            released += blocks[-1].size
            self._release(blocks[-1])
        return released >= wanted

    def _release_pool(self, pool: Pool) -> None:
        """torch's `release_blocks`."""
        blocks = list(pool.free_blocks())
        for block in blocks:
            if block.expandable is None and block.is_whole:
                self._release(block)
        for block in blocks:
            if block.expandable is not None:
                expandable.unmap(block, self.driver)

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.driver.free(block.address, block.size, block.stream)
