"""Starting the ranks of a run and seeing them to their end, whatever it is. Free of torch in this process.

The ranks run under `python -m torch.distributed.run` in a session and with an environment of their own; in a rehearsal
each in a process of its own, one after the other. torchrun flattens exit codes, so status.json, written here, is the
truth: `complete`, or `failed` with one line that names the rank and its exception, the rank that hangs, or the
interruption. No process outlives its run: torchrun gets SIGTERM when this process dies, each rank SIGKILL when torchrun
dies, and what is left over is found by its mark.
"""

from __future__ import annotations

import os
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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

import harness
from harness import recording
from harness.checkpoints import written_bytes
from harness.config import Trainer
from harness.config_json import to_dict, to_json
from harness.masking import masked_arguments
from harness.postmortem import failure_of_rehearsal, failure_of_torchrun, first_failure, fold_logs, torchrun_logs
from harness.recording import Status
from harness.validation import validate_inputs, validate_rehearsal
from harness.worker import LAUNCH_ID_VARIABLE, STACKS_SIGNAL, die_with_parent

OnStep = Callable[[int, dict[str, Any]], None]
"""Called with a rank and each of its step rows, soon after it was written."""

WORKER = ("-m", "harness.worker")
TIMEOUT_S = 300.0
GRACE_S = 15.0
POLL_S = 0.1
FAILED_S = 60.0
"""A rank that failed, writes to no checkpoint and has not ended after so long waits for peers that wait for it."""

# What the ranks are given of this process's environment; the rest (tokens among it) stays here.
# fmt: off
PASSED_NAMES = frozenset((
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "XDG_CACHE_HOME",
    "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "CC", "CXX",  # the compilers of triton and inductor
))
PASSED_PREFIXES = (
    "CUDA_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "NCCL_", "NVIDIA_", "GLOO_",
    "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "LC_",
)
# fmt: on


@dataclass(frozen=True, kw_only=True, slots=True)
class Child:
    """A process to start: torchrun, whose ranks are all ranks, or a rehearsed rank, which is one."""

    command: Sequence[str]
    environment: Mapping[str, str]
    ranks: Sequence[int]
    failure: Callable[[int], str | None]
    """What its exit code means: why it failed, in one line."""


def launch(
    config: Trainer.Config,
    directory: Path,
    *,
    mode: recording.Mode,
    environment: Mapping[str, str] | None = None,
    rehearse: Sequence[int] = (0,),
    about: Mapping[str, Any] | None = None,
    timeout_s: float = TIMEOUT_S,
    grace_s: float = GRACE_S,
    on_step: OnStep | None = None,
    program: Sequence[str] = WORKER,
    python: str = sys.executable,
) -> Status:
    """Runs `config` on `config.world_size` local processes and returns what status.json says at the end.

    In mode `rehearsal` it runs the ranks `rehearse` of that world instead, one after the other, and ends with the
    first that fails. `environment` is set on top of what is passed on, `about` goes into the manifest. A run in which
    no rank ends a step or writes to a checkpoint for `timeout_s` counts as hung. Ended ranks get `grace_s` after
    SIGTERM to write what they recorded, then SIGKILL. `program` is what is started on each rank, followed by
    `directory`; `python` the interpreter of torchrun and ranks (`harness.interpreter` says whether it can be).

    Raises `UsageError` or `InputError` before anything is started if `config` cannot run, KeyboardInterrupt after
    SIGINT, SIGTERM or SIGHUP to this process, once all ranks have ended and status.json says so.
    """
    config.validate()
    validate_inputs(config)
    directory = directory.resolve()
    launch_id = uuid.uuid4().hex
    overrides = {**(environment or {}), LAUNCH_ID_VARIABLE: launch_id, recording.MODE_VARIABLE: mode}
    if mode == "rehearsal":
        validate_rehearsal(config)
        children = [_rehearsed(config, rank, directory, [python, *program], overrides) for rank in rehearse]
        about = {"recorded_ranks": list(rehearse), **(about or {})}
    else:
        children = [_torchrun(config.world_size, directory, python, program, overrides)]
    _write_plan(config, directory, mode, children[0], about or {})

    reason: str | None = "the launcher itself failed"
    with _stop_signals() as received, open(directory / "logs" / "launcher.log", "wb") as log:
        try:
            recording.write_status(directory, "running")
            for child in children:
                reason = _see_to_its_end(
                    child, directory, launch_id, log.fileno(), received, timeout_s, grace_s, on_step
                )
                if reason is not None:
                    break
        finally:
            status = recording.write_status(directory, "failed" if reason else "complete", reason)
    if received:
        raise KeyboardInterrupt
    return status


