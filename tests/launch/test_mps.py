"""The daemon of mode shared-gpu, with a stand-in for NVIDIA's control program: it is ours, and nothing of it stays."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from harness.config import Trainer
from harness.errors import UnavailableError
from harness.modes import Start, launch_in_mode
from harness.mps import CONTROL, mps
from harness.recording import manifest_path, read_json

pytestmark = pytest.mark.distributed

STAND_IN = Path(__file__).with_name("mps_control.py")
PATIENCE_S = 60


@pytest.fixture
def temporary(tmp_path_factory) -> Path:
    """Short, since the path of a socket in it has 107 characters at most, in a process of pytest-xdist, too."""
    return tmp_path_factory.mktemp("mps")


@pytest.fixture
def environment(tmp_path, temporary) -> dict[str, str]:
    """With the stand-in on PATH, and a temporary folder of the test's own."""
    program = tmp_path / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "TMPDIR": str(temporary)}


def users_of(pipe: str) -> list[int]:
    """Processes with this pipe in their environment."""
    mark, found = f"CUDA_MPS_PIPE_DIRECTORY={pipe}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_daemon_runs_within_the_block_and_nothing_of_it_after(environment):
    with mps(environment) as clients:
        pipe = clients["CUDA_MPS_PIPE_DIRECTORY"]
        assert set(clients) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
        assert Path(clients["CUDA_MPS_LOG_DIRECTORY"]).is_dir()
        assert len(users_of(pipe)) == 2, "a daemon and its server"

    assert users_of(pipe) == []
    assert not Path(pipe).parent.exists()


def test_daemon_ends_when_the_block_fails(environment):
    with pytest.raises(ValueError, match="of the run"), mps(environment) as clients:
        raise ValueError("of the run")

    assert users_of(clients["CUDA_MPS_PIPE_DIRECTORY"]) == []


def test_daemon_that_heeds_nothing_is_killed_and_another_ones_is_not(environment):
    other = {**environment, "CUDA_MPS_PIPE_DIRECTORY": "/somebody/elses"}
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=other)
    try:
        with mps({**other, "MPS_STAND_IN": "stuck"}) as clients:
            pipe = clients["CUDA_MPS_PIPE_DIRECTORY"]
            assert pipe != "/somebody/elses"
        assert users_of(pipe) == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(
    ("how", "reason"),
    [("fails", "-d exited with 1: Cannot find MPS control daemon process"), ("dies", "Failed to start: no permission")],
)
def test_daemon_that_does_not_start_is_one_line_with_its_own_words(environment, temporary, how, reason):
    with pytest.raises(UnavailableError, match=reason), mps({**environment, "MPS_STAND_IN": how}):
        pass

    assert list(temporary.iterdir()) == []


def test_no_control_program_is_one_line(tmp_path):
    with (
        pytest.raises(UnavailableError, match="not on PATH: it comes with NVIDIA's driver"),
        mps({"PATH": str(tmp_path)}),
    ):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_daemon_ends_however_its_user_does(environment, temporary, tmp_path, number):
    program = textwrap.dedent(
        """
        import signal, time
        from harness.mps import mps
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
        with mps() as clients:
            print(clients["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
            time.sleep(600)
        """
    )
    user = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**environment, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with user:
        assert user.stdout is not None
        pipe = user.stdout.readline().strip()
        assert users_of(pipe)
        user.send_signal(number)
        user.wait(timeout=PATIENCE_S)

    wait_until(lambda: users_of(pipe) == [])
    wait_until(lambda: list(temporary.iterdir()) == [])


@pytest.mark.parametrize("scenario", ["completes", "rank 1 is killed"])
def test_run_that_shares_a_gpu_gets_the_daemon_and_ends_it(environment, temporary, tmp_path, monkeypatch, scenario):
    monkeypatch.setenv("PATH", environment["PATH"])
    monkeypatch.setenv("TMPDIR", environment["TMPDIR"])
    start = Start(mode="shared-gpu", why="", environment={"SCENARIO": scenario}, about={"shared_gpu": {"gpus": 1}})
    program = (str(Path(__file__).with_name("rank_program.py")),)

    status = launch_in_mode(start, Trainer.Config(world_size=2), tmp_path / "run", program=program)

    assert status.state == ("complete" if scenario == "completes" else "failed")
    manifest = read_json(manifest_path(tmp_path / "run"))
    assert (manifest["mode"], manifest["shared_gpu"]) == ("shared-gpu", {"gpus": 1})
    said = (tmp_path / "run" / "logs" / "rank0.log").read_text()
    pipe = next(line.removeprefix("MPS at ") for line in said.splitlines() if line.startswith("MPS at "))
    assert Path(pipe).parent.parent == temporary
    assert users_of(pipe) == []
    assert list(temporary.glob("meshscope-mps-*")) == []
