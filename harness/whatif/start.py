"""What a device held before its recorded history: segments and blocks, from the final segments and the history."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter

from harness.allocator.settings import LARGE_SEGMENT_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES
from harness.memory.replay import records_requests
from harness.memory.snapshot import PENDING_STATES, Action, Device, History

Owner = tuple[bool, bool, bool, int]
"""(expandable, private, small, stream)"""
# torch reserves 9/8 of the device's memory for an expandable segment.
_NEAR_BYTES = 1 << 38
by_address = attrgetter("address")


class ContradictionError(Exception):
    """The history and the final segments cannot both be true; the message says where."""


@dataclass(slots=True)
class HeldBlock:
    """A block from before the history. `size` is None where only the request is known (bytes); `freed_at`: the event
    after which its memory may be another's."""

    address: int
    stream: int
    requested_bytes: int
    size: int | None
    pending: bool
    freed_at: int | None = None


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
    ends: dict[int, int] = field(default_factory=dict)
    """Address of a block of unknown size -> the lowest address behind it that is allocated while it lives."""
    bases: dict[Owner, int] = field(default_factory=dict)
    """Whose expandable segment -> the lowest address that is mapped in it, at the start or later."""

    @property
    def reserved_bytes(self) -> int:
        return sum(held.size for held in self.ranges)


def find_start(device: Device) -> Start:
    """What `device` held before its history. Raises ContradictionError."""
    blocks = sorted(_blocks(device), key=by_address)
    ranges = _joined(_ranges(device))
    _require_own_addresses(ranges, device.history)
    return Start(ranges, blocks, _ends(device, blocks), _bases(device, ranges))


def _blocks(device: Device) -> list[HeldBlock]:
    """The blocks that are freed or completed in the history, or there at its end, without being allocated in it."""
    history = device.history
    found: list[HeldBlock] = []
    allocated: set[int] = set()
    pending: set[tuple[int, int]] = set()
    requests = records_requests(history)
    pending_blocks: dict[tuple[int, int], HeldBlock] = {}
    events = zip(history.action, history.address, history.size, history.stream, strict=True)
    for index, (action, address, size, stream) in enumerate(events):
        if action == Action.ALLOC:
            allocated.add(address)
        elif action == Action.FREE_REQUESTED or (action == Action.FREE_COMPLETED and not requests):
            if address not in allocated:
                found.append(HeldBlock(address, stream, size, None, False, None if requests else index))
                pending_blocks[address, stream] = found[-1]
            allocated.discard(address)
            pending.add((address, stream))
        elif action == Action.FREE_COMPLETED:
            if (address, stream) not in pending:
                found.append(HeldBlock(address, stream, size, None, True, index))
            elif (held := pending_blocks.pop((address, stream), None)) is not None:
                held.freed_at = index
            pending.discard((address, stream))
    for block in device.blocks():
        if block.state in PENDING_STATES:
            if (block.address, block.stream) not in pending:
                found.append(HeldBlock(block.address, block.stream, block.requested_size, block.size, True))
        elif block.state != "inactive" and block.address not in allocated:
            found.append(HeldBlock(block.address, block.stream, block.requested_size, block.size, False))
    return found


def _ends(device: Device, blocks: list[HeldBlock]) -> dict[int, int]:
    history = device.history
    first: dict[int, int] = {}
    """Address -> the event that first allocates it."""
    for index, (action, address) in enumerate(zip(history.action, history.address, strict=True)):
        if action == Action.ALLOC:
            first.setdefault(address, index)
    addresses = sorted(first)
    found = {}
    for block in blocks:
        if block.size is not None:
            continue
        until = len(history) if block.freed_at is None else block.freed_at
        behind = block.address + block.requested_bytes
        for at in range(bisect_left(addresses, behind), len(addresses)):
            if addresses[at] > behind + 2 * SMALL_BYTES:
                break
            if first[addresses[at]] < until:
                found[block.address] = addresses[at]
                break
    return found


