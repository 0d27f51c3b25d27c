"""Where a step's memory figures come from: the CUDA allocator's statistics, or the process (CPU)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

Bytes = dict[str, int | None]
"""allocated, active, reserved and requested bytes; None where the source does not know."""

MEASURES = ("allocated", "active", "reserved", "requested")


def bytes_by_measure(**known: int | None) -> Bytes:
    return {measure: known.get(measure) for measure in MEASURES}


def larger(a: Bytes, b: Bytes) -> Bytes:
    """Measure by measure the larger one, unknown only if both are."""
    return {m: max((v for v in (a[m], b[m]) if v is not None), default=None) for m in MEASURES}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """`peak` is over the time since the reading before; retries and OOMs count from the start of the process."""

    current: Bytes = field(default_factory=bytes_by_measure)
    peak: Bytes = field(default_factory=bytes_by_measure)
    alloc_retries: int | None = None
    ooms: int | None = None


class MemorySource(Protocol):
    name: str

    def read(self) -> Reading:
        """The figures now, and the peaks since the last call."""
        ...


class CudaAllocator:
    """The caching allocator of one device, one call per reading.

    Statistics as in torch/cuda/memory.py:memory_stats, whose flattening of the nested dictionary costs several times
    the call itself.
    """

    name = "cuda_allocator"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # cudaMallocAsync reports zero for what it does not track.
        native = torch.cuda.get_allocator_backend() == "native"
        self._measures = MEASURES if native else ("allocated", "reserved")

    def read(self) -> Reading:
        stats: dict[str, Any] = torch.cuda.memory.memory_stats_as_nested_dict(self._device)
        if not stats:  # CUDA is not initialised in this process yet
            return Reading()
        torch.cuda.reset_peak_memory_stats(self._device)
        totals = {measure: stats[f"{measure}_bytes"]["all"] for measure in self._measures}
        return Reading(
            current=bytes_by_measure(**{m: total["current"] for m, total in totals.items()}),
            peak=bytes_by_measure(**{m: total["peak"] for m, total in totals.items()}),
            alloc_retries=stats["num_alloc_retries"],
            ooms=stats["num_ooms"],
        )


class NoAllocator:
    """Outside a memory window on CPU nothing but the process's resident memory is known."""

    name = "rss"

    def read(self) -> Reading:
        return Reading()


class ProcessMemory:
    """Resident memory of this process (Linux).

    The kernel's high-water mark is reset at `start`, so `peak` is that of one step; where that is not permitted
    `peak_reason` says so and the peak is unknown, because the mark of the whole process is not a step's peak.
    """

    _CLEAR_REFS = Path("/proc/self/clear_refs")
    _STATUS = Path("/proc/self/status")
    _STATM = Path("/proc/self/statm")

    def __init__(self) -> None:
        self.peak_reason: str | None = None
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._known = self._STATM.exists()
        if not self._known:
            self.peak_reason = "this system has no /proc/self/statm"
        self.start()

    def start(self) -> None:
        """Resets the high-water mark (proc(5): writing 5 to clear_refs)."""
        if self.peak_reason:
            return
        try:
            self._CLEAR_REFS.write_text("5")
        except OSError as error:
            self.peak_reason = f"peak_rss_bytes is unknown: {self._CLEAR_REFS}: {error.strerror}"

    def read(self) -> tuple[int | None, int | None]:
        """(resident bytes now, their peak since `start`)."""
        if not self._known:
            return None, None
        resident = int(self._STATM.read_bytes().split()[1]) * self._page_bytes
        if self.peak_reason:
            return resident, None
        mark = next(line for line in self._STATUS.read_bytes().splitlines() if line.startswith(b"VmHWM"))
        return resident, int(mark.split()[1]) * 1024
