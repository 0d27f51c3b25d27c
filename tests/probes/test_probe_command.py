"""`meshscope probe` from the outside, with the real trainer on gloo."""

import json
import subprocess
import sys

import pytest

from harness.recording import read_recording

pytestmark = pytest.mark.distributed

PATIENCE_S = 300
PROBE = [sys.executable, "-m", "harness.cli", "probe"]
SMALL = [
    *("--config", "tiny", "--nproc", "2", "--parallelism.dp_shard", "2", "--parallelism.tp", "1", "--mode", "cpu"),
    *("--model.n_layers", "1", "--warmup", "1", "--training.steps", "6", "--repeats", "2"),
    *("--recorder.trace.steps", "1", "--recorder.memory.steps", "1"),
]


def test_threads_from_the_command_line_to_the_verdict(tmp_path):
    done = subprocess.run(
        [*PROBE, "threads", *SMALL, "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"] in ("better", "worse", "no difference", "inconclusive")
    assert (found["mode"], found["comparable"]) == ("cpu", True)
    assert [(arm["name"], arm["runs"]) for arm in found["arms"]] == [("1", 2), ("2", 2)]
    metrics = {item["metric"] for item in found["metrics"]}
    assert {"step_wall_ns", "peak_allocated_bytes", "overlap_pct", "peak_rss_bytes"} <= metrics
    assert "losses of all arms are equal, step by step" in found["notes"]
    for trial in found["trials"]:
        recording = read_recording(trial["path"])
        assert [d["environment_before"]["OMP_NUM_THREADS"] for d in recording.ranks.values()] == [trial["arm"]] * 2
        tags = [row["tags"] for row in recording.steps[0]]
        assert tags[1:3] == [[], []], "steps whose time counts were disturbed"
        assert ["profiled" in of_step for of_step in tags] == [False] * 4 + [True, False]
        assert "memory_history" in tags[5]
    (experiment,) = (tmp_path / "runs" / "out").glob("probe-threads-*")
    assert json.loads((experiment / "analysis.json").read_text()) == found
