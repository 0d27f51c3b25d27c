"""Is the model true to a recording? Its requests, replayed with its own settings, beside everything it recorded."""

from __future__ import annotations

from dataclasses import dataclass

from harness.allocator import Driver
from harness.memory.replay import Timeline
from harness.memory.snapshot import Action, Device, History
from harness.whatif.replay import Case, Replay, lowest_address
from harness.whatif.start import Start

_CALLS = (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
_GROWS = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
Call = tuple[int, int, int]
"""(action, address, bytes)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """How the replay with the recorded settings compares: `same_address` of `allocations` were put where the recording
    has them; `same_calls` of `calls` to the driver came in the same order with the same sizes; `reserved_error_bytes`
    is the largest difference of the reserved curve at any event."""

    allocations: int
    same_address: int
    calls: int
    same_calls: int
    reserved_error_bytes: int

    @property
    def exact(self) -> bool:
        return (self.allocations, self.calls, 0) == (self.same_address, self.same_calls, self.reserved_error_bytes)


class RecordedDriver(Driver):
    """Hands out the addresses that the recording's driver handed out as long as it is asked for the same, and keeps the
    calls."""

    def __init__(self, history: History, below: int) -> None:
        super().__init__(below)
        self.calls: list[Call] = []
        self._recorded = [
            (address, size)
            for action, address, size in zip(history.action, history.address, history.size, strict=True)
            if action in _GROWS
        ]
        self._recorded.reverse()

    def reserve(self, size: int) -> int:
        return self._recorded[-1][0] if self._recorded else super().reserve(size)

    def malloc(self, size: int, stream: int) -> int:
        self._follow(size)
        address = super().malloc(size, stream)
        if self._recorded:
            self._recorded.pop()
        self.calls.append((Action.SEGMENT_ALLOC, address, size))
        return address

    def map(self, address: int, size: int, stream: int) -> None:
        self._follow(size)
        super().map(address, size, stream)
        if self._recorded:
            self._recorded.pop()
        self.calls.append((Action.SEGMENT_MAP, address, size))

    def _follow(self, size: int) -> None:
        """Forgets the recording where it goes another way: its later addresses could overlap."""
        if self._recorded and self._recorded[-1][1] != size:
            self._recorded.clear()

    def free(self, address: int, size: int, stream: int) -> None:
        super().free(address, size, stream)
        self.calls.append((Action.SEGMENT_FREE, address, size))

    def unmap(self, address: int, size: int, stream: int) -> None:
        super().unmap(address, size, stream)
        self.calls.append((Action.SEGMENT_UNMAP, address, size))


def measure_fidelity(device: Device, timeline: Timeline, start: Start, itself: Case) -> Fidelity:
    """`itself` is how the recording was made. Raises ContradictionError (see `harness.whatif.start`)."""
    history = device.history
    driver = RecordedDriver(history, lowest_address(device, start))
    replay = Replay(device, start, itself.settings, itself, driver)
    error = abs(replay.allocator.reserved_bytes - timeline.base_reserved)
    for index in replay.steps():
        # Between a request and the memory it needed, the recording is ahead.
        if history.action[index] in (Action.ALLOC, Action.FREE_REQUESTED):
            error = max(error, abs(replay.allocator.reserved_bytes - int(timeline.reserved[index])))
    calls = [
        (action, address, size)
        for action, address, size in zip(history.action, history.address, history.size, strict=True)
        if action in _CALLS
    ]
    return Fidelity(
        allocations=history.action.count(Action.ALLOC),
        same_address=replay.same_address,
        calls=len(calls),
        same_calls=sum(made == wanted for made, wanted in zip(driver.calls, calls, strict=False)),
        reserved_error_bytes=error,
    )
