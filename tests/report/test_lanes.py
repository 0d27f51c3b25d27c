"""Lanes hold the true share of each column, and their sums are the figures of the analysis."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from written import write_kernels

from harness.report.figures import LANE_PIXELS, lane_pixels
from harness.report.lanes import most_exposed
from harness.sources import find_sources
from harness.trace import read_captures
from harness.trace.coverage import shares
from harness.trace.intervals import union

KERNELS = [
    ("gemm", None, 7, 0, 6000),
    ("tiny", None, 7, 9999, 1),
    ("_allgather_base", "mesh_dp", 20, 5000, 3000),
    ("_reduce_scatter_base", "mesh_dp", 20, 8500, 1),
]


def picture(tmp_path, kernels=KERNELS):
    write_kernels(tmp_path / "rank0_trace.json.gz", kernels)
    captures, errors = read_captures(find_sources(tmp_path))
    assert errors == []
    return most_exposed(captures)


@pytest.mark.parametrize("seed", range(20))
def test_coverage_counts_every_nanosecond_once(seed):
    random = np.random.default_rng(seed)
    start = random.integers(0, 900, 12)
    times = union(start, start + random.integers(0, 60, 12))
    edges = np.unique(random.integers(-20, 1000, 9))
    covered = np.zeros(1100, bool)
    for begin, end in zip(*times, strict=True):
        covered[begin:end] = True
    expected = [covered[max(a, 0) : max(b, 0)].sum() / (b - a) for a, b in pairwise(edges)]
    np.testing.assert_allclose(shares(times, edges), expected)


def test_lanes_have_the_figures_of_the_step(tmp_path):
    found = picture(tmp_path)
    lanes = {lane.label: lane for lane in found.lanes}
    assert (found.rank, found.step, found.span_ns) == (0, 3, 10_000_000)
    assert list(lanes) == ["compute", "mesh_dp all_gather", "mesh_dp reduce_scatter", "exposed communication"]
    assert lanes["compute"].busy_ns == 6_001_000
    assert lanes["mesh_dp all_gather"].busy_ns == 3_000_000
    assert lanes["mesh_dp all_gather"].exposed_ns == 2_000_000
    assert lanes["exposed communication"].exposed_ns == 2_001_000
    assert lanes["mesh_dp all_gather"].streams == [20]
    for lane in found.lanes:
        assert lane.busy.sum() * found.column_ns == pytest.approx(lane.busy_ns, rel=1e-3)


def test_a_narrow_event_is_seen_and_not_widened(tmp_path):
    """1 µs in a column of 8.3 µs: an eighth of the column's height, and one mark under it."""
    lane = next(lane for lane in picture(tmp_path).lanes if lane.kind == "reduce_scatter")
    columns = np.flatnonzero(lane.busy)
    assert columns.size == 1
    assert lane.busy[columns[0]] == pytest.approx(0.12, abs=0.001)
    alpha = lane_pixels(lane)[..., 3]
    assert np.flatnonzero(alpha.any(axis=0)).tolist() == columns.tolist()
    height = alpha[: LANE_PIXELS - 2, columns[0]].sum() / 255
    assert height == pytest.approx(0.12 * (LANE_PIXELS - 4), abs=0.02)
    assert alpha[LANE_PIXELS - 2, columns[0]] == 255


def test_hidden_communication_is_paler_than_exposed(tmp_path):
    lane = next(lane for lane in picture(tmp_path).lanes if lane.kind == "all_gather")
    hidden, exposed = lane_pixels(lane)[10, [lane.busy.size * 11 // 20, lane.busy.size * 7 // 10], 3]
    assert 0 < hidden < exposed == 255


def test_a_file_without_events_has_no_picture():
    assert most_exposed([]) is None
