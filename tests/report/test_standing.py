"""Runs that ended before their first step, and runs that nobody writes any more: said in text, JSON and HTML."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from written import write_recording

from harness import recording
from harness.cli import main
from harness.compare import standing
from harness.compare.standing import is_gone
from harness.config import Parallelism, Trainer
from harness.config_json import to_dict
from harness.report import build
from harness.report.html import page
from harness.report.text import render

CONFIG = Trainer.Config(name="written", world_size=2, parallelism=Parallelism.Config(tp=2))
linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def begun(directory: Path, state: recording.State, reason: str | None = None, **manifest: Any) -> Path:
    """Two ranks that opened their files, and no step."""
    recording.merge_manifest(
        directory, {"mode": "cpu", "world_size": 2, "recorded_ranks": [0, 1], "config": to_dict(CONFIG), **manifest}
    )
    for rank in (0, 1):
        path = recording.steps_path(directory, rank)
        path.parent.mkdir(exist_ok=True)
        path.touch()
        about = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "end_state": None}
        recording.write_json(recording.rank_path(directory, rank), about)
    (directory / "logs").mkdir()
    recording.write_status(directory, state, reason)
    return directory


def fail(directory: Path, rank: int, exception: str, when: int) -> None:
    facts = {"rank": rank, "end_state": "failed", "exception": exception, "failed_unix_ns": when}
    recording.write_json(recording.rank_path(directory, rank), facts)


@pytest.fixture
def failed(tmp_path) -> Path:
    begun(tmp_path, "failed", "torch.distributed.run exited with 1")
    fail(tmp_path, 0, "DistBackendError: peer gone", 20)
    fail(tmp_path, 1, "ValueError: bad batch", 10)
    return tmp_path


def test_a_run_that_failed_before_its_first_step_is_reported(failed, capsys):
    assert main(["report", str(failed)]) == 3
    out, err = capsys.readouterr()
    lines = [line.strip() for line in out.splitlines()]
    assert "failed before its first step: torch.distributed.run exited with 1" in lines
    assert lines.index("rank 1: ValueError: bad batch") < lines.index("rank 0: DistBackendError: peer gone")
    assert f"logs: {failed / 'logs'}" in lines
    assert err.count("\n") == 1
    assert "before its first step" in err
    assert "ValueError: bad batch" in err


def test_json_and_html_of_a_run_before_its_first_step(failed, tmp_path_factory, capsys):
    html = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["report", str(failed), "--json", "--html", str(html)]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == {
        "state": "failed",
        "reason": "torch.distributed.run exited with 1",
        "before_first_step": True,
        "abandoned": None,
        "failures": ["rank 1: ValueError: bad batch", "rank 0: DistBackendError: peer gone"],
        "logs": str(failed / "logs"),
    }
    assert (report["steps"], report["overlap"], report["memory"]) == ([], None, None)
    assert report["missing_ranks"] == [0, 1]
    (error,) = report["errors"]
    assert error["file"] == str(failed)
    assert "failed before its first step" in html.read_text()
    assert "rank 1: ValueError: bad batch" in html.read_text()


def test_what_the_reason_says_is_not_said_again(tmp_path):
    begun(tmp_path, "failed", "rank 0: ValueError: bad batch")
    fail(tmp_path, 0, "ValueError: bad batch", 1)
    fail(tmp_path, 1, "terminated by SIGTERM", 2)
    assert standing(recording.read_recording(tmp_path)).details() == [f"logs: {tmp_path / 'logs'}"]


def test_a_run_that_has_just_begun(tmp_path, capsys):
    begun(tmp_path, "running")
    assert main(["report", str(tmp_path)]) == 3
    out, err = capsys.readouterr()
    assert "running, no step has ended" in out
    assert "gone" not in out + err


def test_nothing_is_compared_with_a_run_before_its_first_step(failed, tmp_path_factory, capsys):
    other = write_recording(tmp_path_factory.mktemp("other"))
    assert main(["compare", str(other), str(failed)]) == 3
    assert "before its first step" in capsys.readouterr().err


@pytest.fixture
def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@linux
@pytest.mark.parametrize(("host", "gone"), [(None, True), (socket.gethostname(), True), ("another.example", False)])
def test_a_launcher_that_was_killed(tmp_path, ended_pid, host, gone):
    launcher = {"pid": ended_pid} | ({"host": host} if host else {})
    begun(tmp_path, "running", launcher=launcher)
    row = recording.steps_path(tmp_path, 0)
    row.write_text('{"step": 0, "wall_ns": 5}\n')
    os.utime(row, (time.time() - 90, time.time() - 90))
    report = build(tmp_path)
    said = f"its launcher (pid {ended_pid}) is gone and no row came for 90 s"
    assert (said in (report.standing.abandoned or "").replace("91 s", "90 s")) == gone
    assert ("running, but its launcher" in render(report)) == gone
    assert ("running, abandoned" in page(report)) == gone
    assert any(finding.severity == "high" and "is gone" in finding.title for finding in report.findings) == gone


@linux
def test_a_launcher_that_lives(tmp_path):
    begun(tmp_path, "running", launcher={"pid": os.getpid(), "host": socket.gethostname()})
    assert standing(recording.read_recording(tmp_path)).abandoned is None


@linux
def test_ranks_of_a_loop_without_launcher(tmp_path, ended_pid):
    begun(tmp_path, "running")
    assert standing(recording.read_recording(tmp_path)).abandoned is None, "this process is alive"
    for rank in (0, 1):
        about = {"rank": rank, "pid": ended_pid, "host": socket.gethostname(), "end_state": None}
        recording.write_json(recording.rank_path(tmp_path, rank), about)
    assert "the processes of its ranks are gone" in (standing(recording.read_recording(tmp_path)).abandoned or "")


@linux
def test_another_process_with_the_same_id_is_not_the_launcher():
    year_ns = 365 * 86400 * 10**9
    assert not is_gone(os.getpid(), time.time_ns())
    assert is_gone(os.getpid(), time.time_ns() - year_ns)


def test_a_complete_run_is_never_abandoned(tmp_path, ended_pid):
    begun(tmp_path, "complete", launcher={"pid": ended_pid, "host": socket.gethostname()})
    assert standing(recording.read_recording(tmp_path)).abandoned is None