def _ranges(device: Device) -> list[HeldRange]:
    """The final segments with the history's changes undone, the last first."""
    ranges: list[HeldRange] = []
    for s in device.segments:
        if s.total_size:
            _put(ranges, HeldRange(s.address, s.total_size, s.stream, s.expandable, s.small, s.private_pool))
    history = device.history
    requests = _requests(history)
    for index in range(len(history) - 1, -1, -1):
        action = history.action[index]
        address, size, stream = history.address[index], history.size[index], history.stream[index]
        if action in (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP):
            expandable = action == Action.SEGMENT_UNMAP
            small = _is_small_range(requests, address, size) if expandable else size == SMALL_SEGMENT_BYTES
            _put(ranges, HeldRange(address, size, stream, expandable, small, False))
        elif action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
            _take_out(ranges, address, size, f"event {index}")
    return ranges


def _put(ranges: list[HeldRange], held: HeldRange) -> None:
    at = bisect_left(ranges, held.address, key=by_address)
    for lower, upper in pairwise([*ranges[max(at - 1, 0) : at], held, *ranges[at : at + 1]]):
        if lower.end > upper.address:
            raise ContradictionError(f"the segments at {lower.address:#x} and {upper.address:#x} overlap")
    ranges.insert(at, held)


def _requests(history: History) -> list[tuple[int, int]]:
    """(address, bytes) of every block that is allocated or reusable in the history, sorted."""
    events = zip(history.action, history.address, history.size, strict=True)
    return sorted((at, size) for action, at, size in events if action in (Action.ALLOC, Action.FREE_COMPLETED))


def _is_small_range(requests: list[tuple[int, int]], address: int, size: int) -> bool:
    """Which pool an unmapped range was of: its pages are small, or a request from it was. `requests`: (address, bytes),
    sorted."""
    first = bisect_left(requests, (address, 0))
    if size % LARGE_SEGMENT_BYTES:
        return True
    return first < len(requests) and requests[first][0] < address + size and requests[first][1] <= SMALL_BYTES


def _joined(ranges: list[HeldRange]) -> list[HeldRange]:
    """Ranges of one expandable segment that touch are one: blocks lie across them."""
    found: list[HeldRange] = []
    for held in ranges:
        last = found[-1] if found else None
        if last is not None and held.expandable and last.end == held.address and owner_of(last) == owner_of(held):
            last.size += held.size
        else:
            found.append(held)
    return found


def _bases(device: Device, ranges: list[HeldRange]) -> dict[Owner, int]:
    bases: dict[Owner, int] = {}
    for held in ranges:
        if held.expandable:
            bases.setdefault(owner_of(held), held.address)
    history = device.history
    requests = _requests(history) if bases else []
    for action, address, size, stream in zip(
        history.action, history.address, history.size, history.stream, strict=True
    ):
        if action == Action.SEGMENT_MAP and bases:
            owner = (True, False, _is_small_range(requests, address, size), stream)
            if bases.get(owner, 0) - _NEAR_BYTES < address < bases.get(owner, 0):
                bases[owner] = address
    return bases


def _require_own_addresses(ranges: list[HeldRange], history: History) -> None:
    """Nobody else gets addresses between the pages of an expandable segment (cuMemAddressReserve). Private pools are
    left out: they count as one, but have a segment each."""
    requests = _requests(history)
    spans: dict[Owner, tuple[int, int]] = {}
    mapped = [(owner_of(held), held.address, held.end) for held in ranges if held.expandable and not held.private]
    for action, address, size, stream in zip(
        history.action, history.address, history.size, history.stream, strict=True
    ):
        if action == Action.SEGMENT_MAP:
            mapped.append(((True, False, _is_small_range(requests, address, size), stream), address, address + size))
    for owner, address, end in mapped:
        low, high = spans.get(owner, (address, end))
        spans[owner] = min(low, address), max(high, end)
    fixed = [held.address for held in ranges if not held.expandable]
    for low, high in spans.values():
        at = bisect_left(fixed, low)
        if at < len(fixed) and fixed[at] < high:
            raise ContradictionError(
                f"the segment at {fixed[at]:#x} lies within the expandable one from {low:#x} to {high:#x}"
            )


def owner_of(held: HeldRange) -> Owner:
    return held.expandable, held.private, held.small, held.stream


def _take_out(ranges: list[HeldRange], address: int, size: int, where: str) -> None:
    """Takes what an event added out of the ranges; mapped ranges may have grown together, or be mapped in parts."""
    end = address + size
    while address < end:
        at = bisect_right(ranges, address, key=by_address) - 1
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
