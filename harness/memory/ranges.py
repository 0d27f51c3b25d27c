"""The named ranges (`record_function`) of a snapshot: which step and which phase they are, and when."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from harness.memory.snapshot import Annotation

Key = TypeVar("Key", bound=Hashable)

_STEP = re.compile(r"^(?:ProfilerStep#|step[/ ])(\d{1,15})$")
_PHASE = re.compile(r"^(?:phase/|meshscope[:/])?(forward|backward|optimizer)(?:[/ ]\d+)?$")


def step_of_range(name: str) -> int | None:
    """N of `ProfilerStep#N` and `step/N`, else None."""
    match = _STEP.match(name)
    return int(match[1]) if match else None


def phase_of_range(name: str) -> str | None:
    """forward, backward or optimizer for the ranges that bear that name or torch's `Optimizer.step#…`."""
    if name.startswith("Optimizer.step#"):
        return "optimizer"
    match = _PHASE.match(name)
    return match[1] if match else None


def ranges_of(
    annotations: Iterable[Annotation], key_of: Callable[[str], Key | None]
) -> Iterator[tuple[Key, int, int | None]]:
    """(key, start, end) in µs of each range whose name has a key; end is None for one still open, a range that was
    open already is left out."""
    open_ranges: dict[str, list[tuple[Key, int]]] = {}
    for annotation in annotations:
        key = key_of(annotation.name)
        if key is None:
            continue
        stack = open_ranges.setdefault(annotation.name, [])
        if annotation.start:
            stack.append((key, annotation.time_us))
        elif stack:
            key, start_us = stack.pop()
            yield key, start_us, annotation.time_us
    for stack in open_ranges.values():
        for key, start_us in stack:
            yield key, start_us, None


def keys_at(
    time_us: list[int], annotations: Iterable[Annotation], key_of: Callable[[str], Key | None]
) -> list[Key | None]:
    """For each of the times, in the order recorded, the key of the range around it; the innermost where they nest."""
    # Threads may record a few microseconds out of order; positions need a sorted clock.
    clock = np.maximum.accumulate(np.array(time_us, dtype=np.int64))
    keys: list[Key | None] = [None] * len(time_us)
    for key, start_us, end_us in sorted(ranges_of(annotations, key_of), key=lambda found: found[1]):
        first = int(np.searchsorted(clock, start_us, side="left"))
        last = len(keys) if end_us is None else int(np.searchsorted(clock, end_us, side="left"))
        keys[first:last] = [key] * (last - first)
    return keys
