"""Starting the ranks of a run and seeing them to their end, whatever it is. Free of torch in this process.

The ranks run under `python -m torch.distributed.run` in a session and with an environment of their own. torchrun
flattens exit codes, so status.json, written here, is the truth: `complete`, or `failed` with one line that names
the rank and its exception, the rank that hangs, or the interruption. No process outlives its run: torchrun gets
SIGTERM when this process dies, each rank SIGKILL when torchrun dies, and what is left over is found by its mark.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import site
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

import harness
from harness import recording
from harness.config import Trainer, to_dict, to_json
from harness.masking import masked_arguments
from harness.recording import Status
from harness.validation import validate_inputs
from harness.worker import EXIT_TERMINATED, LAUNCH_ID_VARIABLE, STACKS_SIGNAL, die_with_parent

OnStep = Callable[[int, dict[str, Any]], None]
"""Called with a rank and each of its step rows, soon after it was written."""

WORKER = ("-m", "harness.worker")
TIMEOUT_S = 300.0
GRACE_S = 15.0
POLL_S = 0.1

# What the ranks are given of this process's environment; the rest (tokens among it) stays here.
# fmt: off
PASSED_NAMES = frozenset((
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "XDG_CACHE_HOME",
    "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD",
))
PASSED_PREFIXES = (
    "CUDA_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "NCCL_", "NVIDIA_", "GLOO_",
    "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "LC_",
)
# fmt: on


def launch(
    config: Trainer.Config,
    directory: Path,
    *,
    mode: recording.Mode,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    grace_s: float = GRACE_S,
    on_step: OnStep | None = None,
    program: Sequence[str] = WORKER,
) -> Status:
    """Runs `config` on `config.world_size` local processes and returns what status.json says at the end.

    `environment` is set on top of what is passed on. A run in which no rank ends a step for `timeout_s` counts as
    hung. Ended ranks get `grace_s` after SIGTERM to write what they recorded, then SIGKILL. `program` is what
    torchrun starts on each rank, followed by `directory`.

    Raises `UsageError` or `InputError` before anything is started if `config` cannot run, KeyboardInterrupt after
    SIGINT, SIGTERM or SIGHUP to this process, once all ranks have ended and status.json says so.
    """
    config.validate()
    validate_inputs(config)
    directory = directory.resolve()
    launch_id = uuid.uuid4().hex
    child_environment = build_environment(config.world_size, {**(environment or {}), LAUNCH_ID_VARIABLE: launch_id})
    command = _torchrun(config.world_size, directory, program)
    _write_plan(config, directory, mode, child_environment, command)

    followed = StepFollower(directory, config.world_size)
    reason: str | None = "the launcher itself failed"
    with _stop_signals() as received, open(directory / "logs" / "launcher.log", "wb") as log:
        process = _start(command, child_environment, log.fileno())
        try:
            recording.write_status(directory, "running")
            reason = _follow(process, followed, received, timeout_s, on_step)
            if reason is None:
                reason = _failure_reason(directory, process.returncode)
            elif not received:
                _ask_for_stacks(directory)
        finally:
            _stop(process, launch_id, grace_s, received)
            _fold_logs(directory)
            status = recording.write_status(directory, "failed" if reason else "complete", reason)
    if on_step:
        _report_steps(followed, on_step)
    if received:
        raise KeyboardInterrupt
    return status


def build_environment(world_size: int, overrides: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the ranks: what is passed on, what a launch needs, then `overrides`.

    They import the `harness` that this process imported, never a folder of that name in the working directory.
    """
    passed = {
        name: value for name, value in os.environ.items() if name in PASSED_NAMES or name.startswith(PASSED_PREFIXES)
    }
    root = str(Path(harness.__file__).resolve().parent.parent)
    if root not in site.getsitepackages():
        passed["PYTHONPATH"] = os.pathsep.join(filter(None, [root, passed.get("PYTHONPATH")]))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    passed.setdefault("OMP_NUM_THREADS", str(max(1, cores // world_size)))
    needed = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", recording.LAUNCHED_VARIABLE: "1"}
    return {**passed, **needed, **overrides}


def _torchrun(world_size: int, directory: Path, program: Sequence[str]) -> list[str]:
    options = {
        "--nproc-per-node": str(world_size),
        "--local-addr": "127.0.0.1",  # else the host's name, which need not resolve
        "--log-dir": str(_torchrun_logs(directory)),
        "--redirects": "3",
    }
    flat = [word for option in options.items() for word in option]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *flat, *program, str(directory)]


def _write_plan(
    config: Trainer.Config,
    directory: Path,
    mode: recording.Mode,
    environment: Mapping[str, str],
    command: Sequence[str],
) -> None:
    _torchrun_logs(directory).mkdir(parents=True)
    (directory / "config.json").write_text(to_json(config) + "\n", encoding="utf-8")
    recording.merge_manifest(
        directory,
        {
            "mode": mode,
            "name": config.name,
            "world_size": config.world_size,
            "config": to_dict(config),
            "argv": masked_arguments(sys.argv),
            "launcher": {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "command": list(command),
                "omp_num_threads": environment["OMP_NUM_THREADS"],
            },
        },
    )
    recording.write_status(directory, "planned")


def _start(command: Sequence[str], environment: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def tie_to_parent() -> None:
        die_with_parent(signal.SIGTERM)  # torchrun hands it on, so the ranks still write what they recorded
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=tie_to_parent,
    )


@contextmanager
def _stop_signals() -> Iterator[list[signal.Signals]]:
    """The signals to stop that have come so far; outside the main thread, which alone may handle them, none."""
    received: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored: nohup
                previous[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StepFollower:
    """Reads the step rows of all ranks as they are written."""

    def __init__(self, directory: Path, world_size: int) -> None:
        self._paths = [recording.steps_path(directory, rank) for rank in range(world_size)]
        self._offsets = [0] * world_size
        self.last_step: list[int | None] = [None] * world_size
        """Per rank, the last step it ended."""

    def poll(self) -> list[tuple[int, dict[str, Any]]]:
        """The rows that were completed since the last call, as (rank, row)."""
        rows = []
        for rank, path in enumerate(self._paths):
            if not path.exists():
                continue
            with open(path, "rb") as file:
                file.seek(self._offsets[rank])
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._offsets[rank] += len(complete)
            for line in complete.splitlines():
                row = msgspec.json.decode(line, type=dict[str, Any])
                self.last_step[rank] = row["step"]
                rows.append((rank, row))
        return rows

    def hang_reason(self, timeout_s: float) -> str:
        """One line that says which ranks are behind."""
        start = f"hung: no rank ended a step for {timeout_s:g} s; "
        if all(step is None for step in self.last_step):
            return start + "none has ended its first (see logs/)"
        reached = [-1 if step is None else step for step in self.last_step]
        behind = [rank for rank, step in enumerate(reached) if step < max(reached)]
        if not behind:
            return start + f"all ranks ended step {max(reached)} (stacks in logs/)"
        where = ", ".join(
            f"rank {rank} " + (f"after step {reached[rank]}" if reached[rank] >= 0 else "before its first step")
            for rank in behind
        )
        return start + f"behind step {max(reached)} of the others: {where} (stacks in logs/)"


def _follow(
    process: subprocess.Popen[bytes],
    followed: StepFollower,
    received: Sequence[signal.Signals],
    timeout_s: float,
    on_step: OnStep | None,
) -> str | None:
    """Watches until torchrun ends (None), or until there is a reason to end it."""
    last_progress = time.monotonic()
    while process.poll() is None:
        if received:
            return f"interrupted by {received[0].name}"
        if _report_steps(followed, on_step):
            last_progress = time.monotonic()
        elif time.monotonic() - last_progress > timeout_s:
            return followed.hang_reason(timeout_s)
        time.sleep(POLL_S)
    return None


def _report_steps(followed: StepFollower, on_step: OnStep | None) -> bool:
    rows = followed.poll()
    if on_step:
        for rank, row in rows:
            on_step(rank, row)
    return bool(rows)


def _ask_for_stacks(directory: Path) -> None:
    """Has each rank write where it stands to its log, before it is ended for hanging."""
    for document in recording.read_recording(directory).ranks.values():
        pid = document.get("pid")
        if isinstance(pid, int) and document.get("end_state") is None:
            _send(pid, STACKS_SIGNAL)
    time.sleep(0.5)


def _stop(process: subprocess.Popen[bytes], launch_id: str, grace_s: float, received: Sequence[signal.Signals]) -> None:
    """Ends all processes of the launch: SIGTERM, then after `grace_s`, or on a further signal, SIGKILL."""
    already = len(received)
    deadline = time.monotonic() + grace_s
    if process.poll() is None:
        process.terminate()
    while process.poll() is None and time.monotonic() < deadline and len(received) <= already:
        time.sleep(POLL_S)
    if process.poll() is None:
        process.kill()
    process.wait()
    for _ in range(50):  # SIGKILL takes effect soon, except on a process inside the kernel: do not wait for that
        left = _marked_processes(launch_id)
        for pid in left:
            _send(pid, signal.SIGKILL)
        if not left:
            break
        time.sleep(POLL_S)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it ended meanwhile
        return


def _marked_processes(launch_id: str) -> list[int]:
    """Process ids of this launch that are left (Linux; elsewhere torchrun's own clean-up has to do)."""
    mark = f"{LAUNCH_ID_VARIABLE}={launch_id}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # another user's, or gone
            continue
    return found


def _torchrun_logs(directory: Path) -> Path:
    return directory / "logs" / "torchrun"


def _fold_logs(directory: Path) -> None:
    """Appends what a rank printed before it opened its own log (it may never have come so far) to that log."""
    for path in sorted(_torchrun_logs(directory).glob("*/attempt_*/*/std*.log")):
        text = path.read_bytes()
        if text:
            with open(recording.log_path(directory, int(path.parent.name)), "ab") as log:
                log.write(text)
    shutil.rmtree(_torchrun_logs(directory), ignore_errors=True)


def _failure_reason(directory: Path, exit_code: int) -> str | None:
    """Why the run failed, in one line, naming the rank where it began; None if it did not.

    The ranks that lose a peer fail after it, so the order is: a rank that a signal killed (it says nothing
    itself), the exception that a rank wrote first, the failure that torchrun saw first.
    """
    if exit_code == 0:
        return None
    text = (directory / "logs" / "launcher.log").read_text(encoding="utf-8", errors="replace")
    exit_codes = {
        int(rank): (int(code), int(pid))
        for rank, code, pid in re.findall(
            r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+) \(pid: (\d+)\)", text
        )
    }
    ended_by_torchrun = {
        rank
        for rank, (code, pid) in exit_codes.items()
        if code in (-signal.SIGTERM, EXIT_TERMINATED) or f"Unable to shutdown process {pid} " in text
    }
    for rank, (code, _) in exit_codes.items():
        if code < 0 and rank not in ended_by_torchrun:
            hint = ": out of memory, unless someone did" if code == -signal.SIGKILL else ""
            return f"rank {rank} was killed by {signal.Signals(-code).name}{hint}"
    failed = {
        rank: document
        for rank, document in recording.read_recording(directory).ranks.items()
        if document.get("end_state") == "failed" and rank not in ended_by_torchrun
    }
    if failed:
        first = min(failed, key=lambda rank: failed[rank].get("ended_unix_ns") or sys.maxsize)
        return f"rank {first}: {failed[first].get('exception')}"
    _fold_logs(directory)
    for rank, (code, _) in exit_codes.items():
        if rank not in ended_by_torchrun:
            return f"rank {rank} exited with {code}: {_last_line(recording.log_path(directory, rank))}"
    return f"torch.distributed.run exited with {exit_code}: {_last_line(directory / 'logs' / 'launcher.log')}"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
