"""Every way a run can end, with real processes under the real torchrun."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import recording
from harness.config import Parallelism, Trainer
from harness.errors import UsageError
from harness.launch import build_environment, launch

pytestmark = pytest.mark.distributed

HERE = Path(__file__).parent
PATIENCE_S = 90  # for processes to come up or go away on a busy machine


def run(directory: Path, scenario: str, **options) -> recording.Status:
    return launch(
        Trainer.Config(name="test", world_size=2),
        directory,
        mode="cpu",
        environment={"SCENARIO": scenario},
        program=(str(HERE / "rank_program.py"),),
        **options,
    )


def pids(directory: Path) -> list[int]:
    return [recording.read_json(recording.rank_path(directory, rank))["pid"] for rank in (0, 1)]


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def log(directory: Path, rank: int) -> str:
    return recording.log_path(directory, rank).read_text()


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Starts a launching process whose ranks run on, and waits until both have ended a step."""
    monkeypatch.setenv("SCENARIO", "runs on")
    directory = tmp_path / "run"
    process = subprocess.Popen([sys.executable, HERE / "driver.py", directory], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: all(recording.steps_path(directory, rank).exists() for rank in (0, 1)))
        yield process, directory
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_complete_run_in_a_path_with_spaces(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["meshscope", "run", "--api-token", "abc"])
    directory, rows = tmp_path / "my first run", []

    status = run(directory, "completes", on_step=lambda rank, row: rows.append((rank, row["step"])))

    assert (status.state, status.reason) == ("complete", None)
    assert recording.read_status(directory) == status
    assert sorted(rows) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rank in (0, 1):
        assert f"out of rank {rank}\nerr of rank {rank}\n" in log(directory, rank)
    manifest = recording.read_json(recording.manifest_path(directory))
    assert (manifest["mode"], manifest["world_size"], manifest["config"]["name"]) == ("cpu", 2, "test")
    assert manifest["argv"] == ["meshscope", "run", "--api-token", "***"]
    assert not (directory / "logs" / "torchrun").exists()


def test_rank_that_raises_is_named_with_its_exception_and_ends_the_others(tmp_path):
    status = run(tmp_path / "run", "rank 1 raises")

    assert (status.state, status.reason) == ("failed", "rank 1: ValueError: the reason")
    assert "Traceback" in log(tmp_path / "run", 1)
    assert (tmp_path / "run" / "unwound0").exists(), "the other rank was not let to write what it had"
    assert not any(map(is_alive, pids(tmp_path / "run")))


def test_rank_that_is_killed_is_named_with_the_signal(tmp_path):
    status = run(tmp_path / "run", "rank 1 is killed")

    assert status.state == "failed"
    assert status.reason is not None
    assert status.reason.startswith("rank 1 was killed by SIGKILL")
    assert (tmp_path / "run" / "unwound0").exists()


def test_rank_that_exits_without_an_exception_is_named_with_its_code_and_last_line(tmp_path):
    status = run(tmp_path / "run", "rank 1 gives up")

    assert (status.state, status.reason) == ("failed", "rank 1 exited with 7: nothing left to do")


def test_rank_that_failed_and_cannot_end_is_ended(tmp_path, monkeypatch):
    """Its device waits for a collective that its peers, which wait for it, never join."""
    monkeypatch.setattr("harness.launch.FAILED_S", 2.0)
    directory = tmp_path / "run"

    status = run(directory, "rank 1 fails and stays", timeout_s=120, grace_s=1)

    assert (status.state, status.reason) == ("failed", "rank 1: ValueError: the reason")


def test_hang_names_the_rank_that_is_behind_and_ends_even_a_rank_that_ignores_sigterm(tmp_path):
    directory = tmp_path / "run"

    status = run(directory, "rank 1 hangs", timeout_s=12, grace_s=1)

    assert status.state == "failed"
    assert status.reason is not None
    assert status.reason.startswith("hung: no rank ended a step for 12 s; behind step 1")
    assert "rank 1 after step 0" in status.reason
    assert "wait_for_ever" in log(directory, 1), "no stack of the rank that hangs"
    assert not any(map(is_alive, pids(directory)))


def test_rank_that_fails_before_it_opens_its_log_is_quoted(tmp_path):
    status = run(tmp_path / "run", "fails before anything")

    assert status.reason is not None
    assert status.reason.endswith("exited with 1: ImportError: no module of that name")
    assert "Traceback" in log(tmp_path / "run", 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_ends_the_ranks_and_lets_them_write(driver, number):
    process, directory = driver
    ranks = pids(directory)

    process.send_signal(number)
    process.wait(PATIENCE_S)

    status = recording.read_status(directory)
    assert (status.state, status.reason) == ("failed", f"interrupted by {number.name}")
    assert process.returncode == -signal.SIGINT  # KeyboardInterrupt, whichever signal it was
    assert all((directory / f"unwound{rank}").exists() for rank in (0, 1))
    assert not any(map(is_alive, ranks))


def test_no_rank_outlives_a_launcher_that_is_killed(driver):
    process, directory = driver
    ranks = pids(directory)

    process.kill()

    wait_until(lambda: not any(map(is_alive, ranks)))
    assert all((directory / f"unwound{rank}").exists() for rank in (0, 1))


def test_no_rank_outlives_torchrun(driver):
    process, directory = driver
    ranks = pids(directory)
    torchrun = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])

    os.kill(torchrun, signal.SIGKILL)
    process.wait(PATIENCE_S)

    assert not any(map(is_alive, ranks))
    status = recording.read_status(directory)
    assert status.state == "failed"
    assert status.reason is not None
    assert status.reason.startswith("torch.distributed.run exited with -9")


def test_two_runs_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SCENARIO", "completes")
    both = [
        subprocess.Popen([sys.executable, HERE / "driver.py", tmp_path / name], stdout=subprocess.PIPE, text=True)
        for name in ("a", "b")
    ]
    assert [process.communicate(timeout=PATIENCE_S)[0] for process in both] == ["complete\n", "complete\n"]


def test_layout_that_cannot_be_starts_nothing(tmp_path):
    config = Trainer.Config(world_size=3, parallelism=Parallelism.Config(tp=2))

    with pytest.raises(UsageError, match=r"world_size=3 is not divisible by parallelism\.tp=2"):
        launch(config, tmp_path / "run", mode="cpu")
    assert not (tmp_path / "run").exists()


def test_environment_of_the_ranks_is_explicit(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("CXX", "clang++")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    environment = build_environment(processes=10_000, overrides={"NCCL_ALGO": "Ring"})

    assert "SOME_TOKEN" not in environment
    assert environment["NCCL_DEBUG"] == "WARN"
    assert (environment["CXX"], environment["TORCHDYNAMO_DISABLE"]) == ("clang++", "1")
    assert environment["NCCL_ALGO"] == "Ring"
    assert environment["OMP_NUM_THREADS"] == "1"


def test_threads_that_are_given_stay(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")

    assert build_environment(processes=2, overrides={})["OMP_NUM_THREADS"] == "7"
