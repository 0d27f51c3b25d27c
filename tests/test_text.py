"""Figures as words: no minus before a zero, singular and plural, neighbours as ranges."""

import pytest

from harness.text import byte_seconds, counted, in_ranges, number, percent, quantity, signed_percent


@pytest.mark.parametrize(
    ("value", "plain", "signed"),
    [
        (-0.001, "0.00 %", "0.00 %"),
        (0.0, "0.00 %", "0.00 %"),
        (0.0049, "0.00 %", "0.00 %"),
        (-0.006, "-0.01 %", "-0.01 %"),
        (2.5, "2.50 %", "+2.50 %"),
        (None, "n/a", "n/a"),
    ],
)
def test_a_share_of_nothing_has_no_sign(value, plain, signed):
    assert percent(value) == quantity("error_pct", value) == plain
    assert signed_percent(value) == signed


def test_numbers_without_a_negative_zero():
    assert (number(-0.00001), number(-1.5, 1)) == ("0.0000", "-1.5")


@pytest.mark.parametrize(
    ("value", "text"), [(None, "n/a"), (0.0, "0.000 MiB·s"), (2**20 * 1.5, "1.500 MiB·s"), (2.0**31, "2.0000 GiB·s")]
)
def test_memory_over_time_has_a_unit(value, text):
    assert byte_seconds(value) == quantity("byte_seconds", value) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 ranks"), (1, "1 rank"), (1200, "1,200 ranks")])
def test_plural(count, text):
    assert counted(count, "rank") == text


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([9, 4, 5, 6, 7, 5], "4–7, 9"), ([0, 1, 3, 5, 6], "0–1, 3, 5–6")]
)
def test_neighbours_are_a_range(numbers, text):
    assert in_ranges(numbers) == text
