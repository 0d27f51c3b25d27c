"""Steps that a trace holds in part: named everywhere, and in no mean, comparison or picture."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from written import rewrite_steps, write_kernels, write_recording, write_trace

from harness import recording
from harness.cli import main
from harness.config import Parallelism, Trainer
from harness.config_json import to_dict
from harness.ledger import predict
from harness.report import build
from harness.report.html import page
from harness.report.text import render
from harness.sources import find_sources
from harness.trace import complete, read_captures

CONFIG = Trainer.Config(name="written", world_size=2, parallelism=Parallelism.Config(tp=2))
CUT_SHORT = "step 1 of rank 0 incomplete (no finished row in steps/): neither compared nor in means"


def interrupted(directory: Path) -> Path:
    """Rank 0's trace holds step 1, which ended after one of its collectives and has no row."""
    write_recording(directory, config=to_dict(CONFIG), steps=1)
    recording.write_status(directory, "failed", "interrupted by SIGINT")
    write_trace(directory, 0, [("all_gather", 1, 64)])
    return directory


def test_an_interrupted_step_is_compared_with_nothing(tmp_path):
    report = build(interrupted(tmp_path))
    assert {row.agree for row in report.communication} == {None}
    assert {row.measured_count for row in report.communication} == {None}
    assert not any("not what the configuration says" in finding.title for finding in report.findings)
    assert report.dimensions == report.step_parts == []
    assert report.metrics["comm_ns"].value is None
    assert report.metrics["comm_ns"].reason == report.metrics["overlap_pct"].reason == "no complete step in the traces"
    text = render(report)
    assert CUT_SHORT in text
    assert "DIFFERS" not in text
    assert CUT_SHORT.replace("step 1", "Step 1") in page(report)
    (entry,) = report.to_json()["overlap"]["ranks"]
    assert entry["incomplete_steps"] == [1]
    assert [step["step"] for step in entry["steps"]] == [1, 1], "what the file holds stays in --json"


def test_overlap_says_that_a_step_is_incomplete(tmp_path, capsys):
    assert main(["overlap", str(interrupted(tmp_path))]) == 0
    assert "note (rank 0): step 1 is incomplete (no finished row in steps/)" in capsys.readouterr().out


@pytest.mark.parametrize(("of", "shown"), [([], "no complete step"), (["--per-rank"], "1 (incomplete)")])
def test_incomplete_steps_are_in_no_mean_over_ranks(tmp_path, capsys, of, shown):
    interrupted(tmp_path)
    write_trace(tmp_path, 1, [("all_gather", 1, 64)])
    assert main(["overlap", str(tmp_path), "--by", "step", *of]) == 0
    assert shown in capsys.readouterr().out


def two_steps(directory: Path, rows: int) -> Path:
    """Step 0 communicates 2 µs in a whole trace, step 1 only begins to; rows say which of them ended."""
    write_recording(directory, config=to_dict(CONFIG), ranks=1, world_size=1, steps=rows)
    events = []
    for step in (0, 1):
        at = 1000 * step
        events += [
            {"name": f"ProfilerStep#{step}", "ts": at, "dur": 900},
            {"name": f"comm:all_reduce:mesh_tp:{step}:64", "ts": at + 1, "dur": 2 + 500 * step},
        ]
    path = recording.trace_path(directory, 2, 0)
    path.parent.mkdir(parents=True)
    shared = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1}
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [shared | event for event in events], "distributedInfo": {"rank": 0}}, file)
    return directory


@pytest.mark.parametrize(("rows", "comm_ns", "measured"), [(2, 252_000, [0, 1]), (1, 2_000, [0])])
def test_means_are_of_complete_steps(tmp_path, rows, comm_ns, measured):
    report = build(two_steps(tmp_path, rows))
    assert report.metrics["comm_ns"].value == comm_ns
    assert report.dimensions[0]["comm_ns"] == sum({0: 2_000, 1: 502_000}[step] for step in measured)
    assert [item["step"] for item in report.step_parts] == measured
    assert report.overlap["ranks"][0]["window"]["comm_ns"] == 504_000, "the whole file"


def test_a_row_that_the_device_never_finished_ends_no_step(tmp_path):
    rewrite_steps(two_steps(tmp_path, 2), 0, tags=[[], ["unfinished"]])
    (capture,) = read_captures(find_sources(tmp_path))[0]
    assert list(capture.incomplete) == [1]
    (whole,) = complete([capture])
    assert [record.step for record in whole.records()] == [0]


def test_without_rows_nothing_is_known_of_a_ranks_steps(tmp_path):
    recording.steps_path(two_steps(tmp_path, 1), 0).unlink()
    assert [capture.incomplete for capture in read_captures(find_sources(tmp_path))[0]] == [{}]


def test_collectives_of_a_whole_trace_are_compared(tmp_path):
    write_recording(tmp_path, config=to_dict(CONFIG), steps=2)
    write_trace(tmp_path, 0, [(c.kind, c.count, c.bytes // c.count) for c in predict(CONFIG, "cpu").collectives])
    assert {row.agree for row in build(tmp_path).communication} == {True}


@pytest.mark.parametrize(("lost", "incomplete"), [(0, []), (1, []), (2, [3])])
def test_a_capture_that_ended_before_its_last_launch_ran(tmp_path, lost, incomplete):
    """Launches 1 and 2 of a step; the device event of launch `lost` is not in the file."""
    path = write_kernels(tmp_path / "t.json.gz", [("gemm", None, 7, 5, 10), ("gemm", None, 7, 20, 10)])
    with gzip.open(path, "rt") as file:
        content = json.load(file)
    for event in content["traceEvents"]:
        if event["cat"] == "cuda_runtime":
            event["ts"] = event["args"]["correlation"]
    content["traceEvents"] = [
        event
        for event in content["traceEvents"]
        if not (event["cat"] == "kernel" and event["args"]["correlation"] == lost)
    ]
    with gzip.open(path, "wt") as file:
        json.dump(content, file)
    (capture,) = read_captures(find_sources(path))[0]
    assert list(capture.incomplete) == incomplete
