"""What a replay reserved: the peak, what of it was unused and where, and the calls to the driver."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from harness.allocator import Allocator, Driver, Settings
from harness.memory.snapshot import Device
from harness.whatif.replay import Case, OutOfMemory, Replay
from harness.whatif.start import Start

_BEFORE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBytes:
    """What a pool holds for a stream: `pool` is small (requests up to 1 MiB), large, or one of the two and private."""

    pool: str
    stream: int
    reserved_bytes: int
    allocated_bytes: int
    pending_bytes: int

    @property
    def unused_bytes(self) -> int:
        """Reserved and not allocated: fragmentation, and what waits for a stream."""
        return self.reserved_bytes - self.allocated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A case, replayed. `index` is the event of the reserved peak (-1: before the history), of equal ones that with the
    most allocated: what is unused then is fragmentation. `pools` are those at that moment, the one with the most unused
    bytes first; `device_allocations` and `device_frees` count calls to the driver in the history."""

    case: Case
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    final_reserved_bytes: int
    index: int
    pools: list[PoolBytes]
    device_allocations: int
    device_frees: int
    retries: int
    out_of_memory: OutOfMemory | None

    @property
    def allocated_bytes(self) -> int:
        """At the reserved peak."""
        return sum(pool.allocated_bytes for pool in self.pools)

    @property
    def unused_bytes(self) -> int:
        """At the reserved peak: reserved and not allocated."""
        return sum(pool.unused_bytes for pool in self.pools)


def measure(
    device: Device, start: Start, recorded: Settings, case: Case, driver: Callable[[], Driver] | None = None
) -> Outcome:
    """Replays a case to its end, and again to its peak. Raises ContradictionError (see `harness.whatif.start`).

    `driver` makes one that decides addresses.
    """

    def begin() -> Replay:
        return Replay(device, start, recorded, case, driver() if driver else None)

    replay = begin()
    allocator = replay.allocator
    allocations, frees = allocator.driver.allocations, allocator.driver.frees
    fullest = (allocator.reserved_bytes, allocator.allocated_bytes)
    index = _BEFORE
    for step in replay.steps():
        if allocator.reserved_bytes >= fullest[0]:
            now = (allocator.reserved_bytes, allocator.allocated_bytes)
            if now > fullest:
                fullest, index = now, step
    again = begin()
    if index != _BEFORE:
        for step in again.steps():
            if step == index:
                break
    return Outcome(
        case=case,
        peak_reserved_bytes=fullest[0],
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        final_reserved_bytes=allocator.reserved_bytes,
        index=index,
        pools=pool_bytes(again.allocator),
        device_allocations=allocator.driver.allocations - allocations,
        device_frees=allocator.driver.frees - frees,
        retries=allocator.retries,
        out_of_memory=replay.out_of_memory,
    )


def pool_bytes(allocator: Allocator) -> list[PoolBytes]:
    """What each pool holds for each stream now, the one with the most unused bytes first."""
    totals: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    for segment in allocator.segments():
        name = f"{'private ' if segment.pool.private else ''}{'small' if segment.pool.small else 'large'}"
        total = totals[name, segment.stream]
        for block in segment.blocks:
            total[0] += block.size
            total[1] += block.size * block.allocated
            total[2] += block.size * block.pending
    found = [
        PoolBytes(pool=pool, stream=stream, reserved_bytes=reserved, allocated_bytes=allocated, pending_bytes=pending)
        for (pool, stream), (reserved, allocated, pending) in totals.items()
    ]
    return sorted(found, key=lambda item: (-item.unused_bytes, item.pool, item.stream))
