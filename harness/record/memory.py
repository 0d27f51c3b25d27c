"""Where a step's memory figures come from: the CUDA allocator's statistics, or the process (CPU)."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, Protocol

import torch

MEASURES = ("allocated", "active", "reserved", "requested")

Bytes = tuple[int | None, int | None, int | None, int | None]
"""In the order of `MEASURES`; None where the source does not know."""

UNKNOWN: Bytes = (None, None, None, None)


def larger(a: Bytes, b: Bytes) -> Bytes:
    """Measure by measure the larger one, unknown only if both are."""
    if a is UNKNOWN:
        return b
    w, x, y, z = (m if n is None or (m is not None and m >= n) else n for m, n in zip(a, b, strict=True))
    return w, x, y, z


class Reading(NamedTuple):
    """`peak` is over the time since the reading before; retries and OOMs count from the start of the process."""

    current: Bytes = UNKNOWN
    peak: Bytes = UNKNOWN
    alloc_retries: int | None = None
    ooms: int | None = None


NOTHING_KNOWN = Reading()


class MemorySource(Protocol):
    name: str

    def reset(self) -> None:
        """Peaks count from now."""
        ...

    def read(self) -> Reading:
        """The figures now, and the peaks since the last `read` or `reset`."""
        ...


class CudaAllocator:
    """The caching allocator of one device, two raw calls per reading.

    Statistics as in torch/cuda/memory.py:memory_stats, whose flattening of the nested dictionary costs several times
    the call itself; `memory_stats_as_nested_dict` looks up the device each time.
    """

    name = "cuda_allocator"

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        self._index: int = torch.cuda.current_device() if device.index is None else device.index
        self._stats = torch._C._cuda_memoryStats
        self._reset_peaks = torch._C._cuda_resetPeakMemoryStats
        # cudaMallocAsync reports zero for what it does not track.
        self._native = torch.cuda.get_allocator_backend() == "native"

    def reset(self) -> None:
        self._reset_peaks(self._index)

    def read(self) -> Reading:
        stats: dict[str, Any] = self._stats(self._index)
        self._reset_peaks(self._index)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        if not self._native:
            return Reading(
                (allocated["current"], None, reserved["current"], None),
                (allocated["peak"], None, reserved["peak"], None),
            )
        active, requested = stats["active_bytes"]["all"], stats["requested_bytes"]["all"]
        return Reading(
            (allocated["current"], active["current"], reserved["current"], requested["current"]),
            (allocated["peak"], active["peak"], reserved["peak"], requested["peak"]),
            stats["num_alloc_retries"],
            stats["num_ooms"],
        )


class NoAllocator:
    """Outside a memory window on CPU nothing but the process's resident memory is known."""

    name = "rss"

    def reset(self) -> None:
        pass

    def read(self) -> Reading:
        return NOTHING_KNOWN


class ProcessMemory:
    """Resident memory of this process (Linux).

    The kernel's high-water mark is reset at `start`, so `peak` is that of one step; where that is not permitted
    `peak_reason` says so and the peak is unknown, because the mark of the whole process is not a step's peak.
    `getrusage` is no substitute: ru_maxrss never falls below the peak of the program that this process ran before
    exec, its parent's with vfork (linux/fs/exec.c:exec_mmap), and no reset reaches that.
    """

    def __init__(self) -> None:
        self.peak_reason: str | None = None
        self._status = self._clear_refs = -1  # kept open: each open would cost as much as the reading
        try:
            self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
            self._clear_refs = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
            self.start()
        except OSError as error:
            self.peak_reason = f"peak_rss_bytes is unknown: {error.filename or 'clear_refs'}: {error.strerror}"

    def start(self) -> None:
        """Resets the high-water mark (proc(5): writing 5 to clear_refs)."""
        if not self.peak_reason:
            os.pwrite(self._clear_refs, b"5", 0)

    def read(self) -> tuple[int | None, int | None]:
        """(resident bytes now, their peak since `start`)."""
        if self._status < 0:
            return None, None
        # VmHWM:<tab> <number> kB, and VmRSS on the next line
        _, found, rest = os.pread(self._status, 4096, 0).partition(b"VmHWM:")
        if not found:
            return None, None
        words = rest[:80].split(maxsplit=4)
        return 1024 * int(words[3]), None if self.peak_reason else 1024 * int(words[0])

    def close(self) -> None:
        """The last call: neither `start` nor `read` work any more."""
        for descriptor in {self._status, self._clear_refs} - {-1}:
            os.close(descriptor)
        self._status = self._clear_refs = -1
