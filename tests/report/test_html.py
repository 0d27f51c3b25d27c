"""The HTML report: the figures of --json, nothing loaded, strangers' words as text, and what is missing said."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
from html_page import Page, loads
from written import MIB, rewrite_steps, write_kernels, write_recording, write_snapshot, write_trace

from harness import recording
from harness.cli import main
from harness.config import Parallelism, Trainer
from harness.config_json import to_dict
from harness.report import build
from harness.report.html import page
from harness.report.markup import Html, figure_cell, tag

CONFIG = Trainer.Config(name="written", world_size=2, parallelism=Parallelism.Config(tp=2))
STEP = [
    ("gemm", None, 7, 100, 4000),
    ("_allgather_base", "mesh_dp_shard", 20, 50, 1000),
    ("_reduce_scatter_base", "mesh_dp_shard", 21, 4500, 500),
    ("allreduce", "mesh_tp", 7, 4600, 300),
]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A recording with steps, a trace of each rank and a snapshot."""
    directory = write_recording(tmp_path / "run", config=to_dict(CONFIG), steps=5, manifest={"mode": "real"})
    for rank in range(2):
        path = recording.trace_path(directory, 4, rank)
        write_kernels(path, STEP, rank=rank, around=["FSDP::pre_forward (layers.0)", "FSDP::all_gather (layers.0)"])
    write_snapshot(recording.snapshot_path(directory, 4, 0), pending=3)
    return directory


def test_every_section_of_a_whole_recording(whole):
    text = page(build(whole))
    found = Page(text)
    assert found.open == []
    assert len(found.ids()) == len(set(found.ids()))
    titles = "Findings, Run, Steps, Communication and overlap, Life of a parameter, Memory, Predicted beside measured"
    for title in [*titles.split(", "), "Collectives"]:
        assert title in found.text
    assert "Not in this report" not in found.text
    pictures = [a for name, a in found.elements if name == "svg" and a.get("role") == "img"]
    assert len(pictures) == 6
    assert all(picture["aria-label"] for picture in pictures)
    assert len(text) < 2_000_000


def test_figures_are_those_of_json(whole, capsys, tmp_path):
    file = tmp_path / "report.html"
    assert main(["report", str(whole), "--json", "--html", str(file)]) == 0
    said = json.loads(capsys.readouterr().out)
    found = Page(file.read_text())

    for name, value in said["metrics"].items():
        if value is not None:
            assert value in found.figures(name), name
    ranks = said["ranks"]
    assert found.figures("peak_allocated_bytes")[1:3] == [rank["peak_allocated_bytes"] for rank in ranks]
    assert found.figures("median_step_wall_ns") == [rank["median_step_wall_ns"] for rank in ranks]
    assert found.figures("wall_ns") == [step["wall_ns"] for step in said["steps"]]
    assert found.figures("overlap_ns") == [item["overlap_ns"] for item in said["dimensions"]]
    assert found.figures("lowest_overlap_pct") == [item["lowest_overlap_pct"] for item in said["dimensions"]]
    assert found.figures("predicted_count") == [row["predicted_count"] for row in said["communication"]]
    assert found.figures("measured_count") == [row["measured_count"] for row in said["communication"]]
    ledger = said["ledger"]["ranks"]
    assert found.figures("predicted_bytes")[: len(ledger)] == [rank["peak_allocated_bytes"] for rank in ledger]
    assert found.figures("error_pct") == [rank["error_pct"] for rank in ledger]
    assert found.figures("max_pending_bytes") == [
        said["memory"]["files"][0]["devices"][0]["stacking"]["max_pending_bytes"]
    ]
    for finding in said["findings"]:
        assert finding["title"] in found.text
        assert finding["advice"] in found.text


def test_parts_of_a_step_add_up_to_its_span(whole):
    """gemm 100 to 4100; all-gather from 50; reduce-scatter 4500 to 5000 and all-reduce 4600 to 4900 without compute."""
    for item in build(whole).step_parts:
        assert item["compute_ns"] == 4_000_000
        assert item["exposed_alone_ns"] == {"mesh_dp_shard": 250_000}
        assert item["exposed_together_ns"] == 300_000
        assert item["idle_ns"] == 400_000
        assert item["span_ns"] == 4_950_000
        parts = item["compute_ns"] + sum(item["exposed_alone_ns"].values()) + item["exposed_together_ns"]
        assert parts + item["exposed_memory_ns"] + item["idle_ns"] == item["span_ns"]


def test_nothing_is_loaded_from_anywhere(whole):
    text = page(build(whole))
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in loads(text)), loads(text)
    assert not re.search(r"https?://", text)
    policies = [a["content"] for name, a in Page(text).elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


HOSTILE = "</title></svg><script>alert(1)</script><img src=x onerror=alert(2)>\"' $\\frac{$ _x \x1b[31m \u202e 名"


def test_names_of_strangers_are_text(tmp_path, recwarn):
    directory = tmp_path / "run"
    write_recording(directory, config={"name": HOSTILE}, manifest={"mode": "real", "argv": [HOSTILE]})
    rewrite_steps(directory, 0, tags=[[HOSTILE]] * 3, phases=[{HOSTILE: {"peak_allocated_bytes": MIB}}] * 3)
    recording.write_status(directory, "failed", HOSTILE)
    write_kernels(recording.trace_path(directory, 4, 0), [("gemm", None, 7, 1, 90), (HOSTILE, HOSTILE, 20, 50, 80)])
    write_snapshot(recording.snapshot_path(directory, 4, 0), pending=3, site=f"/x/{HOSTILE}.py")
    text = page(build(directory))
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in loads(text))
    assert not [name for name, _ in Page(text).elements if name in ("script", "img")]
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "<script>alert(1)</script>" in Page(text).text
    assert not recwarn.list


