"""Memory strips show every level that a column of pixels had."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from dashboard.lanes import payload
from dashboard.lanes.detail import edges_of
from dashboard.lanes.picture import Strip, View, picture
from dashboard.lanes.strip import CURVES, Curves
from harness.memory import Timeline


def random_timeline(seed, events=200, *, clock=True):
    random = np.random.default_rng(seed)
    allocated = 100 + np.cumsum(random.integers(-9, 10, events))
    pending = random.integers(0, 30, events)
    times = np.sort(random.integers(1_000, 1_400, events)) if clock else None
    return Timeline(0, times, allocated, allocated + pending, allocated + 500, 100, 103, 600)


def brute_extremes(curves, name, edges):
    """Every level that holds at some moment of each column, also for no time at all (events of one microsecond)."""
    times, levels = curves.time_ns.tolist(), curves.levels[name].tolist()
    found = []
    for a, b in pairwise(edges.tolist()):
        before = [level for time, level in zip(times, levels, strict=True) if time < a]
        within = [level for time, level in zip(times, levels, strict=True) if a <= time < b]
        seen = [before[-1] if before else curves.base[name], *within]
        found.append((min(seen), max(seen)))
    return [low for low, _ in found], [high for _, high in found]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("clock", [True, False])
def test_each_column_has_the_lowest_and_highest_level_within_it(seed, clock):
    curves = Curves.of(random_timeline(seed, clock=clock))
    random = np.random.default_rng(seed)
    last = int(curves.time_ns[-1])
    for _ in range(6):
        start, end = sorted(random.integers(int(curves.time_ns[0]) - 50, last + 5000, 2).tolist())
        edges = edges_of(start, end + 1, int(random.integers(1, 90)))
        for name in CURVES:
            low, high = curves.extremes(name, edges)
            assert (low.tolist(), high.tolist()) == brute_extremes(curves, name, edges)


def test_a_peak_of_one_event_is_in_every_picture_however_wide():
    spike = np.full(100_000, 10)
    spike[54_321] = 1_000_000
    times = np.arange(100_000)
    curves = Curves.of(Timeline(0, times, spike, spike, spike, 0, 0, 0))
    for columns in (1, 7, 300, 1201):
        assert curves.extremes("active", edges_of(0, 100_000_000, columns))[1].max() == 1_000_000
    assert curves.peak("active") == (1_000_000, 54_321_000)


def test_a_level_that_nothing_exceeds_has_no_moment():
    falling = np.array([50, 40])
    curves = Curves.of(Timeline(0, np.array([1, 2]), falling, falling, falling, 60, 60, 60))
    assert curves.peak("allocated") == (60, None)


def test_a_strip_is_drawn_within_its_history_only():
    curves = Curves.of(random_timeline(1))
    strip = Strip(label="rank 0", group="rank 0", curves=curves, offset_ns=-1_000_000, marks=[(1_100_000, 7, "peak")])
    made = picture([], View(start_ns=0, end_ns=400_000, extent_ns=400_000, width=200, view_id="1"), strips=[strip])
    header, array = payload.unpack(made.data)
    (drawn,) = header["memory"]
    assert drawn["known"] == [int(curves.time_ns[0]) - 1_000_000, int(curves.time_ns[-1]) - 1_000_000]
    assert drawn["marks"] == [{"time": 100_000, "bytes": 7, "label": "peak"}]
    assert array(drawn["columns"]["active_high"]).max() == curves.peak("active")[0]
    assert drawn["pending_top"] == curves.peak("pending")[0]
