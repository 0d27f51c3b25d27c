"""What a window of a timeline shows is the truth at every zoom, to the nanosecond."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from captures import SPAN_NS, class_moments, moments, random_capture

from dashboard import store
from dashboard.lanes import component, detail, payload
from dashboard.lanes.detail import LaneIndex, columns_of, edges_of
from dashboard.lanes.index import lane_index
from dashboard.lanes.looks import short_name
from dashboard.lanes.picture import NAME_LETTERS, Shown, View, fitting, picture
from harness.trace.events import MISSING
from harness.trace.figures import COMMUNICATION, COMPUTE

SEEDS = range(12)


def windows(seed, count=6):
    random = np.random.default_rng(1000 + seed)
    for _ in range(count):
        start, end = sorted(random.integers(0, SPAN_NS, 2).tolist())
        if end > start:
            yield start, end, int(random.integers(1, 200))


def brute(covered, edges):
    return np.array([int(covered[a:b].sum()) for a, b in pairwise(edges.tolist())])


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_of_classes_cover_what_their_events_cover(seed):
    capture = random_capture(seed)
    activity = capture.devices[0].activity
    index = LaneIndex(lane_index(capture))
    expected = class_moments(activity)
    computes = expected["compute"]
    lanes = {lane.label: lane for lane in index.lanes(index.devices[0], "kind")}
    assert lanes.keys() - {"exposed"} == {name for name, covered in expected.items() if covered.any()}
    for start, end, columns in windows(seed):
        edges = edges_of(start, end, columns)
        for name in lanes.keys() - {"exposed"}:
            found = columns_of(lanes[name], edges)
            np.testing.assert_array_equal(found.busy_ns, brute(expected[name], edges))
            communicates = name.startswith("mesh")
            exposed = expected[name] & ~computes if communicates else np.zeros(SPAN_NS, bool)
            np.testing.assert_array_equal(found.exposed_ns, brute(exposed, edges))
        communicating = moments(activity, activity.role == COMMUNICATION)
        np.testing.assert_array_equal(
            columns_of(lanes["exposed"], edges).busy_ns, brute(communicating & ~computes, edges)
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_of_streams_cover_what_ran_on_them_and_name_what_ran_longest(seed):
    capture = random_capture(seed)
    activity = capture.devices[0].activity
    index = LaneIndex(lane_index(capture))
    device = index.devices[0]
    labels = {"stream 7": 7, "stream 20": 20, "no stream": MISSING}
    for lane in index.lanes(device, "stream"):
        if lane.role != "stream":
            continue
        on_stream = activity.stream == labels[lane.label]
        covered = moments(activity, on_stream)
        longest = {
            label: moments(activity, on_stream & (activity.role == COMPUTE))
            if label == "compute"
            else class_on(activity, label, on_stream)
            for label in class_moments(activity)
        }
        for start, end, columns in windows(seed):
            edges = edges_of(start, end, columns)
            found = columns_of(lane, edges)
            np.testing.assert_array_equal(found.busy_ns, brute(covered, edges))
            for column, (a, b) in enumerate(pairwise(edges.tolist())):
                by_class = {label: int(times[a:b].sum()) for label, times in longest.items()}
                if found.busy_ns[column]:
                    name = detail.label_of(device["classes"][found.dominant[column]])
                    assert by_class[name] == max(by_class.values())
                else:
                    assert found.dominant[column] == detail.NONE


def class_on(activity, label, on_stream):
    if label == "memory operations":
        return moments(activity, on_stream & (activity.role == 2))
    wanted = activity.where([f"{one.dimension} {one.kind}" == label for one in activity.collectives])
    return moments(activity, on_stream & wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_window_holds_the_events_that_touch_it_with_their_own_exposure(seed):
    capture = random_capture(seed)
    activity = capture.devices[0].activity
    index = LaneIndex(lane_index(capture))
    computes = class_moments(activity)["compute"]
    for start, end, _ in windows(seed):
        touching = (activity.start < end) & (activity.end > start)
        found = [index.events(index.devices[0], lane, start, end) for lane in index.lanes(index.devices[0], "kind")]
        rows = sorted(
            (int(a), int(b), int(c), int(x))
            for events in found
            for a, b, c, x in zip(events.start, events.end, events.collective, events.exposed_ns, strict=True)
        )
        assert rows == sorted(
            (int(a), int(b), int(c), int((~computes[a:b]).sum()) if c >= 0 else 0)
            for a, b, c in zip(
                activity.start[touching], activity.end[touching], activity.collective[touching], strict=True
            )
        )
        counts = [index.count(lane, start, end) for lane in index.lanes(index.devices[0], "kind")]
        assert sum(counts) == touching.sum()


def test_filtering_dimensions_leaves_compute_and_what_is_asked_for():
    index = LaneIndex(lane_index(random_capture(0)))
    lanes = index.lanes(index.devices[0], "kind", ["mesh_tp"])
    assert [lane.label for lane in lanes] == ["compute", "mesh_tp all_gather", "memory operations"]
    on_stream = index.lanes(index.devices[0], "stream", ["mesh_tp"])
    asked = [
        time for lane in on_stream for time in index.events(index.devices[0], lane, 0, SPAN_NS).collective.tolist()
    ]
    assert set(asked) == {-1, 2}


def test_the_index_from_disk_is_the_index(tmp_path):
    made = lane_index(random_capture(3))
    store.save(tmp_path / "lanes", made)
    kept = store.load(tmp_path / "lanes")
    assert kept.values == made.values
    assert kept.columns.keys() == made.columns.keys()
    for name, column in made.columns.items():
        np.testing.assert_array_equal(kept.columns[name], column)


def shown(seed, offset_ns=0):
    index = LaneIndex(lane_index(random_capture(seed)))
    return Shown(index=index, device=index.devices[0], group="rank 0", offset_ns=offset_ns)


def view(start=0, end=SPAN_NS, width=300):
    return View(start_ns=start, end_ns=end, extent_ns=SPAN_NS, width=width, view_id="1")


def test_few_events_are_sent_one_by_one_with_their_names_and_sizes():
    one = shown(1, offset_ns=500)
    made = picture([one], view(600, 1200))
    header, array = payload.unpack(made.data)
    assert made.single == made.events > 0
    row = next(row for row in header["rows"] if row["label"] == "mesh_dp all_gather")
    activity = random_capture(1).devices[0].activity
    low, high = header["window"]
    mine = (activity.collective == 0) & (activity.start + 500 < high) & (activity.end + 500 > low)
    events = {name: array(reference) for name, reference in row["events"].items()}
    assert events["start"].tolist() == (activity.start[mine] + 500).tolist()
    assert [header["names"][name] for name in events["label"]] == ["layers.0"] * mine.sum()
    assert set(events["bytes"].tolist()) == {20.0}
    unsized = next(row for row in header["rows"] if row["label"] == "mesh_tp all_gather")
    assert set(array(unsized["events"]["bytes"]).tolist()) == {10.0}


def test_many_events_are_sent_as_shares_that_never_lose_the_narrowest(monkeypatch):
    monkeypatch.setattr(detail, "EVENTS_SENT", 0)
    monkeypatch.setattr("dashboard.lanes.picture.exact_lanes", lambda counts: [False] * len(counts))
    one = shown(2)
    made = picture([one], view(width=160))
    header, array = payload.unpack(made.data)
    edges = edges_of(*header["window"], made.columns)
    lanes = {lane.label: lane for lane in one.index.lanes(one.device, "kind")}
    for row in header["rows"]:
        exact = lanes[row["label"]].busy.per_column(edges)
        sent = array(row["busy"])
        assert ((sent > 0) == (exact > 0)).all()
        assert ((sent == 65535) == (exact == np.diff(edges))).all()
        np.testing.assert_allclose(sent / 65535, exact / np.diff(edges), atol=2 / 65535)


def test_the_table_has_the_figures_of_the_view_and_the_parts_add_up():
    one = shown(5)
    whole = {row["lane"]: row for row in picture([one], view()).table}
    parts = [picture([one], view(a, b)).table for a, b in pairwise([0, 17, 1000, 1001, 2500, SPAN_NS])]
    for lane, figures in whole.items():
        rows = [next(row for row in table if row["lane"] == lane) for table in parts]
        assert sum(row["busy_ns"] for row in rows) == figures["busy_ns"]
        if figures["exposed_ns"] is not None:
            assert sum(row["exposed_ns"] for row in rows) == figures["exposed_ns"]


def test_lanes_with_fewest_events_are_the_first_to_be_exact():
    assert detail.exact_lanes([50, 3, 40, 7], limit=60) == [False, True, True, True]
    assert detail.exact_lanes([5, 6], limit=4) == [False, False]


def test_many_ranks_stay_below_the_limit_of_a_message():
    ranks = [shown(seed) for seed in range(8)] * 16
    made = picture(ranks, View(start_ns=0, end_ns=SPAN_NS, extent_ns=SPAN_NS, width=2500, view_id="1"))
    assert len(made.data) < payload.LIMIT_BYTES


def test_names_are_cut_where_there_are_too_many_for_a_message():
    names = [f"{number:05d} {'x' * 250}" for number in range(8000)]
    cut = fitting(names)
    assert sum(map(len, cut)) <= NAME_LETTERS
    assert all(name.startswith(short) for name, short in zip(names, cut, strict=True))
    assert fitting(names[:100]) == names[:100]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>(int)",
            "vectorized_elementwise_kernel",
        ),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllGather_RING_LL"),
        ("<unknown>", "<unknown>"),
        ("nvjet_tst_128x256", "nvjet_tst_128x256"),
    ],
)
def test_names_are_shortened_to_what_tells_kernels_apart(name, short):
    assert short_name(name) == short


def test_the_script_and_its_style_ship_with_the_package_and_load_nothing():
    script, style = component.assets()
    assert script.count("export default") == 1
    assert style.startswith("\n")  # else Streamlit takes a style of one line for a file's name
    assert "http" not in script + style
    assert "import(" not in script
    assert "url(" not in style
