"""The recordings that ship with the project: readable, small, and as their README says."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.report import build
from probes.report.reading import read_analysis

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "runs" / "recorded"
EXPERIMENT = RECORDED / "h200x2_probe_max_connections"
PEAKS = ("allocated", "active")
LIMIT_BYTES = 10_000_000
NAMES = sorted(path.parent.name for path in RECORDED.glob("*/manifest.json"))


def exposed_pct(name: str) -> float:
    whole = next(item for item in build(RECORDED / name).dimensions if item["dimension"] == "mesh_dp_shard")
    return 100 * whole["exposed_ns"] / whole["comm_ns"]


@pytest.mark.parametrize("name", NAMES)
def test_recording_is_whole(name):
    report = build(RECORDED / name)
    assert report.errors == []
    assert report.recording is not None
    assert report.recording.missing_ranks == []
    assert report.metrics["step_wall_ns"].value
    assert f"`{name}`" in (RECORDED / "README.md").read_text()


def test_what_one_hardware_queue_does():
    unset, one = exposed_pct("h200x2_fsdp2"), exposed_pct("h200x2_fsdp2_connections_1")
    assert one > 2 * unset
    titles = [finding.title for finding in build(RECORDED / "h200x2_fsdp2_connections_1").findings]
    assert any("CUDA_DEVICE_MAX_CONNECTIONS=1" in title for title in titles)


def test_what_record_stream_does():
    held, recorded = (build(RECORDED / f"h200_collectives_{name}") for name in ("references", "record_stream"))
    peaks = [{name: report.metrics[f"peak_{name}_bytes"].value for name in PEAKS} for report in (held, recorded)]
    assert peaks[0]["allocated"] == peaks[1]["allocated"] == peaks[0]["active"]
    assert peaks[1]["active"] > 10 * peaks[0]["active"]
    (stacking,) = [finding for finding in recorded.findings if "stacks up" in finding.title]
    assert all(site in stacking.where for site in (":all_gather", ":multiply", ":reduce_scatter"))
    assert not any("stacks up" in finding.title for finding in held.findings)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("h200x2_1b_")])
def test_two_gpus_did_what_the_ledger_says(name):
    report = build(RECORDED / name)
    ranks = report.prediction.ranks
    assert [rank.rank for rank in ranks] == [0, 1]
    assert all(abs(rank.error_pct) < 0.02 for rank in ranks)
    assert report.communication
    assert all(row.agree for row in report.communication)


def test_why_the_ranks_of_the_pipeline_are_idle():
    report = build(RECORDED / "h200x2_1b_pp2")
    (idle,) = [finding for finding in report.findings if finding.title.startswith("Pipeline ranks are idle")]
    parts = [idle.evidence[name] for name in ("schedule_bubble_pct", "unequal_stages_pct", "waiting_pct")]
    assert sum(parts) == pytest.approx(idle.evidence["measured_bubble_pct"])
    assert parts[0] == pytest.approx(100 * (1 - 8 * 3 / 27))  # (p - 1)·(F + B) of (m + p - 1)·(F + B)
    assert parts[1] > 10 > 1 > abs(parts[2])
    assert "stage 1 takes" in idle.advice


def test_the_peak_of_the_pipeline_is_that_of_the_rank_with_a_snapshot():
    report = build(RECORDED / "h200x2_1b_pp2")
    (peak,) = [finding for finding in report.findings if finding.title.startswith("Memory peaks")]
    assert peak.where == "rank 0"
    assert peak.evidence["peak_allocated_bytes"] == report.ranks[0]["peak_allocated_bytes"]


def rewritten_experiment(folder: Path, rewrite: Callable[[dict[str, Any]], None]) -> Path:
    """The shipped experiment with another analysis.json."""
    shutil.copytree(EXPERIMENT, folder)
    said = json.loads((folder / "analysis.json").read_text())
    rewrite(said)
    (folder / "analysis.json").write_text(json.dumps(said))
    return folder


def test_an_experiment_without_its_traces_is_what_it_was_with_them():
    said = json.loads((EXPERIMENT / "analysis.json").read_text())
    analysis = read_analysis(EXPERIMENT)
    found = {(metric["arm"], metric["metric"]): metric for metric in analysis.to_json()["metrics"]}
    assert {name for _, name in found} > {"exposed_ns", "overlap_pct"}
    for metric in said["metrics"]:
        again = found[metric["arm"], metric["metric"]]
        assert again["verdict"] == metric["verdict"]
        assert [again[name] for name in ("a", "b", "ci_low", "ci_high")] == pytest.approx(
            [metric[name] for name in ("a", "b", "ci_low", "ci_high")]
        )
    assert any(note.startswith("exposed_ns, overlap_pct: as analysis.json has them") for note in analysis.notes)


def of_other_steps(said: dict[str, Any]) -> None:
    for trial in said["trials"]:
        trial["values"]["step_wall_ns"] += 1


@pytest.mark.parametrize("rewrite", [of_other_steps, lambda said: said.update(trials=[{"path": 3}])])
def test_what_was_said_of_other_trials_is_not_taken(tmp_path, rewrite):
    analysis = read_analysis(rewritten_experiment(tmp_path / "copy", rewrite))
    metrics = {metric["metric"] for metric in analysis.to_json()["metrics"]}
    assert "step_wall_ns" in metrics
    assert not metrics & {"exposed_ns", "overlap_pct"}
    assert not any("analysis.json" in note for note in analysis.notes)


def test_all_of_it_is_small():
    assert len(NAMES) >= 5
    assert sum(path.stat().st_size for path in RECORDED.rglob("*") if path.is_file()) <= LIMIT_BYTES


def test_trimming_again_changes_no_figure(tmp_path):
    source = RECORDED / "h200x2_fsdp2"
    done = subprocess.run([sys.executable, ROOT / "runs" / "trim.py", source, tmp_path / "again"], timeout=60)
    assert done.returncode == 0
    first, again = build(source), build(tmp_path / "again")
    assert again.overlap is not None
    assert first.overlap is not None
    assert [entry["window"] for entry in again.overlap["ranks"]] == [
        entry["window"] for entry in first.overlap["ranks"]
    ]
    assert again.metrics == first.metrics


@pytest.mark.parametrize(
    ("pattern", "content"),
    [
        ("*_trace.json.gz", b"no gzip"),
        ("*_trace.json.gz", gzip.compress(b"[1]")),
        ("*_trace.json.gz", gzip.compress(b'{"traceEvents": [1]}')),
        ("*_trace.json.gz", gzip.compress(b"{}")[:10] + b"\xff" * 9),
        ("manifest.json", b"{"),
    ],
    ids=["no gzip", "no object", "no events", "torn", "manifest"],
)
def test_what_cannot_be_trimmed_is_said(tmp_path, pattern, content):
    shutil.copytree(RECORDED / "h200x2_fsdp2", tmp_path / "broken")
    next((tmp_path / "broken").rglob(pattern)).write_bytes(content)
    command = [sys.executable, ROOT / "runs" / "trim.py", tmp_path / "broken", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.endswith("nothing is written")
    assert not (tmp_path / "out").exists()


def test_a_recording_is_not_trimmed_into_itself(tmp_path):
    shutil.copytree(RECORDED / "h200x2_fsdp2", tmp_path / "run")
    out = tmp_path / "run" / "profiling" / "small"
    command = [sys.executable, ROOT / "runs" / "trim.py", tmp_path / "run", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "copied into itself" in done.stderr.splitlines()[-1]
    assert not out.exists()


def test_an_interrupted_trimming_leaves_nothing(tmp_path):
    """Its trace is a pipe that nobody writes: the interrupt comes while it is read."""
    shutil.copytree(RECORDED / "h200x2_fsdp2", tmp_path / "run")
    trace = next((tmp_path / "run").rglob("*_trace.json.gz"))
    trace.unlink()
    os.mkfifo(trace)
    command = [sys.executable, ROOT / "runs" / "trim.py", tmp_path / "run", tmp_path / "out"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process, open(trace, "wb"):  # once it reads
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    (line,) = said.splitlines()
    assert line.endswith("interrupted; nothing is written")
    assert not (tmp_path / "out").exists()
