"""How long an operation takes: on a GPU the device alone, on a CPU the call.

On a GPU the host would show in every short kernel. So the stream is kept busy first (`torch.cuda._sleep`) while the
host issues the repetitions, which then run one after the other as in a step where the host is ahead; two events take
the time. What is read was used just before, so what fits into the caches is read from there, as in a step.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

WARM_UP = 2
MOST_REPETITIONS = 20
LEAST_SLEEP_CYCLES, MOST_SLEEP_CYCLES = 2**21, 2**28
"""About a millisecond and 0.15 seconds of an H200."""

RESTS = 2
"""A GPU rests so many times as long as it worked, so that all points are of the same clock."""

Operation = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Time:
    """Median of the blocks; half their interquartile range in percent of it."""

    ns: int
    spread_pct: float


class Clock:
    """`blocks`: how often a point is measured; `block_ns`: for how long, where one call does not take longer."""

    def __init__(self, device: torch.device, *, blocks: int, block_ns: int) -> None:
        self.device, self.blocks, self.block_ns = device, blocks, block_ns
        self._sleep_cycles = LEAST_SLEEP_CYCLES

    def measure(self, operation: Operation) -> Time:
        for _ in range(WARM_UP):
            operation()
        self._sleep_cycles = LEAST_SLEEP_CYCLES
        estimate = self._block(operation, 1)
        repetitions = max(1, min(MOST_REPETITIONS, int(self.block_ns / max(1.0, estimate))))
        return summary([self._block(operation, repetitions) for _ in range(self.blocks)])

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Gives back what a section has left in the allocator's cache."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def host(self, operation: Operation) -> float:
        """Nanoseconds of one call on the host, of a device that has nothing to do."""
        self.synchronize()
        begin = time.perf_counter_ns()
        operation()
        return float(time.perf_counter_ns() - begin)

    def _block(self, operation: Operation, repetitions: int) -> float:
        if self.device.type == "cuda":
            return self._device_block(operation, repetitions)
        begin = time.perf_counter_ns()
        for _ in range(repetitions):
            operation()
        return (time.perf_counter_ns() - begin) / repetitions

    def _device_block(self, operation: Operation, repetitions: int) -> float:
        """Nanoseconds a repetition; again with a longer sleep if the device came to the first before the host had
        issued the last."""
        while True:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(self.device)
            torch.cuda._sleep(self._sleep_cycles)
            begin.record()
            for _ in range(repetitions):
                operation()
            end.record()
            host_was_ahead = not begin.query()
            torch.cuda.synchronize(self.device)
            time.sleep(RESTS * begin.elapsed_time(end) / 1e3)
            if host_was_ahead or self._sleep_cycles >= MOST_SLEEP_CYCLES:
                return float(begin.elapsed_time(end)) * 1e6 / repetitions
            self._sleep_cycles *= 2


def summary(times_ns: list[float]) -> Time:
    median = statistics.median(times_ns)
    first, _, third = statistics.quantiles(times_ns, n=4, method="inclusive")
    return Time(ns=max(1, round(median)), spread_pct=round(50 * (third - first) / max(1.0, median), 2))
