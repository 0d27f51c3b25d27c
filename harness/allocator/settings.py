"""Settings of the CUDA caching allocator that change what it reserves."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20

# c10/core/AllocatorConfig.h
MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_LARGE_BYTES = 10 * MIB
ROUND_LARGE_BYTES = 2 * MIB
POWER2_INTERVALS = 16  # of sizes from 1 MiB to 64 GiB, doubling


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `PYTORCH_ALLOC_CONF` sets of the device allocator, in bytes; the defaults are torch's.

    `max_split_size_bytes`: None is no bound. `roundup_power2_divisions`: one number per doubling of the size from
    1 MiB to 64 GiB, 0 is none; sizes outside belong to the first and last. `garbage_collection_threshold` and
    `memory_fraction` are fractions of a limit (0 and 1: not set).
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * POWER2_INTERVALS
    memory_fraction: float = 1.0

    def round_bytes(self, size_bytes: int) -> int:
        """Size of the block that serves a request (torch's `round_size`)."""
        if size_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        interval = min(max(size_bytes.bit_length() - MIB.bit_length(), 0), POWER2_INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
            step = (1 << (size_bytes.bit_length() - 1)) // divisions
            return -(-size_bytes // step) * step
        return -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def segment_bytes(self, rounded_bytes: int) -> int:
        """Size of the segment asked of the driver for a block (torch's `get_allocation_size`)."""
        if rounded_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if rounded_bytes < MIN_LARGE_BYTES:
            return self.large_segment_bytes
        return -(-rounded_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES

    def page_bytes(self, *, small: bool) -> int:
        """Granularity at which an expandable segment of the small or large pool is mapped."""
        return SMALL_SEGMENT_BYTES if small else self.large_segment_bytes
