"""What the allocator hands out beside what was asked for."""

from __future__ import annotations

import pytest

from harness.allocator import Allocator, Settings
from harness.ledger.sizes import Quantities
from harness.ledger.tape import ALL_GATHER, ROUNDING, Tape

MIB = 1 << 20


def on_gpu() -> Tape:
    tape = Tape(Allocator(Settings()))
    tape.instant("step")
    return tape


@pytest.mark.parametrize(
    ("size", "kept"),
    [
        (30_412_800, 1_044_480),  # 29.004 MiB of a segment of 30
        (501 * MIB, MIB),  # just not split
        (501 * MIB - 1, MIB + 1),  # the block is 501 MiB, rounded to 512 bytes
        (501 * MIB - 512, 0),  # what remains is more than 1 MiB, and split off
        (502 * MIB, 0),
        (9 * MIB, 0),  # of a segment of 20 MiB
    ],
)
def test_what_remains_of_a_segment_stays_with_its_block_up_to_one_mib(size: int, kept: int) -> None:
    tape = on_gpu()
    block = tape.allocate("gradients", Quantities({"N": size}).size(1, "N"))
    assert tape.bytes_of[ROUNDING] == kept
    assert (tape.total, tape.bytes_of["gradients"]) == (size + kept, size)
    del block
    assert tape.total == tape.bytes_of[ROUNDING] == 0


def test_on_a_cpu_blocks_are_as_large_as_was_asked_for() -> None:
    tape = Tape()
    tape.instant("step")
    block = tape.allocate("gradients", Quantities({"N": 30_412_800}).size(1, "N"))
    assert tape.total == 30_412_800
    assert tape.bytes_of[ROUNDING] == 0
    del block


def test_tensors_that_come_together_have_blocks_of_their_own() -> None:
    tape = on_gpu()
    unit = tape.allocate("parameters", Quantities({"N": 24 * MIB}).size(1, "N"), parts=[12 * MIB, 12 * MIB - 8, 8])
    assert tape.allocator is not None
    assert tape.allocator.reserved_bytes == (12 + 12 + 2) * MIB
    assert tape.total == 24 * MIB + 512
    unit.free()
    unit.free()
    assert tape.total == 0
    assert tape.allocator.reserved_bytes == 26 * MIB, "the allocator keeps its segments"


def test_streams_do_not_share_what_is_free() -> None:
    tape = on_gpu()
    size = Quantities({"N": 20 * MIB}).size(1, "N")
    gathered = tape.allocate("all-gather output", size, stream=ALL_GATHER)
    del gathered
    assert tape.allocator is not None
    first, second = tape.allocate("logits", size), tape.allocate("all-gather output", size, stream=ALL_GATHER)
    assert tape.allocator.reserved_bytes == 40 * MIB
    del first, second


def test_what_is_inside_of_another_block_takes_none() -> None:
    tape = on_gpu()
    sizes = Quantities({"N": MIB, "M": 9 * MIB})
    inside = tape.allocate("kernel workspaces", sizes.size(1, "N"), parts=[])
    block = tape.allocate("kernel workspaces", sizes.size(1, "M"), parts=[10 * MIB + 256])
    assert (tape.bytes_of["kernel workspaces"], tape.bytes_of[ROUNDING], tape.total) == (
        10 * MIB,
        512,
        10 * MIB + 512,
    )
    del inside, block
    assert (tape.bytes_of["kernel workspaces"], tape.bytes_of[ROUNDING], tape.total) == (0, 0, 0)
