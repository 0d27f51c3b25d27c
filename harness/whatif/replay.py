"""A device's recorded requests, made again of a model of the allocator."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from harness.allocator import Allocator, Block, Driver, OutOfMemoryError, Settings
from harness.memory.frames import BEFORE_HISTORY, allocation_site
from harness.memory.replay import records_requests
from harness.memory.snapshot import Action, Device, History
from harness.whatif.layout import lay_out
from harness.whatif.start import ContradictionError, Start

_RELEASES = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
_GROWS = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_BY_REQUEST = (*_GROWS, Action.OOM)
_MAX_ADDRESS = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to replay with. `limit_bytes`: what the process may reserve, None for no limit. `without_pending`: blocks
    can be reused when they are freed, as if no other stream had used them. `afresh`: blocks from before the history are
    allocated anew under `settings`, where the recording has them otherwise."""

    settings: Settings
    limit_bytes: int | None = None
    without_pending: bool = False
    afresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The request that did not fit: `index` into the history (None: before it), where it was made, and the bytes at
    that moment."""

    index: int | None
    site: str
    requested_bytes: int
    reserved_bytes: int
    allocated_bytes: int
    largest_free_bytes: int


class Replay:
    """One pass over a history; raises ContradictionError (see `harness.whatif.start`) when it cannot start.

    `steps` makes the requests; `out_of_memory` is the first that did not fit, with which it ends unless the recording
    went on after it. `same_address` counts the allocations that
    the model put where the recording has them.
    """

    def __init__(
        self, device: Device, start: Start, recorded: Settings, case: Case, driver: Driver | None = None
    ) -> None:
        self.history = device.history
        self.allocator = Allocator(case.settings, case.limit_bytes, driver or Driver(lowest_address(device, start)))
        self.out_of_memory: OutOfMemory | None = None
        self.same_address = 0
        self._limited = case.limit_bytes is not None
        self._has_requests = records_requests(self.history)
        self._defers = not case.without_pending
        self._private = sorted((s.address, s.address + s.total_size) for s in device.segments if s.private_pool)
        self._empties = {release.index for release in releases(self.history) if release.by_user or not self._limited}
        self._live: dict[int, Block] = {}
        self._pending: dict[tuple[int, int], Block] = {}
        if case.afresh:
            self._allocate_anew(start)
        else:
            self._take_over(lay_out(start, self.allocator, recorded))
        self.allocator.reset_peaks()

    def steps(self) -> Iterator[int]:
        """Makes each event's request in turn and yields its index; stops where memory runs out."""
        if self.out_of_memory is not None:
            return
        history = self.history
        events = zip(history.action, history.address, history.size, history.stream, strict=True)
        for index, (action, address, size, stream) in enumerate(events):
            if action == Action.ALLOC:
                block = self._malloc(index, address, size, stream)
                if block is None:
                    return
                self._live[address] = block
                self.same_address += block.address == address
            elif action == Action.FREE_REQUESTED:
                self._free(address, stream)
            elif action == Action.FREE_COMPLETED:
                self._complete(address, stream)
            elif index in self._empties:
                self.allocator.empty_cache()
            elif action == Action.OOM and self._limited:
                # The program went on without it, whether it fits now or not.
                block = self._malloc(index, address, size, stream)
                if block is not None:
                    self.allocator.free(block)
            yield index

    def _take_over(self, held: dict[int, Block]) -> None:
        for address, block in held.items():
            if block.allocated:
                self._live[address] = block
            elif self._defers:
                self._pending[address, block.stream] = block
            else:
                self.allocator.complete_free(block)

    def _allocate_anew(self, start: Start) -> None:
        """The blocks of the highest addresses first: where they fall with time (see `Driver`), the oldest."""
        for held in reversed(start.blocks):
            block = self._malloc(None, held.address, held.requested_bytes, held.stream)
            if block is None:
                return
            self._live[held.address] = block
            if held.pending:
                self._free(held.address, held.stream)

    def _malloc(self, index: int | None, address: int, size: int, stream: int) -> Block | None:
        try:
            return self.allocator.malloc(size, stream, int(self._is_private(address)))
        except OutOfMemoryError as error:
            self.out_of_memory = self.out_of_memory or OutOfMemory(
                index=index,
                site=BEFORE_HISTORY if index is None else allocation_site(self.history.frames[index]),
                requested_bytes=size,
                reserved_bytes=error.reserved_bytes,
                allocated_bytes=error.allocated_bytes,
                largest_free_bytes=error.largest_free_bytes,
            )
            return None

    def _free(self, address: int, stream: int) -> None:
        block = self._live.pop(address, None)
        if block is None:  # what was not allocated in the history is in its start
            raise ContradictionError(f"the block at {address:#x} is freed twice")
        self.allocator.request_free(block)
        if self._defers and self._has_requests:
            self._pending[address, stream] = block
        else:
            self.allocator.complete_free(block)

    def _complete(self, address: int, stream: int) -> None:
        if not self._has_requests:
            self._free(address, stream)
        elif (block := self._pending.pop((address, stream), None)) is not None:
            self.allocator.complete_free(block)

    def _is_private(self, address: int) -> bool:
        """Whether the recording has an address in a private pool (of CUDA graphs)."""
        at = bisect_right(self._private, (address, _MAX_ADDRESS)) - 1
        return at >= 0 and address < self._private[at][1]


@dataclass(frozen=True, slots=True)
class Release:
    """A run of recorded segment frees that begins at event `index`; `by_user`: by `empty_cache()` and not by a request
    that did not fit."""

    index: int
    by_user: bool


def releases(history: History) -> list[Release]:
    """The recorded releases. Those followed by new memory or its lack were made by a request, unless their stack says
    that `empty_cache` was called."""
    found = []
    first: int | None = None
    for index, action in enumerate([*history.action, Action.SNAPSHOT]):
        if action in _RELEASES:
            first = index if first is None else first
        elif first is not None and action != Action.FREE_COMPLETED:
            called = any(
                frame.get("name") == "empty_cache" for frame in history.frames[first] if isinstance(frame, dict)
            )
            found.append(Release(first, called or action not in _BY_REQUEST))
            first = None
    return found


def lowest_address(device: Device, start: Start) -> int:
    """Below it, no recorded segment lies."""
    held = [held.address for held in start.ranges] + [segment.address for segment in device.segments]
    history = zip(device.history.action, device.history.address, strict=True)
    return min([*held, *(address for action, address in history if action in _GROWS)], default=1 << 47)
