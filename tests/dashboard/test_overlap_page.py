"""The overlap page shows the figures of `meshscope overlap --json`, and a timeline that the URL leads to a place of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from written import write_kernels, write_recording, write_snapshot

from dashboard import data, preparing, store
from dashboard.discover import run_at
from dashboard.lanes import overlap_figures, payload
from dashboard.lanes.source import head_of, moments_of, shown_of
from dashboard.lanes.view import Axis, parsed
from harness.report import build
from harness.sources import find_sources
from harness.trace import analyse

RECORDED = Path(__file__).parents[2] / "runs" / "recorded"
RUN = "h200_1b_fsdp4_tp2"


@pytest.fixture(scope="module")
def expected():
    return json.loads(json.dumps(analyse(find_sources(RECORDED / RUN))))


@pytest.fixture
def opened(open_page):
    """`opened(step=6)`: the page of the shipped run once its traces are read."""

    def page(**query):
        open_page(RECORDED, "overview", run=RUN)
        app = open_page(RECORDED, "overlap", run=RUN, **query)
        assert not app.exception
        assert not app.error
        return app

    return page


def drawn(app):
    (component,) = app.get("bidi_component")
    return payload.unpack(component.proto.bytes)


def tables(app):
    return [element.value for element in app.dataframe]


def table_with(app, *columns):
    return next(table for table in tables(app) if {*columns} <= set(table.columns))


def test_the_figures_are_those_of_the_command_to_the_last_digit(opened, expected):
    app = opened()
    whole = table_with(app, "source", "span_ns")
    assert whole["rank"].tolist() == [entry["rank"] for entry in expected["ranks"]]
    for name in overlap_figures.WINDOW:
        assert whole[name].tolist() == [entry["window"][name] for entry in expected["ranks"]]
    dimensions = table_with(app, "dimension", "comm_ns")
    items = [item for entry in expected["ranks"] for item in entry["dimensions"]]
    for name in ("dimension", *overlap_figures.COMMUNICATION):
        assert dimensions[name].tolist() == [item[name] for item in items]
    collectives = table_with(opened(tab="Collectives"), "group", "sum_ns")
    items = [item for entry in expected["ranks"] for item in entry["collectives"]]
    for name in ("kind", "count", "sum_ns", "exposed_ns"):
        assert collectives[name].tolist() == [item[name] for item in items]
    layers = table_with(opened(tab="Layers"), "unit", "phase")
    assert layers["exposed_ns"].tolist() == [i["exposed_ns"] for entry in expected["ranks"] for i in entry["units"]]


def test_ranks_step_rule_and_dimension_of_the_url_choose_the_rows(opened, expected):
    query = {"rank": ["1", "3"], "step": "7", "rule": "clip", "dimension": "mesh_tp"}
    app = opened(**query, tab="Steps")
    entries = [expected["ranks"][rank] for rank in (1, 3)]
    steps = table_with(app, "step", "incomplete", "span_ns")
    wanted = [item for entry in entries for item in entry["steps"] if item["step"] == 7 and item["rule"] == "clip"]
    assert steps["comm_ns"].tolist() == [item["comm_ns"] for item in wanted]
    assert set(table_with(opened(**query), "dimension", "comm_ns")["dimension"]) == {"mesh_tp"}
    header, _ = drawn(app)
    assert {row["group"] for row in header["rows"]} == {"rank 1", "rank 3"}
    communicating = {one["dimension"] for one in header["classes"] if one["role"] == "communication"}
    assert communicating == {"mesh_tp"}


def test_a_chosen_step_is_what_is_seen_and_the_parts_of_its_breakdown_are_the_commands(opened, expected):
    app = opened(rank="0", step="6", tab="Steps")
    (breakdown,) = [item for item in expected["ranks"][0]["breakdown"] if item["step"] == 6]
    header, _ = drawn(app)
    start, end = header["view"]
    assert end - start == breakdown["span_ns"]
    shown = table_with(app, "exposed_memory_ns", "idle_ns")
    assert shown["compute_ns"].tolist() == [breakdown["compute_ns"]]
    for name, value in breakdown["exposed"].items():
        assert shown[f"exposed {name}_ns"].tolist() == [value]


def test_the_url_leads_to_a_range_with_the_same_figures(opened, expected):
    app = opened(rank="2", figures="true")
    (whole,) = [entry["window"] for entry in expected["ranks"] if entry["rank"] == 2]
    compute = table_with(app, "lane", "busy_ns").set_index("lane").loc["compute", "busy_ns"]
    assert compute == whole["compute_ns"]
    parts = []
    header, _ = drawn(app)
    last = header["extent"][1]
    middle = last // 3 + 1
    for start, end in ((0, middle), (middle, last)):
        app = opened(rank="2", figures="true", range=f"{start}-{end}")
        assert drawn(app)[0]["view"] == [start, end]
        assert app.query_params["range"] == f"{start}-{end}"
        parts.append(table_with(app, "lane", "busy_ns").set_index("lane")["busy_ns"])
    assert (parts[0] + parts[1]).loc["compute"] == whole["compute_ns"]


@pytest.mark.parametrize("asked", ["", "5", "9-3", "a-b", "10-12", "-4-9", "99999999999-999999999999"])
def test_a_range_that_is_none_is_not_gone_to(asked):
    assert parsed(asked, Axis(id="a", extent_ns=1000)) is None


def test_the_most_exposed_collectives_are_listed_with_their_place(opened, monkeypatch):
    app = opened(rank="4", tab="Most exposed")
    worst = table_with(app, "at_ns", "duration_ns")
    assert worst["exposed_ns"].is_monotonic_decreasing
    header, array = drawn(app)
    first = worst.iloc[0]
    row = next(row for row in header["rows"] if row["label"] == f"{first['dimension']} {first['kind']}")
    starts = array(row["events"]["start"])
    (place,) = [i for i, start in enumerate(starts) if start == first["at_ns"]]
    assert array(row["events"]["exposed_ns"])[place] == first["exposed_ns"]
    assert array(row["events"]["end"])[place] - starts[place] == first["duration_ns"]


def test_waiting_adds_up_what_the_command_says_of_each_collective(opened, expected):
    app = opened(dimension="mesh_tp", tab="Waiting")
    waiting = table_with(app, "matched", "transfer_ns")
    items = [one for one in expected["cross_rank"]["collectives"] if one["dimension"] == "mesh_tp"]
    assert waiting["matched"].sum() == len(items)
    assert waiting["transfer_ns"].sum() == sum(one["transfer_ns"] for one in items)


def test_stacking_lanes_puts_the_same_lane_of_all_ranks_together(opened):
    header, _ = drawn(opened(stack="lane"))
    computes = [row["label"] for row in header["rows"] if row["group"] == "compute"]
    assert computes == [f"rank {rank}" for rank in range(8)]


def test_lanes_by_stream_name_the_streams(opened):
    header, _ = drawn(opened(lanes="stream", rank="0"))
    assert all(row["label"].startswith("stream ") or row["label"] == "exposed" for row in header["rows"])


def test_a_rehearsal_and_a_recording_without_a_trace_say_what_is_missing(open_page, tmp_path):
    write_recording(tmp_path / "rehearsed", manifest={"mode": "rehearsal"})
    write_recording(tmp_path / "plain")
    for run, words in (("rehearsed", "nothing was communicated"), ("plain", "No trace with events")):
        open_page(tmp_path, "overview", run=run)
        app = open_page(tmp_path, "overlap", run=run)
        assert not app.exception
        assert words in app.info[0].value.replace("\\", "")


def test_ranks_that_are_read_are_drawn_while_others_are_not(opened, open_page, tmp_path, monkeypatch):
    opened()
    target, _ = data.preparation(RECORDED, run_at(RECORDED, RUN))
    shutil.copytree(target / store.LANES / "0", tmp_path / store.LANES / "0")
    shutil.copy(target / store.TRACES, tmp_path)
    under_way = preparing.Preparation(tmp_path)
    monkeypatch.setattr(preparing, "start", lambda *_: under_way)
    app = open_page(RECORDED, "overlap", run=RUN, range="5-99999999999")
    assert not app.exception
    assert app.get("progress")[0].proto.text == "1 of 8 traces read and drawn; this is needed once"
    header, _ = drawn(app)
    assert {row["group"] for row in header["rows"]} == {"rank 0"}
    assert app.query_params["range"] == "5-99999999999"  # the axis may still grow


def test_captures_of_one_rank_are_moments_of_their_own(tmp_path, monkeypatch, cache_folder):
    monkeypatch.setenv("MESHSCOPE_DASHBOARD_CACHE", str(cache_folder))
    kernels = [("gemm", None, 7, 0, 600), ("_allgather_base", "mesh_dp", 20, 500, 300)]
    for iteration in (3, 6):
        for rank in (0, 1):
            write_kernels(tmp_path / f"iteration_{iteration}" / f"rank{rank}_trace.json.gz", kernels, rank=rank)
    run = run_at(tmp_path, "")
    target, under_way = data.preparation(tmp_path, run)
    assert under_way is not None
    assert under_way.done.wait(60)
    assert under_way.error is None
    assert data.preparation(tmp_path, run) == (target, None)
    moments = moments_of([head_of(str(folder)) for folder in preparing.lane_folders(target)])
    assert [moment.label for moment in moments] == ["iteration 3", "iteration 6"]
    assert all(moment.common_clock for moment in moments)
    (shown,) = shown_of(moments[0], [1])
    assert shown.group == "rank 1"


def test_an_analysis_that_fails_says_so_to_all_who_wait(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHSCOPE_DASHBOARD_CACHE", str(tmp_path / "cache"))
    write_snapshot(tmp_path / "runs" / "snapshot.pickle")
    monkeypatch.setattr(preparing.sys, "executable", "/bin/false")
    _, under_way = data.preparation(tmp_path, run_at(tmp_path, "runs"))
    assert under_way.done.wait(30)
    assert "ended with 1" in under_way.error


def test_the_life_of_a_unit_is_that_of_the_report(opened):
    rows = build(RECORDED / RUN).to_json()["lifetime"]["rows"]
    table = table_with(opened(tab="Life of a unit"), "start_ns", "what")
    assert table["start_ns"].tolist() == [row["start_ns"] for row in rows]
    assert table["bytes"].dropna().tolist() == [row["bytes"] for row in rows if row["bytes"] is not None]
    assert table["dur_ns"].tolist() == [row["end_ns"] - row["start_ns"] for row in rows]
