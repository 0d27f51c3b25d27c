"""`meshscope run` from the outside, with the real trainer on gloo."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.recording import read_recording

pytestmark = pytest.mark.distributed

PATIENCE_S = 180
RUN = [sys.executable, "-m", "harness.cli", "run", "--module", "debug", "--mode", "cpu", "--config"]


@contextmanager
def started(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of more steps than it will get, all of whose ranks have ended one."""
    command = [*RUN, "tiny", "--training.steps", "100000", "--out", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while sum(path.stat().st_size > 0 for path in directory.glob("steps/rank*.jsonl")) < 4:
            assert time.monotonic() < deadline, "the ranks did not come up"
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.1)
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=PATIENCE_S)


def test_run_records_and_reports(tmp_path):
    done = subprocess.run(
        [*RUN, "tiny", "--training.steps", "6"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )

    assert done.returncode == 0, done.stderr
    latest = tmp_path / "runs" / "out" / "latest"
    assert latest.is_symlink()
    recording = read_recording(latest)
    assert recording.errors == []
    assert recording.status is not None
    assert recording.status.state == "complete"
    assert {rank: len(rows) for rank, rows in recording.steps.items()} == dict.fromkeys(range(4), 6)
    assert len(list(latest.glob("profiling/traces/iteration_6/rank*_trace.json.gz"))) == 4
    assert recording.manifest["launcher"]["pid"] > 0
    assert recording.manifest["config"] == json.loads((latest / "config.json").read_text())
    assert "mode cpu (asked for)" in done.stderr
    assert [f"step {n}/6" in done.stderr for n in range(1, 7)] == [True] * 6
    assert "4 ranks, dp_shard 2 × tp 2" in done.stdout


def test_rank_that_is_killed_while_others_communicate_is_the_one_that_is_named(tmp_path):
    with started(tmp_path / "out") as process:
        os.kill(read_recording(tmp_path / "out").ranks[2]["pid"], signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 3
    assert errors.splitlines()[-1].startswith("meshscope run: error: rank 2 was killed by SIGKILL")
    assert read_recording(tmp_path / "out").status.state == "failed"


def test_interrupted_run_keeps_its_steps(tmp_path):
    with started(tmp_path / "out") as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 130
    assert "Traceback" not in errors
    recording = read_recording(tmp_path / "out")
    assert recording.status.reason == "interrupted by SIGINT"
    assert recording.missing_ranks == []
    assert all(document["exception"] == "terminated by SIGTERM" for document in recording.ranks.values())


def test_run_whose_progress_nobody_reads_any_more_goes_on(tmp_path):
    command = [*RUN, "single", "--training.steps", "3", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(timeout=PATIENCE_S) == 0
    recording = read_recording(tmp_path / "out")
    assert recording.status is not None
    assert recording.status.state == "complete"
    assert len(recording.steps[0]) == 3
