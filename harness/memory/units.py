"""What FSDP2 allocates for each of its units, from the ranges that a snapshot names."""

from __future__ import annotations

import re
from bisect import bisect_left

from harness.memory.categories import category_of
from harness.memory.frames import has_python_frames
from harness.memory.ranges import ranges_of
from harness.memory.replay import Lives
from harness.memory.snapshot import Device

RANGE = re.compile(r"^FSDP::(\w+) \((.+)\)$")

# The buffers that are allocated within a range of each name (torch/distributed/fsdp/_fully_shard).
BUFFERS = {
    "all_gather": frozenset({"all_gather_input", "all_gather_output"}),
    "all_gather_copy_out": frozenset({"unsharded_parameter"}),
    # Where there is a single shard, nothing is gathered: parameters are cast and copied right here.
    "pre_forward": frozenset({"unsharded_parameter"}),
    "pre_backward": frozenset({"unsharded_parameter"}),
    "post_backward_reduce": frozenset({"reduce_scatter_input"}),
}

UnitBytes = dict[tuple[str, str], int]


def unit_bytes(device: Device, lives: Lives) -> UnitBytes:
    """(FSDP unit, category) → the most requested bytes that one of its ranges allocated; empty without named ranges."""
    times = device.history.time_us
    found: UnitBytes = {}
    if not times:
        return found
    has_stacks = any(has_python_frames(frames) for frames in device.history.frames)
    blocks = [block for block in lives.blocks if block.allocated_at is not None]
    allocated = sorted((times[block.allocated_at or 0], number) for number, block in enumerate(blocks))
    for (operation, unit), start_us, end_us in ranges_of(device.annotations, _buffers_of):
        totals: dict[str, int] = {}
        for time_us, number in allocated[bisect_left(allocated, (start_us, 0)) :]:
            if end_us is not None and time_us >= end_us:
                break
            block = blocks[number]
            category = category_of(block, history_has_stacks=has_stacks)
            # The tables of pointers that the copying kernels take are freed as the range ends, as no buffer of it is;
            # the cast of an all-gather's input is.
            freed = block.requested_at is not None and end_us is not None and times[block.requested_at] <= end_us
            if category in BUFFERS[operation] and (category == "all_gather_input" or not freed):
                totals[category] = totals.get(category, 0) + block.size
        for category, total in totals.items():
            found[unit, category] = max(total, found.get((unit, category), 0))
    return found


def held_bytes(device: Device) -> dict[tuple[str, str], int]:
    """(category, name) → bytes of the storages that hold parameters and gradients at the end, as the recorder named
    them. FSDP2's gradients of a unit are one storage, under the name of its first parameter."""
    found: dict[tuple[str, str], int] = {}
    for holder in device.holders:
        if holder.category in ("parameter", "gradient"):
            key = holder.category, holder.name
            found[key] = found.get(key, 0) + holder.size
    return found


def _buffers_of(name: str) -> tuple[str, str] | None:
    match = RANGE.match(name)
    return (match[1], match[2]) if match and match[1] in BUFFERS else None
