"""The recorder around real loops on CPU: rows, phases, windows, and every way of ending."""

import gzip
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import config as harness_config
from harness import recording
from harness.config import Window
from harness.errors import InputError, UsageError
from harness.record import Recorder
from harness.recording import read_recording

OFF = Recorder.Config(trace=Window(), memory=Window())


def train(directory: Path, steps: int, fail_at: int | None = None, **options: Any) -> list[float]:
    """A small model for some steps; returns the wall time of each as the caller sees it, in seconds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    with Recorder(directory, **{"config": OFF, "device": "cpu", **options}) as recorder:
        for step in range(steps):
            started = time.perf_counter()
            with recorder.step():
                with recorder.phase("forward"):
                    loss = model(torch.randn(16, 32)).square().mean()
                with recorder.phase("backward"):
                    if step == fail_at:
                        raise ValueError("no gradient\nfor this one")
                    loss.backward()
                with recorder.phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
                recorder.log(loss=loss, grad_norm=1.5)
            seen.append(time.perf_counter() - started)
    return seen


def trace_events(directory: Path, completed_steps: int) -> list[dict[str, Any]]:
    with gzip.open(recording.trace_path(directory, completed_steps, 0), "rt") as file:
        text = file.read()
    assert '"rank": 0' in text  # HTA looks for it with this space
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def test_config_is_the_one_of_the_configuration_tree() -> None:
    assert Recorder.Config is harness_config.Recorder.Config


def test_rows_of_a_run(tmp_path: Path) -> None:
    seen = train(
        tmp_path, 4, tokens_per_step=1000, flops_per_token=10**6, devices_per_token=2, run_config={"name": "x"}
    )
    read = read_recording(tmp_path)
    assert (read.mode, read.missing_ranks, read.errors) == ("cpu", [], [])
    assert read.status is not None
    assert read.status.state == "complete"
    assert [row["step"] for row in read.steps[0]] == [0, 1, 2, 3]
    for row, seconds in zip(read.steps[0], seen, strict=True):
        assert 0 < row["wall_ns"] <= seconds * 1e9
        phases = row["phases"]
        assert list(phases) == ["forward", "backward", "optimizer"]
        assert sum(phase["wall_ns"] for phase in phases.values()) <= row["wall_ns"]
        assert row["tokens_per_s"] == pytest.approx(1000 / 2 / (row["wall_ns"] / 1e9))
        assert row["tflops_per_s"] == pytest.approx(row["tokens_per_s"] * 1e6 / 1e12)
        assert (row["mfu_pct"], row["mfu_peak_source"]) == (None, None)
        assert row["grad_norm"] == 1.5
        assert 0 < row["loss"] < 10
        assert row["wall_source"] == "host"
        assert row["memory_source"] == "rss"
        assert row["allocated_bytes"] is row["peak_active_bytes"] is row["alloc_retries"] is None
        assert row["rss_bytes"] > 10**7
    starts = [row["started_unix_ns"] for row in read.steps[0]]
    assert starts == sorted(starts)
    assert abs(starts[0] - time.time_ns()) < 60e9
    assert read.steps[0][0]["tags"][0] == "warmup"
    assert read.manifest["config"] == {"name": "x"}
    assert read.manifest["steps_completed"] == 4
    assert read.ranks[0]["end_state"] == "complete"
    assert read.ranks[0]["environment_after"] == read.ranks[0]["environment_before"]


def test_every_field_is_documented(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no gradient"):
        train(tmp_path, 2, fail_at=1)
    read = read_recording(tmp_path)
    written = read.manifest.keys() | read.ranks[0].keys() | set(recording.StepRow.__struct_fields__)
    text = (Path(recording.__file__).parents[1] / "docs" / "recording.md").read_text()
    assert written - set(re.findall(r"`(\w+)`", text)) == set()


def test_mfu_against_a_configured_peak(tmp_path: Path) -> None:
    config = Recorder.Config(trace=Window(), memory=Window(), peak_tflops=0.5)
    train(tmp_path, 1, config=config, tokens_per_step=10**6, flops_per_token=10**5)
    (row,) = read_recording(tmp_path).steps[0]
    assert row["mfu_pct"] == pytest.approx(100 * row["tflops_per_s"] / 0.5)
    assert row["mfu_peak_source"] == "recorder.peak_tflops"


def test_trace_window_carries_the_recorders_step_numbers(tmp_path: Path) -> None:
    train(tmp_path, 6, config=Recorder.Config(trace=Window(start=3, steps=2), memory=Window()))
    rows = read_recording(tmp_path).steps[0]
    tags = [[tag for tag in row["tags"] if tag != "gc"] for row in rows]
    assert tags == [["warmup"], [], ["profiler_warmup"], ["profiled"], ["profiled"], ["after_export"]]

    events = [e for e in trace_events(tmp_path, 5) if e.get("cat") == "user_annotation"]
    windows = {e["name"]: e for e in events if e["name"].startswith("ProfilerStep#")}
    assert sorted(windows) == ["ProfilerStep#3", "ProfilerStep#4"]
    for step in (3, 4):
        window = windows[f"ProfilerStep#{step}"]
        # The range is the step: the recorder's time on both sides of it is well below a millisecond.
        assert window["dur"] * 1e3 == pytest.approx(rows[step]["wall_ns"], rel=0.2, abs=2e6)
        inside = [e["name"] for e in events if window["ts"] <= e["ts"] < window["ts"] + window["dur"]]
        assert [name for name in inside if name in ("forward", "backward", "optimizer")] == [
            "forward",
            "backward",
            "optimizer",
        ]


def test_trace_window_from_the_first_step_and_longer_than_the_run(tmp_path: Path) -> None:
    train(tmp_path, 2, config=Recorder.Config(trace=Window(start=0, steps=9), memory=Window()))
    names = {e.get("name") for e in trace_events(tmp_path, 2)}
    assert {"ProfilerStep#0", "ProfilerStep#1"} <= names


def test_run_that_ends_before_its_trace_window(tmp_path: Path) -> None:
    train(tmp_path, 2, config=Recorder.Config(trace=Window(start=2, steps=1), memory=Window()))
    assert not (tmp_path / "profiling").exists()
    train(tmp_path / "again", 3, config=Recorder.Config(trace=Window(start=0, steps=1), memory=Window()))
    assert recording.trace_path(tmp_path / "again", 1, 0).is_file()


def test_memory_window_gives_exact_bytes_and_what_they_are(tmp_path: Path) -> None:
    train(tmp_path, 4, config=Recorder.Config(trace=Window(), memory=Window(start=1, steps=2)))
    rows = read_recording(tmp_path).steps[0]
    assert [row["memory_source"] for row in rows] == ["rss", "tensor_storages", "tensor_storages", "rss"]
    parameters = 4 * (32 * 64 + 64 + 64 + 1)
    for row in rows[1:3]:
        composition = {item["category"]: item["bytes"] for item in row["peak_composition"]}
        assert sum(composition.values()) == row["peak_allocated_bytes"] == row["peak_active_bytes"]
        assert composition["parameter"] >= parameters
        peaks = [phase["peak_allocated_bytes"] for phase in row["phases"].values()]
        assert max(peaks) == row["peak_allocated_bytes"]
        assert row["allocated_bytes"] <= row["peak_allocated_bytes"]
        assert row["peak_reserved_bytes"] is None
        assert "memory_history" in row["tags"]
    assert "peak_composition" not in rows[3]


def test_category_outweighs_the_phase(tmp_path: Path) -> None:
    config = Recorder.Config(trace=Window(), memory=Window(start=0, steps=1))
    kept = []
    with Recorder(tmp_path, config=config, device="cpu") as recorder, recorder.step(), recorder.phase("forward"):
        kept.append(torch.ones(1000))
        with recorder.category("lookup"):
            kept.append(torch.ones(10))
    (row,) = read_recording(tmp_path).steps[0]
    composition = {item["category"]: item["bytes"] for item in row["peak_composition"]}
    assert (composition["activation"], composition["lookup"]) == (4000, 40)


def test_repeated_and_nested_phases(tmp_path: Path) -> None:
    config = Recorder.Config(trace=Window(), memory=Window(start=0, steps=1))
    with Recorder(tmp_path, config=config, device="cpu") as recorder, recorder.step():
        for size in (10, 1000, 10):
            with recorder.phase("outer"):
                before = torch.ones(1)
                with recorder.phase("inner"):
                    torch.ones(size).sum()
        with recorder.phase("later"):
            del before
    phases = read_recording(tmp_path).steps[0][0]["phases"]
    assert {name: phase["count"] for name, phase in phases.items()} == {"outer": 3, "inner": 3, "later": 1}
    assert phases["outer"]["peak_allocated_bytes"] == phases["inner"]["peak_allocated_bytes"]
    assert phases["later"]["peak_allocated_bytes"] <= phases["inner"]["peak_allocated_bytes"] - 4000


def test_non_finite_numbers_are_null_with_a_tag(tmp_path: Path) -> None:
    with Recorder(tmp_path, config=OFF, device="cpu") as recorder, recorder.step(tags=["mine"]):
        recorder.log(loss=torch.tensor(math.nan), grad_norm=math.inf, tokens=7, learning_rate=0.5)
    (row,) = read_recording(tmp_path).steps[0]
    assert (row["loss"], row["grad_norm"], row["tokens"]) == (None, None, 7)
    assert row["scalars"] == {"learning_rate": 0.5}
    assert {"mine", "non_finite_loss", "non_finite_grad_norm"} <= set(row["tags"])


def test_log_refuses_what_is_no_number(tmp_path: Path) -> None:
    with Recorder(tmp_path, config=OFF, device="cpu") as recorder:
        with pytest.raises(UsageError, match="belongs inside"):
            recorder.log(loss=1.0)
        with recorder.step(), pytest.raises(UsageError, match=r"got shape \(2,\)"):
            recorder.log(loss=torch.ones(2))


def test_exception_in_a_phase(tmp_path: Path) -> None:
    config = Recorder.Config(trace=Window(start=1, steps=5), memory=Window(start=1, steps=5))
    with pytest.raises(ValueError, match="no gradient"):
        train(tmp_path, 6, fail_at=3, config=config)
    read = read_recording(tmp_path)
    assert [row["step"] for row in read.steps[0]] == [0, 1, 2]
    assert read.failed_ranks == {0: "ValueError: no gradient"}
    assert read.status is not None
    assert (read.status.state, read.status.reason) == ("failed", "rank 0: ValueError: no gradient")
    failed = read.ranks[0]["failed_step"]
    assert (failed["step"], failed["phase"], failed["memory_source"]) == (3, "backward", "tensor_storages")
    assert failed["peak_allocated_bytes"] > 0
    assert {"ProfilerStep#1", "ProfilerStep#3"} <= {e.get("name") for e in trace_events(tmp_path, 3)}
    assert read.manifest["end_state"] == "failed"


def test_profiler_that_fails_to_start_is_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(torch.profiler.profile):
        def start_trace(self) -> None:
            raise RuntimeError("no tracing here")

        def stop_trace(self) -> None:
            raise AssertionError("torch crashes the process here")

    monkeypatch.setattr(torch.profiler, "profile", Failing)
    with pytest.raises(RuntimeError, match="no tracing here"):
        train(tmp_path, 4, config=Recorder.Config(trace=Window(start=2, steps=1), memory=Window()))
    read = read_recording(tmp_path)
    assert read.failed_ranks == {0: "RuntimeError: no tracing here"}
    assert len(read.steps[0]) == 2
    assert not [note for note in read.ranks[0]["notes"] if "not saved" in note]


def test_exception_between_steps(tmp_path: Path) -> None:
    def run() -> None:
        with Recorder(tmp_path, config=OFF, device="cpu") as recorder:
            with recorder.step():
                pass
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    read = read_recording(tmp_path)
    assert read.failed_ranks == {0: "KeyboardInterrupt"}
    assert "failed_step" not in read.ranks[0] or read.ranks[0]["failed_step"] is None


def test_training_that_survives_a_failed_step(tmp_path: Path) -> None:
    with Recorder(tmp_path, config=OFF, device="cpu") as recorder:
        for attempt in range(3):
            try:
                with recorder.step():
                    if attempt == 1:
                        raise RuntimeError("once")
            except RuntimeError:
                assert read_recording(tmp_path).failed_ranks == {0: "RuntimeError: once"}
    read = read_recording(tmp_path)
    assert [row["step"] for row in read.steps[0]] == [0, 1]
    assert read.failed_ranks == {}
    assert "step 1 failed and training went on: RuntimeError: once" in read.ranks[0]["notes"]
    assert read.status is not None
    assert read.status.state == "complete"


def test_recording_is_readable_while_it_is_written(tmp_path: Path) -> None:
    with Recorder(tmp_path, config=OFF, device="cpu") as recorder:
        with recorder.step():
            pass
        with recorder.step():
            read = read_recording(tmp_path)
    assert read.status is not None
    assert (read.status.state, len(read.steps[0]), read.unfinished_ranks) == ("running", 1, [0])


def test_close_twice_and_step_after_close(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, config=OFF, device="cpu")
    recorder.close()
    recorder.close()
    with pytest.raises(RuntimeError, match="is closed"), recorder.step():
        pass


def test_folder_with_a_recording_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 1)
    with pytest.raises(UsageError, match="give each run a new folder"):
        Recorder(tmp_path, config=OFF, device="cpu")


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written: Not a directory"):
        Recorder(tmp_path / "file", config=OFF, device="cpu")


def test_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none of real, cpu"):
        Recorder(tmp_path, config=OFF, device="cpu", mode="fast")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_launchers_plan_stays_and_its_status_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recording.LAUNCHED_VARIABLE, "1")
    recording.merge_manifest(tmp_path, {"mode": "rehearsal", "config": {"dim": 1}, "launcher": {"pid": 3}})
    recording.write_status(tmp_path, "running")
    train(tmp_path, 1, run_config={"dim": 2}, mesh={"tp": torch.tensor([0])})
    read = read_recording(tmp_path)
    assert (read.mode, read.manifest["config"], read.manifest["launcher"]) == ("rehearsal", {"dim": 1}, {"pid": 3})
    assert read.manifest["mesh"] == {"tp": [0]}
    assert read.status is not None
    assert read.status.state == "running"


def test_warnings_are_kept_and_still_shown(tmp_path: Path) -> None:
    shown: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest: shown.append(str(message))
        with Recorder(tmp_path, config=OFF, device="cpu") as recorder:
            for _ in range(2):
                with recorder.step():
                    warnings.warn("this variable is ignored", FutureWarning, stacklevel=1)
                found = read_recording(tmp_path).ranks[0]["warnings"]
                assert [w["message"] for w in found] == ["this variable is ignored"]
    (kept,) = read_recording(tmp_path).ranks[0]["warnings"]
    assert (kept["category"], kept["count"]) == ("FutureWarning", 2)
    assert Path(kept["file"]).name == "test_recorder.py"
    assert shown == ["this variable is ignored"] * 2


PROGRAM = """
import os, signal, sys, time
from harness.config import Window
from harness.record import Recorder

