"""What the allocator hands out beside what was asked for."""

from __future__ import annotations

import pytest

from harness.ledger.sizes import Quantities
from harness.ledger.tape import ROUNDING, Tape

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "kept"),
    [
        (30_412_800, 1_044_480),  # 29.004 MiB of a segment of 30
        (501 * MIB, MIB),  # just not split
        (501 * MIB - 1, MIB),  # the block is 501 MiB, rounded to 512 bytes
        (501 * MIB - 512, 0),  # what remains is more than 1 MiB, and split off
        (502 * MIB, 0),
        (9 * MIB, 0),  # shares a segment of 20 MiB
    ],
)
def test_what_remains_of_a_segment_stays_with_its_block_up_to_one_mib(size: int, kept: int) -> None:
    assert Tape(512).unsplit(size) == kept
    assert Tape(1).unsplit(size) == 0, "the CPU's allocator has no segments"


def test_a_remainder_counts_as_rounding_and_goes_with_its_block() -> None:
    tape = Tape(512)
    tape.instant("step")
    block = tape.allocate("gradients", Quantities({"N": 30_412_800}).size(1, "N"), remainder=1_044_480)
    assert tape.total == 29 * MIB + MIB
    assert (tape.peak().categories["gradients"], tape.peak().categories[ROUNDING]) == (30_412_800, 1_044_480)
    del block
    assert tape.total == 0