def _see_to_its_end(
    child: Child,
    directory: Path,
    launch_id: str,
    log: int,
    received: Sequence[signal.Signals],
    timeout_s: float,
    grace_s: float,
    on_step: OnStep | None,
) -> str | None:
    """Starts a child and returns why it failed, None if it did not; none of its processes is left."""
    followed = StepFollower(directory, child.ranks)
    process = _start(child.command, child.environment, log)
    try:
        reason = _follow(process, directory, followed, received, timeout_s, on_step)
        if reason is None:
            reason = child.failure(process.returncode)
        elif not received:
            _ask_for_stacks(directory)
    finally:
        _stop(process, launch_id, grace_s, received)
        fold_logs(directory)
    _report_steps(followed, on_step)
    return reason


def build_environment(processes: int, overrides: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of `processes` at a time: what is passed on, what a launch needs, then `overrides`.

    They import the `harness` that this process imported, never a folder of that name in the working directory.
    """
    passed = {
        name: value for name, value in os.environ.items() if name in PASSED_NAMES or name.startswith(PASSED_PREFIXES)
    }
    root = str(Path(harness.__file__).resolve().parent.parent)
    if root not in site.getsitepackages():
        passed["PYTHONPATH"] = os.pathsep.join(filter(None, [root, passed.get("PYTHONPATH")]))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    passed.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    needed = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", recording.LAUNCHED_VARIABLE: "1"}
    return {**passed, **needed, **overrides}


def _torchrun(
    world_size: int, directory: Path, python: str, program: Sequence[str], overrides: Mapping[str, str]
) -> Child:
    options = {
        "--nproc-per-node": str(world_size),
        "--local-addr": "127.0.0.1",  # else the host's name, which need not resolve
        "--log-dir": str(torchrun_logs(directory)),
        "--redirects": "3",
    }
    flat = [word for option in options.items() for word in option]
    return Child(
        command=[python, "-m", "torch.distributed.run", "--standalone", *flat, *program, str(directory)],
        environment=build_environment(world_size, overrides),
        ranks=range(world_size),
        failure=lambda exit_code: failure_of_torchrun(directory, exit_code),
    )


def _rehearsed(
    config: Trainer.Config, rank: int, directory: Path, command: Sequence[str], overrides: Mapping[str, str]
) -> Child:
    world_size = config.world_size
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return Child(
        command=[*command, str(directory)],
        environment=build_environment(1, {**place, **overrides}),
        ranks=[rank],
        failure=lambda exit_code: failure_of_rehearsal(directory, rank, world_size, exit_code),
    )


def _write_plan(
    config: Trainer.Config,
    directory: Path,
    mode: recording.Mode,
    first: Child,
    about: Mapping[str, Any],
) -> None:
    torchrun_logs(directory).mkdir(parents=True)
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
                "command": list(first.command),
                "omp_num_threads": first.environment["OMP_NUM_THREADS"],
            },
            **about,
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
    """Reads the step rows of ranks as they are written."""

    def __init__(self, directory: Path, ranks: Sequence[int]) -> None:
        self._paths = {rank: recording.steps_path(directory, rank) for rank in ranks}
        self._offsets = dict.fromkeys(ranks, 0)
        self.last_step: dict[int, int | None] = dict.fromkeys(ranks)
        """Per rank, the last step it ended."""

    def poll(self) -> list[tuple[int, dict[str, Any]]]:
        """The rows that were completed since the last call, as (rank, row)."""
        rows = []
        for rank, path in self._paths.items():
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
        reached = {rank: -1 if step is None else step for rank, step in self.last_step.items()}
        most = max(reached.values())
        if most < 0:
            return start + "none has ended its first (see logs/)"
        behind = [rank for rank, step in reached.items() if step < most]
        if not behind:
            return start + f"all ranks ended step {most} (stacks in logs/)"
        where = ", ".join(
            f"rank {rank} " + (f"after step {reached[rank]}" if reached[rank] >= 0 else "before its first step")
            for rank in behind
        )
        return start + f"behind step {most} of the others: {where} (stacks in logs/)"


def _follow(
    process: subprocess.Popen[bytes],
    directory: Path,
    followed: StepFollower,
    received: Sequence[signal.Signals],
    timeout_s: float,
    on_step: OnStep | None,
) -> str | None:
    """Watches until torchrun ends (None), or until there is a reason to end it. A checkpoint that grows is progress."""
    last_progress, written, looked = time.monotonic(), 0, time.monotonic()
    while process.poll() is None:
        if received:
            return f"interrupted by {received[0].name}"
        if _report_steps(followed, on_step):
            last_progress = time.monotonic()
        elif time.monotonic() - last_progress > timeout_s:
            before, written = written, written_bytes(directory)
            if written == before:
                return followed.hang_reason(timeout_s)
            last_progress = time.monotonic()
        if time.monotonic() - looked > min(FAILED_S, 5):
            looked = time.monotonic()
            if failed := first_failure(directory, older_than_s=FAILED_S):
                before, written = written, written_bytes(directory)
                if written == before:
                    return failed
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
