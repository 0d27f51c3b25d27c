"""Experiments with real launches of ranks without torch: outcomes, voids, and going on after being killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from experiments import PROGRAM, experiment

from harness import recording
from harness.commands import probe
from harness.errors import UsageError
from probes.text import render

pytestmark = pytest.mark.distributed

PATIENCE_S = 60
# Ranks without torchrun: half a second instead of several.
QUICK = (
    *("--mode", "rehearsal", "--training.device", "cpu", "--ranks", "0,1", "--metric", "peak_allocated_bytes"),
    *("--recorder.trace.steps", "0", "--repeats", "4"),
)


def perform(directory: Path, *words: str):
    return probe.perform(experiment(directory, *words), [], PROGRAM)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "trials").iterdir())


def test_killed_experiment_goes_on_where_it_stopped(tmp_path):
    """An A/A whose second trial waits when its process is killed."""
    words = ("PROBED=waits,waits", "--repeats", "2", "--seed", "1")
    directory = tmp_path / "out"
    script = Path(__file__).parents[1] / "experiments.py"
    process = subprocess.Popen([sys.executable, script, directory, *words], stderr=subprocess.DEVNULL)
    waiting = directory / "trials"
    deadline = time.monotonic() + PATIENCE_S
    while not list(waiting.glob("01-*/ranks/rank1.json")):
        assert time.monotonic() < deadline, "the second trial did not begin"
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (first,) = waiting.glob("00-*")
    before = recording.status_path(first).read_bytes()
    ranks = [document["pid"] for document in recording.read_ranks(next(waiting.glob("01-*")))[0].values()]

    (directory / "go").touch()
    analysis = perform(directory, *words)

    assert recording.status_path(first).read_bytes() == before, "a complete trial ran again"
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert names(directory) == ["00-waits", "01-waits-2", "02-waits-2", "03-waits"]
    assert [judged.state for judged in analysis.progress.trials.values()] == ["valid"] * 4
    # trial k takes 1 ms + k µs, so the second arm is 0.1 % slower in pair 0 and 0.1 % faster in pair 1
    wall = analysis.to_json()["metrics"][0]
    assert (wall["metric"], wall["n_pairs"]) == ("step_wall_ns", 2)
    assert wall["effect_pct"] == pytest.approx(0, abs=1e-3)
    assert set(analysis.sees_pct) == {"step_wall_ns", "peak_allocated_bytes"}
    assert analysis.sees_pct["step_wall_ns"] > 0
    assert analysis.sees_pct["peak_allocated_bytes"] == 0
    assert "what 2 pairs of this run can see here" in render(analysis)
    assert json.loads((directory / "analysis.json").read_text())["verdict"] == analysis.verdict

    with pytest.raises(UsageError, match=r"holds another experiment \(pairs, order differ\)"):
        perform(directory, "PROBED=waits,waits", "--repeats", "3", "--seed", "1")


def test_arm_that_runs_out_of_memory_is_worse_and_runs_once(tmp_path, monkeypatch):
    """What the shell sets reaches no arm: `unset` is unset."""
    monkeypatch.setenv("PROBED", "raises")

    analysis = perform(tmp_path, "PROBED=unset,too much", *QUICK)

    found = analysis.to_json()
    assert found["verdict"] == "worse"
    assert len(names(tmp_path)) == 2
    assert found["comparisons"][0]["reason"].startswith("too much does not fit in memory: rank ")
    assert [arm["runs"] for arm in found["arms"]] == [1, 0]
    assert found["arms"][1]["outcome"]["kind"] == "does not fit in memory"
    assert analysis.decided
    assert os.environ["PROBED"] == "raises"
    ranks = recording.read_ranks(next((tmp_path / "trials").glob("*-unset")))[0]
    assert [document["environment_before"].get("PROBED") for document in ranks.values()] == [None, None]


def test_arm_whose_ranks_fail_is_tried_three_times(tmp_path):
    analysis = perform(tmp_path, "PROBED=fine,raises", *QUICK)

    assert analysis.verdict == "worse"
    assert [name for name in names(tmp_path) if "raises" in name] == ["00-raises", "00-raises.void1", "00-raises.void2"]
    assert analysis.comparisons[0].reason == "raises fails: rank 1 of 2: ValueError: no such algorithm"
    assert [(item["arm"], item["void"]) for item in analysis.to_json()["voided"]] == [("raises", 1), ("raises", 2)]


def test_arm_whose_ranks_start_with_something_else_is_refused(tmp_path, capsys):
    analysis = perform(tmp_path, "PROBED=lies,fine", *QUICK)

    assert (analysis.verdict, analysis.comparable, analysis.decided) == ("inconclusive", False, False)
    assert "environment OMP_NUM_THREADS of rank 0 is" in capsys.readouterr().err
    assert "which no arm declares: refused" in analysis.notes[0]
    assert len(names(tmp_path)) == 2, "a trial was spent after the refusal"


def test_rehearsal_compares_memory_alone(tmp_path):
    analysis = perform(tmp_path, "PROBED=fine,slow", *QUICK)

    assert [metric.metric for metric in analysis.comparisons[0].metrics] == ["peak_allocated_bytes"]
    assert analysis.verdict == "no difference"
    assert "mode rehearsal" in render(analysis)
    assert all(len(trial.recording.steps) == 2 for trial in analysis.progress.trials.values())
