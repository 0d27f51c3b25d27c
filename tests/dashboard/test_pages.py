"""Every page over real recordings, and over what a run can leave behind: nothing, a part, a crash, one that goes on."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from written import rewrite_steps, write_kernels, write_recording, write_snapshot

from dashboard.app import name_of, page_modules
from harness import recording
from harness.compare import compare_runs, measure
from harness.report import build
from harness.text import quantity

RECORDED = Path(__file__).parents[2] / "runs" / "recorded"
ONE, OTHER = "h200x2_fsdp2", "h200x2_fsdp2_connections_1"
PAGES = [name_of(module) for module in page_modules()]


def as_json(value):
    return json.loads(json.dumps(value))


def text_of(app) -> str:
    """Everything that is said in words."""
    kinds = (app.title, app.markdown, app.caption, app.info, app.warning, app.error, app.code)
    return "\n".join(str(element.value) for kind in kinds for element in kind).replace("\\", "")


def table_with(app, *columns):
    return next(element.value for element in app.dataframe if {*columns} <= set(element.value.columns))


def healthy(app):
    assert not app.exception
    return app


@pytest.mark.parametrize("page", PAGES)
def test_every_page_shows_a_shipped_recording(open_page, page):
    app = healthy(open_page(RECORDED, page, run=ONE))

    assert not app.error
    assert app.title


@pytest.mark.parametrize("page", PAGES)
def test_every_page_explains_an_empty_folder(open_page, tmp_path, page):
    app = healthy(open_page(tmp_path, page))

    assert app.title or app.error
    assert len(app.error) <= 1


def test_runs_lists_what_the_folder_holds_and_its_figures(open_page):
    app = healthy(open_page(RECORDED))

    table = table_with(app, "run", "state").set_index("run")
    assert {ONE, OTHER, "h200_1b_fsdp4_tp2"} <= set(table.index)
    metrics = build(RECORDED / ONE).to_json()["metrics"]
    for name in ("step_wall_ns", "tokens_per_s", "peak_allocated_bytes"):
        assert table.loc[ONE, name] == metrics[name]
    assert table.loc["h200_1b_fsdp4_tp2", "mode"] == "shared-gpu"


def test_runs_are_filtered_and_sorted_by_the_url(open_page):
    app = healthy(open_page(RECORDED, q="connections_1"))
    assert table_with(app, "run", "step_wall_ns")["run"].tolist() == [OTHER]

    app = healthy(open_page(RECORDED, sort="slowest first"))
    times = table_with(app, "run", "step_wall_ns")["step_wall_ns"].tolist()
    assert times == sorted(times, reverse=True)
    app.text_input(key="q").set_value("no such run").run()
    assert "0 runs of" in text_of(healthy(app))


def links_to(app, page: str) -> list[str]:
    return [one.proto.query_string for one in app.main.get("page_link") if one.proto.page == page]


def test_runs_that_are_picked_are_in_the_url(open_page):
    app = healthy(open_page(RECORDED, picked=[ONE, OTHER]))
    (address,) = links_to(app, "compare")
    assert f"a={ONE}&b={OTHER}" in address
    app.text_input(key="q").set_value("connections_1").run()  # names stay picked where rows move
    assert [f"run={OTHER}" in address for address in links_to(healthy(app), "overview")] == [True]
    assert app.query_params["picked"] == [ONE, OTHER]

    app = healthy(open_page(RECORDED, picked=["gone", OTHER], sort="slowest first"))
    assert [f"run={OTHER}" in address for address in links_to(app, "overview")] == [True]


def test_a_run_that_is_picked_by_hand_is_in_the_url(open_page):
    app = healthy(open_page(RECORDED))
    assert not links_to(app, "overview")
    table = next(element for element in app.dataframe if "state" in element.value.columns)
    row = table.value["run"].tolist().index(OTHER)
    app.session_state[table.key] = {"selection": {"rows": [row], "columns": [], "cells": []}}
    app.run()
    assert app.query_params["picked"] == OTHER
    assert links_to(healthy(app), "overview")


def test_overview_shows_the_figures_of_the_report(open_page):
    app = healthy(open_page(RECORDED, "overview", run=ONE))
    report = as_json(build(RECORDED / ONE).to_json())

    shown = {metric.label: metric.value for metric in app.metric}
    assert shown["Step"] == quantity("step_wall_ns", report["metrics"]["step_wall_ns"])
    assert shown["Peak reserved"] == quantity("peak_reserved_bytes", report["metrics"]["peak_reserved_bytes"])
    dimensions = table_with(app, "dimension", "lowest_overlap_pct").to_dict("records")
    assert [row["exposed_ns"] for row in dimensions] == [row["exposed_ns"] for row in report["dimensions"]]
    said = text_of(app)
    assert all(finding["title"] in said for finding in report["findings"])
    assert f"meshscope report {RECORDED / ONE}" in said


def test_findings_lead_to_their_place(open_page):
    app = healthy(open_page(RECORDED, "overview", run=ONE))

    links = [element.proto for element in app.main.get("page_link")]
    to_overlap = [link for link in links if link.page == "overlap" and "dimension=mesh_dp_shard" in link.query_string]
    assert to_overlap
    assert all(f"run={ONE}" in link.query_string for link in links)


def test_ledger_shows_the_prediction_line_by_line(open_page):
    app = healthy(open_page(RECORDED, "ledger", run=ONE))
    ledger = as_json(build(RECORDED / ONE).to_json())["ledger"]

    peaks = table_with(app, "rank", "measured_peak_allocated_bytes").to_dict("records")
    assert [row["error_pct"] for row in peaks] == [rank["error_pct"] for rank in ledger["ranks"]]
    entries = [entry for entry in ledger["ranks"][0]["entries"] if entry["bytes"]]
    lines = table_with(app, "category", "at_peak_bytes")
    assert lines["at_peak_bytes"].tolist() == [entry["at_peak_bytes"] for entry in entries]
    assert "formula" not in lines
    app.toggle(key="formulas").set_value(True).run()
    assert table_with(app, "category", "formula")["formula"].tolist() == [entry["formula"] for entry in entries]
    sent = table_with(app, "kind", "exact_measured")
    assert sent["exact_measured"].tolist() == [row["measured_bytes"] for row in ledger["communication"]]


def test_ledger_shows_times_beside_those_of_the_recording(open_page):
    app = healthy(open_page(RECORDED, "ledger", run=ONE))
    time = as_json(build(RECORDED / ONE).to_json())["ledger"]["time"]

    shown = table_with(app, "figure", "predicted", "measured").to_dict("records")
    assert [row["figure"] for row in shown] == ["step", "compute", "communication", "exposed", "hidden share"]
    assert [row["predicted"] for row in shown] == [
        quantity(one["figure"], one["predicted"]) for one in time["compared"]
    ]
    assert [row["measured"] for row in shown] == [quantity(one["figure"], one["measured"]) for one in time["compared"]]
    longest = table_with(app, "phase", "what", "ns")
    assert longest["ns"].tolist() == [line["ns"] for line in time["ranks"][0]["lines"][: len(longest)]]
    assert "waiting for the rank that comes last" in text_of(app)


def test_ledger_says_why_there_is_no_prediction(open_page, tmp_path):
    write_recording(tmp_path / "foreign")
    said = text_of(healthy(open_page(tmp_path, "ledger", run="foreign")))
    assert "meshscope ledger --module" in said


def test_compare_says_what_the_command_line_says(open_page):
    app = healthy(open_page(RECORDED, "compare", a=ONE, b=OTHER))
    comparison = compare_runs(measure(RECORDED / ONE), measure(RECORDED / OTHER))

    differences = table_with(app, "what", "a", "b")
    assert set(differences["what"]) == {item.what for item in comparison.differences}
    metrics = table_with(app, "metric", "change").set_index("metric")
    for item in comparison.metrics:
        assert metrics.loc[item.metric, "a"] == quantity(item.metric, item.a)
        assert metrics.loc[item.metric, "b"] == quantity(item.metric, item.b)
    assert comparison.verdict in text_of(app)
    app.text_input(key="bound").set_value("step_wall_ns>+2%").run()
    assert "FAILED" in text_of(healthy(app))
    app.text_input(key="bound").set_value("nonsense").run()
    assert len(healthy(app).error) == 1


def test_compare_wants_two_runs(open_page):
    app = healthy(open_page(RECORDED, "compare", a=ONE, b=ONE))
    assert "same run" in text_of(app)


def test_doctor_is_that_of_the_command_line(open_page):
    app = healthy(open_page(RECORDED, "doctor"))
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "doctor", "--json"], capture_output=True, text=True, timeout=120
    )
    modes = json.loads(done.stdout)["modes"]
    table = table_with(app, "mode", "can").set_index("mode")
    assert {name: table.loc[name, "can"].endswith("yes") for name in modes} == {
        name: mode["available"] for name, mode in modes.items()
    }


def test_files_are_offered_for_download_and_for_perfetto(open_page):
    app = healthy(open_page(RECORDED, "files", run=ONE))
    (trace, snapshot) = (element.proto.url for element in app.main.get("link_button"))
    assert trace == f"/raw/{ONE}/profiling/traces/iteration_8/rank0_trace.json.gz"
    assert snapshot.endswith(".pickle.gz")


@pytest.fixture
def broken(tmp_path):
    """Two runs, of which one lacks a rank, has a torn line and a damaged trace."""
    whole = write_recording(tmp_path / "with space" / "whole")
    write_kernels(recording.trace_path(whole, 4, 0), [("matmul", None, 7, 10, 100), ("all_gather", "tp", 9, 60, 100)])
    part = write_recording(tmp_path / "part", ranks=1)
    with recording.steps_path(part, 0).open("a") as file:
        file.write('{"step": 3, "wall')
    trace = recording.trace_path(part, 4, 0)
    trace.parent.mkdir(parents=True)
    trace.write_bytes(recording.trace_path(whole, 4, 0).read_bytes()[:120])
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_partial_recording_is_shown_with_what_it_lacks(open_page, broken, page):
    open_page(broken, "overview", run="part")  # Overlap would show how far the traces are read
    app = healthy(open_page(broken, page, run="part"))

    if page == "overview":
        assert "partial" in text_of(app)
    if page in ("overview", "overlap", "memory"):
        said = "\n".join(error.value for error in app.error).replace("\\", "")
        assert "the last line is torn" in said
        assert "rank1.jsonl" in said
        assert "rank0_trace.json.gz" in said


def test_how_a_run_ended_is_said_once(open_page, tmp_path):
    recording.write_status(write_recording(tmp_path / "failed", ranks=0), "failed", "rank 1: out of memory")
    app = healthy(open_page(tmp_path, "overview", run="failed"))
    assert ["out of memory" in warning.value for warning in app.warning] == [True]
    assert not any("out of memory" in error.value for error in app.error)


@pytest.mark.parametrize("page", PAGES)
def test_folder_with_a_space_in_its_name(open_page, broken, page):
    app = healthy(open_page(broken, page, run="with space/whole"))

    if page == "overview":
        assert f"meshscope report '{broken / 'with space' / 'whole'}'" in text_of(app)


def test_failed_run_says_why(open_page, tmp_path):
    run = write_recording(tmp_path / "failed")
    recording.write_status(run, "failed", "rank 1: OutOfMemoryError: <b>CUDA</b> out of memory")
    said = text_of(healthy(open_page(tmp_path, "overview", run="failed")))
    assert "✗ failed" in said
    assert "OutOfMemoryError: <b>CUDA</b>" in said


def test_unreadable_recordings_are_one_error_each(open_page, tmp_path):
    later = write_recording(tmp_path / "later")
    (later / "manifest.json").write_text('{"schema_version": 99}')
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "rank0_trace.json.gz").write_bytes(b"\x1f\x8b junk")

    rows = table_with(healthy(open_page(tmp_path)), "run", "state").set_index("run")
    assert rows.loc["later", "state"] == "✗ unreadable"
    for name, why in (("later", "schema_version 99"), ("junk", "damaged")):
        app = healthy(open_page(tmp_path, "overview", run=name))
        assert len(app.error) == 1
        assert why in app.error[0].value.replace("\\", "")


def test_live_run_grows_and_then_ends(open_page, tmp_path):
    run = write_recording(tmp_path / "live", manifest={"launcher": {"host": os.uname().nodename, "pid": os.getpid()}})
    recording.write_status(run, "running")
    app = healthy(open_page(tmp_path, "overview", run="live"))
    assert "Running: 3 steps so far" in text_of(app)

    line = json.loads(recording.steps_path(run, 0).read_text().splitlines()[-1])
    for rank in (0, 1):
        with recording.steps_path(run, rank).open("a") as file:
            file.write(json.dumps(line | {"step": 3}) + "\n")
    assert "Running: 4 steps so far" in text_of(healthy(app.run()))
    recording.write_status(run, "complete")
    said = text_of(healthy(app.run()))
    assert "Running" not in said
    assert "✓ complete" in said


def test_changed_recording_is_analysed_again(open_page, tmp_path):
    run = write_recording(tmp_path / "run")
    step = {m.label: m.value for m in open_page(tmp_path, "overview", run="run").metric}["Step"]
    rewrite_steps(run, 1, wall_ns=[1, 5_000_000, 5_000_000])
    rewrite_steps(run, 0, wall_ns=[1, 5_000_000, 5_000_000])
    again = {m.label: m.value for m in open_page(tmp_path, "overview", run="run").metric}["Step"]
    assert (step, again) == ("12.500 ms", "5.000 ms")


def test_folder_of_another_tool(open_page, tmp_path):
    dump = tmp_path / "outputs"
    write_kernels(dump / "profiling" / "traces" / "iteration_4" / "rank0_trace.json.gz", [("matmul", None, 7, 10, 100)])
    write_snapshot(dump / "profiling" / "memory_snapshot" / "step_000000000004" / "000000_step_4.pickle")
    rows = table_with(healthy(open_page(tmp_path)), "run", "layout")
    assert rows.to_dict("records")[0]["run"] == "outputs"
    assert rows.to_dict("records")[0]["layout"] == "1 trace, 1 snapshot"
    assert healthy(open_page(tmp_path, "overview", run="outputs")).title[0].value == "outputs"


def test_experiment_is_listed_with_its_verdict(open_page, tmp_path):
    experiment = tmp_path / "probe"
    write_recording(experiment / "trials" / "00-unset")
    recording.write_json(experiment / "experiment.json", {"knob": "alloc_conf", "mode": "cpu", "pairs": 2})
    recording.write_json(experiment / "analysis.json", {"verdict": "no difference", "recommended": None})
    app = healthy(open_page(tmp_path))
    assert table_with(app, "knob", "verdict")["verdict"].tolist() == ["no difference"]
    assert "probe/trials/00-unset" in table_with(app, "run", "state")["run"].tolist()


@pytest.mark.shared_data
def test_case_72(open_page, cases, tmp_path):
    """A folder with t01 and d02: the table of the command line to the last digit, one readable error."""
    shutil.copytree(cases / "files" / "t01-dlrm8", tmp_path / "case" / "t01")
    shutil.copytree(cases / "files" / "d02-trunc-json", tmp_path / "case" / "d02")
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "overlap", str(tmp_path / "case"), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    expected = json.loads(done.stdout)
    app = healthy(open_page(tmp_path, "overview", run="case"))

    table = table_with(app, "source", "overlap_pct").to_dict("records")
    assert len(table) == len(expected["ranks"]) == 8
    for row, rank in zip(table, expected["ranks"], strict=True):
        assert {name: row[name] for name in rank["window"]} == rank["window"]
    (error,) = app.error
    assert "d02" in error.value.replace("\\", "")
    assert "byte" in error.value
