"""Expandable segments: one range of addresses a pool and stream, whose pages are mapped where they are needed.

As torch's `find_expandable_block`, `map_block`, `try_allocate_expandable_block` and `unmap_block`.
"""

from __future__ import annotations

from harness.allocator.blocks import Block, Driver, ExpandableSegment, Pool

# torch reserves 9/8 of the device's memory; how much that is decides nothing until it is used up.
ADDRESS_SPACE_BYTES = 1 << 45


def grow(pool: Pool, stream: int, size: int, page: int, driver: Driver) -> Block:
    """A free block of at least `size` bytes, at the lowest address that mapping makes one; it is in no pool."""
    block = _lowest_space(pool, stream, size) or _reserve(pool, stream, size, page, driver)
    if not block.mapped:
        _map(block, min(block.size, size), driver)
    while block.size < size:
        following = block.next
        assert following is not None  # there is space for `size`
        _map(following, min(size - block.size, following.size), driver)
        block = following
    pool.remove(block)
    return block


def unmap(block: Block, driver: Driver) -> None:
    """Gives back the pages that lie wholly in a free block; what is before and after them stays free."""
    segment = block.expandable
    assert segment is not None
    first = -(-(block.address - segment.address) // segment.page) * segment.page + segment.address
    end = block.address + block.size
    last = (end - segment.address) // segment.page * segment.page + segment.address
    if first >= last:
        return
    pool = block.pool
    pool.remove(block)
    if first > block.address:
        before, block = block, block.cut(first - block.address)
        pool.insert(before)
    if end > last:
        pool.insert(block.cut(last - first))
    block.mapped = False
    block.absorb(block.previous)
    block.absorb(block.next)
    pool.insert(block)
    driver.unmap(first, last - first, block.stream)
    if block.is_whole:
        pool.remove(block)


def expandable_size(block: Block) -> int:
    """Its size and that of the space it can grow into: what best fit goes by within expandable segments."""
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)


def address_space(page: int) -> int:
    """Bytes of addresses that a new segment gets, in whole pages."""
    return ADDRESS_SPACE_BYTES // page * page


def _lowest_space(pool: Pool, stream: int, size: int) -> Block | None:
    """The first of the adjacent free and unmapped blocks that together hold `size`, at the lowest address."""
    for unmapped in pool.unmapped.get(stream, ()):
        before = unmapped.previous
        start = before if before is not None and before.is_free else unmapped
        space = 0
        block: Block | None = start
        while block is not None and space < size and block.is_free:
            space += block.size
            block = block.next
        if space >= size:
            return start
    return None


def _reserve(pool: Pool, stream: int, size: int, page: int, driver: Driver) -> Block:
    space = max(address_space(page), -(-size // page) * page)
    segment = ExpandableSegment(driver.reserve(space), space, page)
    block = Block(pool, stream, segment.address, space, segment)
    block.mapped = False
    pool.insert(block)
    return block


def _map(block: Block, size: int, driver: Driver) -> None:
    """Maps the first `size` bytes, in whole pages, of an unmapped block and joins it with its free neighbours."""
    segment = block.expandable
    assert segment is not None
    # A restored block may have been mapped in other pages than those of the settings.
    mapped = min(-(-size // segment.page) * segment.page, block.size)
    pool = block.pool
    pool.remove(block)
    address = block.address
    if mapped < block.size:
        pool.insert(block.cut(mapped))
    block.mapped = True
    block.absorb(block.previous)
    block.absorb(block.next)
    pool.insert(block)
    driver.map(address, mapped, block.stream)