config = Recorder.Config(trace=Window(start=1, steps=9), memory=Window())
ending = sys.argv[2]
def work(recorder):
    for step in range(4):
        with recorder.step():
            if step == 2 and ending == "term":
                os.kill(os.getpid(), signal.SIGTERM)
            if step == 2 and ending == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
if ending == "forgotten":
    work(Recorder(sys.argv[1], config=config, device="cpu"))
else:
    with Recorder(sys.argv[1], config=config, device="cpu") as recorder:
        work(recorder)
        if ending == "exit0":
            sys.exit(0)
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ending", "code", "state", "exception", "steps"),
    [
        ("term", 128 + signal.SIGTERM, "failed", "terminated by SIGTERM", 2),
        ("kill", -signal.SIGKILL, None, None, 2),
        ("forgotten", 0, "failed", "the program ended without closing its recorder", 4),
        ("exit0", 0, "complete", None, 4),
    ],
)
def test_ways_a_process_ends(
    tmp_path: Path, ending: str, code: int, state: str | None, exception: str | None, steps: int
) -> None:
    root = Path(recording.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), ending],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == code, result.stderr
    read = read_recording(tmp_path)
    assert len(read.steps[0]) == steps
    assert (read.ranks[0]["end_state"], read.ranks[0]["exception"]) == (state, exception)
    assert recording.trace_path(tmp_path, steps, 0).is_file() == (ending != "kill")
    assert read.unfinished_ranks == ([0] if ending == "kill" else [])
    assert list(tmp_path.rglob("*.tmp")) == []
