"""The memory page shows the figures of `meshscope memory --json`, whatever of them a recording has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from written import MIB, write_kernels, write_recording, write_snapshot

from dashboard.lanes import payload
from harness.memory import analyse, analyse_device, read_snapshot
from harness.memory.composition import pending_by_site
from harness.sources import find_sources
from harness.text import size

RECORDED = Path(__file__).parents[2] / "runs" / "recorded"
RUN = "h200x2_fsdp2"


@pytest.fixture(scope="module")
def expected():
    return json.loads(json.dumps(analyse(find_sources(RECORDED / RUN))))


def opened(open_page, root, **query):
    app = open_page(root, "memory", **query)
    assert not app.exception
    assert not [element for element in app.error if "Out of memory" not in element.value]
    return app


def drawn(app):
    (component,) = app.get("bidi_component")
    return payload.unpack(component.proto.bytes)


def table_with(app, *columns):
    return next(element.value for element in app.dataframe if {*columns} <= set(element.value.columns))


def said(app):
    kinds = (app.info, app.error, app.caption, app.subheader, app.markdown)
    return " ".join(element.value for kind in kinds for element in kind).replace("\\", "")


def test_the_figures_are_those_of_the_command_to_the_last_digit(open_page, expected):
    app = opened(open_page, RECORDED, run=RUN)
    (device,) = [device for file in expected["files"] for device in file["devices"]]
    shown = table_with(app, "history", "final_reserved_bytes").iloc[0]
    for name in ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes", "final_active_bytes"):
        assert shown[name] == device[name]
    stacking = table_with(app, "byte_seconds").iloc[0]
    assert stacking["blocks"] == device["stacking"]["blocks"]
    assert stacking["max_pending_bytes"] == device["stacking"]["max_pending_bytes"]
    steps = table_with(app, "step", "peak_active_bytes")
    for name in ("rank", "step", "peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes"):
        assert steps[name].tolist() == [row[name] for row in expected["steps"]]


def test_the_curves_reach_the_peaks_and_mark_the_highest(open_page, expected):
    header, array = drawn(opened(open_page, RECORDED, run=RUN))
    (strip,) = header["memory"]
    (device,) = [device for file in expected["files"] for device in file["devices"]]
    for kind in ("allocated", "active", "reserved"):
        assert array(strip["columns"][f"{kind}_high"]).max() == device[f"peak_{kind}_bytes"]
    (mark,) = strip["marks"]
    assert mark["bytes"] == device["peak_active_bytes"]
    assert size(device["peak_active_bytes"]) in mark["label"]
    assert [band["label"] for band in header["steps"]] == ["step 2", "step 3"]


def test_driver_residual_is_what_the_process_has_beyond_what_is_reserved(open_page):
    shown = table_with(opened(open_page, RECORDED, run=RUN, rank="0", tab="Driver"), "residual_bytes").iloc[0]
    rows = [json.loads(line) for line in (RECORDED / RUN / "steps" / "rank0.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["nvml_process_bytes"] is not None]
    beyond = [row["nvml_process_bytes"] - row["reserved_bytes"] for row in rows]
    assert shown["residual_bytes"] == max(beyond)
    assert shown["step"] == rows[beyond.index(max(beyond))]["step"]


def test_driver_residual_is_unknown_where_reserved_bytes_grew_beside_the_sample(open_page):
    """Its only samples are of first steps, when rank 1 ended with more reserved than the driver had counted before."""
    app = opened(open_page, RECORDED, run="h200_collectives_record_stream", tab="Driver")
    assert "in which its reserved bytes stayed the same" in said(app)
    assert not any("residual_bytes" in frame.value.columns for frame in app.dataframe)


def test_what_was_pending_when_most_was_is_named_by_its_site_and_adds_up(open_page, tmp_path):
    path = write_snapshot(tmp_path / "stacked" / "rank0_snapshot.pickle", pending=3, site="/home/me/send.py")
    device = analyse_device(read_snapshot(path).devices[0])
    shares, time_us = pending_by_site(device.device, device.timeline, device.lives)
    assert sum(share.bytes for share in shares) == device.stacking.max_pending_bytes == 300 * MIB
    assert [share.name for share in shares] == ["/home/me/send.py:7:forward"]
    app = opened(open_page, tmp_path, run="stacked")
    assert "/home/me/send.py:7:forward" in table_with(app, "name", "blocks")["name"].tolist()
    (strip,) = drawn(app)[0]["memory"]
    (mark,) = strip["pending_marks"]
    assert mark["bytes"] == device.stacking.max_pending_bytes
    assert mark["time"] == (time_us - device.timeline.time_us[0]) * 1000
    assert table_with(app, "site", "bytes")["site"].tolist() == ["/home/me/send.py:7:forward"]


def test_the_url_leads_to_a_range_of_the_history(open_page):
    header, _ = drawn(opened(open_page, RECORDED, run=RUN, range="1000000-2000000"))
    assert header["view"] == [1_000_000, 2_000_000]


def test_a_recording_with_traces_only_says_what_is_missing(open_page, tmp_path):
    write_kernels(tmp_path / "traces" / "rank0_trace.json.gz", [("gemm", None, 7, 0, 600)])
    app = opened(open_page, tmp_path, run="traces")
    assert "Nothing here says what memory was held" in said(app)


def test_step_rows_alone_give_peaks_and_what_they_consist_of(open_page, tmp_path):
    parts = [{"category": "parameter", "bytes": MIB}, {"category": "activation", "bytes": 2 * MIB}]
    write_recording(tmp_path / "cpu", peak_composition=parts)
    app = opened(open_page, tmp_path, run="cpu", rank="1")
    assert "A CPU has no allocator" in said(app)
    assert f"At the allocated peak of rank 1, step 2: {size(3 * MIB + 1)}" in said(app)
    steps = table_with(app, "step", "peak_allocated_bytes")
    assert steps["peak_allocated_bytes"].tolist() == [MIB + 1, 2 * MIB + 1, 3 * MIB + 1]
    phases = table_with(opened(open_page, tmp_path, run="cpu", rank="1", tab="Phases"), "phase")
    assert phases["peak_allocated_bytes"].tolist() == [2 * MIB]


@pytest.mark.shared_data
def test_a_failed_allocation_is_told_and_marked_where_it_happened(open_page, cases, tmp_path):
    folder = tmp_path / "oom"
    folder.mkdir()
    source = cases / "files" / "e06-oom" / "snapshot.pickle"
    (folder / "snapshot.pickle").write_bytes(source.read_bytes())
    app = opened(open_page, tmp_path, run="oom")
    (oom,) = analyse(find_sources(source))["files"][0]["devices"][0]["oom"]
    assert size(oom["size_bytes"]) in app.error[0].value
    assert table_with(app, "device_free_bytes").iloc[0]["size_bytes"] == oom["size_bytes"]
    (strip,) = drawn(app)[0]["memory"]
    assert any(mark["label"].startswith("out of memory") for mark in strip["marks"])


@pytest.mark.shared_data
def test_what_was_pending_before_the_history_is_marked_at_its_begin(open_page, recordings):
    app = opened(open_page, recordings, run="h200_collectives_record_stream")
    (strip,) = drawn(app)[0]["memory"]
    (mark,) = strip["marks"]
    assert mark["time"] == 0
    assert "when the history begins" in mark["label"]
