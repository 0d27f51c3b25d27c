"""When the blocks of a history were allocated, by label or by range."""

from __future__ import annotations

from harness.memory.categories import labels_of
from harness.memory.ranges import keys_at, phase_of_range, step_of_range
from harness.memory.replay import Lives
from harness.memory.snapshot import Device


def place_blocks(device: Device, lives: Lives) -> None:
    """Sets `phase` and `step` of the blocks allocated within the history: from the block's label, else from the
    named range around its allocation.

    Labels are those of the thread that allocates, ranges those of the process: on CUDA the backward runs in threads
    of its own, which the recorder's labels do not reach.
    """
    times = device.history.time_us
    phases = keys_at(times, device.annotations, phase_of_range) if times else None
    steps = keys_at(times, device.annotations, step_of_range) if times else None
    for block in lives.blocks:
        if block.allocated_at is None:
            continue
        labels = labels_of(block.metadata) if block.metadata else {}
        block.phase = labels.get("phase") or (phases[block.allocated_at] if phases else None)
        step = labels.get("step", "")
        known = step.isascii() and step.isdecimal() and len(step) < 16
        block.step = int(step) if known else steps[block.allocated_at] if steps else None
