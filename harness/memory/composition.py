"""What the memory at a device's allocated peak consists of, by category or by allocation site."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from harness.memory.categories import UNKNOWN, category_of
from harness.memory.frames import has_python_frames
from harness.memory.replay import BlockLife, Lives, Timeline, live_at, records_requests
from harness.memory.snapshot import Device
from harness.memory.stacking import block_site


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes (requested) and number of the blocks that have `name` in common."""

    name: str
    blocks: int
    bytes: int


def composition_by_category(device: Device, timeline: Timeline, lives: Lives) -> list[Share]:
    """The allocated peak by category, largest first; the shares add up to the peak exactly.

    What the history and the final segments disagree on is counted as `unknown`.
    """
    has_stacks = any(has_python_frames(frames) for frames in device.history.frames)
    return _composition(device, timeline, lives, lambda b: category_of(b, history_has_stacks=has_stacks))


def composition_by_site(device: Device, timeline: Timeline, lives: Lives) -> list[Share]:
    """The allocated peak by allocation site, largest first; adds up like `composition_by_category`."""
    return _composition(device, timeline, lives, block_site)


def _composition(device: Device, timeline: Timeline, lives: Lives, name_of: Callable[[BlockLife], str]) -> list[Share]:
    peak = timeline.peak("allocated")
    live = live_at(lives, peak.index, has_requests=records_requests(device.history))
    totals: dict[str, tuple[int, int]] = {}
    for name, size in _named(live, name_of, peak.bytes):
        blocks, total = totals.get(name, (0, 0))
        totals[name] = (blocks + 1, total + size)
    shares = (Share(name, blocks, total) for name, (blocks, total) in totals.items())
    return sorted(shares, key=lambda share: (-share.bytes, share.name))


def _named(live: list[BlockLife], name_of: Callable[[BlockLife], str], expected: int) -> Iterable[tuple[str, int]]:
    for block in live:
        yield name_of(block), block.size
    if unexplained := expected - sum(block.size for block in live):
        yield UNKNOWN, unexplained