def test_traces_alone(tmp_path):
    write_kernels(tmp_path / "rank0_trace.json.gz", STEP, step=None)
    found = Page(page(build(tmp_path)))
    assert "Whole files, which name no steps" in found.text
    for section in ("Run: no manifest", "Steps: no step states its time", "Memory: no step states memory"):
        assert section in found.text
    assert "Where a traced step goes" not in found.text


def test_a_snapshot_alone(tmp_path):
    found = Page(page(build(write_snapshot(tmp_path / "rank0_snapshot.pickle", pending=2))))
    assert "Memory over time" in found.text
    assert found.figures("max_pending_bytes") == [200 * MIB], "two blocks wait while the third is allocated"
    assert "train.py:7:forward" in found.text
    assert "Communication and overlap: no trace" in found.text


def test_host_time_is_said(tmp_path):
    write_trace(write_recording(tmp_path), 0, [("all_gather", 2, 64)])
    found = Page(page(build(tmp_path)))
    assert "Host time is what the calls took on the CPU" in found.text
    assert "Peaks of the steps" in found.text


def test_what_could_not_be_read_is_named(tmp_path, capsys):
    write_kernels(tmp_path / "rank0_trace.json.gz", STEP)
    (tmp_path / "rank1_trace.json.gz").write_bytes(b"\x1f\x8bnot gzip")
    file = tmp_path / "out" / "report.html"
    assert main(["report", str(tmp_path), "--html", str(file)]) == 4
    assert "rank1_trace.json.gz" in capsys.readouterr().err
    assert "rank1_trace.json.gz" in Page(file.read_text()).text


def test_a_page_that_cannot_be_written_is_one_line(tmp_path, capsys):
    write_kernels(tmp_path / "rank0_trace.json.gz", STEP)
    (tmp_path / "file").write_text("")
    assert main(["report", str(tmp_path / "rank0_trace.json.gz"), "--html", str(tmp_path / "file" / "x.html")]) == 3
    err = capsys.readouterr().err
    assert "cannot be written" in err
    assert len(err.splitlines()) == 1


def test_many_steps_and_ranks_stay_small(tmp_path):
    write_recording(tmp_path, ranks=64, world_size=64, steps=300, peak_reserved_bytes=9 * MIB)
    text = page(build(tmp_path))
    assert len(text) < 1_000_000
    assert "The last 60 of 300 steps" in text
    assert "The first 32 of 64 are drawn." in text


def test_events_without_length(tmp_path, recwarn):
    """A trace whose only event takes no time, and a history within one microsecond."""
    write_kernels(tmp_path / "rank0_trace.json.gz", [("allreduce", "mesh_dp", 20, 5, 0)])
    path = write_snapshot(tmp_path / "rank0_snapshot.pickle")
    content = pickle.loads(path.read_bytes())
    for event in content["device_traces"][0]:
        event["time_us"] = 7
    path.write_bytes(pickle.dumps(content, protocol=4))
    found = Page(page(build(tmp_path)))
    assert found.figures("span_ns") == [0]
    assert "Memory over time" in found.text
    assert not recwarn.list


def test_rows_that_state_nothing(tmp_path, recwarn):
    rows = {"wall_ns": None, "peak_allocated_bytes": None, "phases": "none", "loss": "nan", "tags": None}
    found = Page(page(build(write_recording(tmp_path, **rows))))
    assert "Steps: no step states its time" in found.text
    assert found.figures("peak_allocated_bytes") == []
    assert not recwarn.list


def test_unknown_and_small_figures_are_not_zero():
    assert ">16 B</td>" in figure_cell("bytes", 16)
    assert (
        Html(figure_cell("peak_allocated_bytes", None)) == '<td class="n" data-figure="peak_allocated_bytes">n/a</td>'
    )
    assert figure_cell("wall_ns", 0) == '<td class="n" data-figure="wall_ns" data-value="0">0.000 ms</td>'
    assert tag("b", "<i>", Html("<br>")) == "<b>&lt;i&gt;<br></b>"


@pytest.mark.shared_data
@pytest.mark.parametrize(
    "name", ["h200_fsdp4_tp2", "h200x2_fsdp2_connections_unset", "h200x2_collectives_record_stream"]
)
def test_real_recordings(recordings, name):
    report = build(recordings / name)
    text = page(report)
    assert Page(text).open == []
    assert len(text) < 500_000
    for item in report.step_parts:
        exposed = sum(item["exposed_alone_ns"].values()) + item["exposed_together_ns"]
        assert exposed == item["exposed_ns"]
        assert item["compute_ns"] + exposed + item["exposed_memory_ns"] + item["idle_ns"] == item["span_ns"]
