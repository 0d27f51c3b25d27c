"""Why a launched run failed, in one line: from what its ranks wrote, torchrun's log and exit codes. Free of torch."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import time
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from harness import recording
from harness.worker import EXIT_TERMINATED

# How the allocators of CUDA and of the host, cuBLAS and Python say that there is no memory left.
OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|can't allocate memory|ALLOC_FAILED|^MemoryError")
OUT_OF_MEMORY_HINT = ": out of memory, unless someone did"


def failure_of_torchrun(directory: Path, exit_code: int) -> str | None:
    """Why the run failed, naming the rank where it began; None if it did not.

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
            return f"rank {rank} {_killed(code)}"
    if failed := first_failure(directory, but_for=ended_by_torchrun):
        return failed
    fold_logs(directory)
    for rank, (code, _) in exit_codes.items():
        if rank not in ended_by_torchrun:
            return f"rank {rank} exited with {code}: {_last_line(recording.log_path(directory, rank))}"
    return f"torch.distributed.run exited with {exit_code}: {_last_line(directory / 'logs' / 'launcher.log')}"


def failure_of_rehearsal(directory: Path, rank: int, world_size: int, exit_code: int) -> str | None:
    """The same of a process that rehearsed one rank; that the rank does not fit into memory is said first."""
    if exit_code == 0:
        return None
    who = f"rank {rank} of {world_size}"
    if exit_code < 0:
        return f"{who} {_killed(exit_code)}"
    document = recording.read_recording(directory).ranks.get(rank, {})
    if document.get("end_state") == "failed":
        line = str(document.get("exception"))
        return f"{who} does not fit: {line}" if OUT_OF_MEMORY.search(line) else f"{who}: {line}"
    log = recording.log_path(directory, rank)
    return f"{who} exited with {exit_code}: {_last_line(log if log.exists() else directory / 'logs' / 'launcher.log')}"


def first_failure(directory: Path, *, but_for: Container[int] = (), older_than_s: float = 0.0) -> str | None:
    """The rank that failed first, but for some, and its exception; None if none did, or not so long ago."""
    failed = {
        rank: document
        for rank, document in recording.read_recording(directory).ranks.items()
        if document.get("end_state") == "failed" and rank not in but_for
    }
    if not failed:
        return None
    first = min(failed, key=lambda rank: _failed_ns(failed[rank]))
    if older_than_s and time.time_ns() - _failed_ns(failed[first]) < older_than_s * 1e9:
        return None
    return f"rank {first}: {failed[first].get('exception')}"


def _failed_ns(document: Mapping[str, Any]) -> int:
    """When a rank failed: before it wrote what it had recorded, which may take it longer than a peer to give up."""
    when = document.get("failed_unix_ns") or document.get("ended_unix_ns")
    return when if isinstance(when, int) else sys.maxsize


def _killed(exit_code: int) -> str:
    hint = OUT_OF_MEMORY_HINT if exit_code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-exit_code).name}{hint}"


def torchrun_logs(directory: Path) -> Path:
    return directory / "logs" / "torchrun"


def fold_logs(directory: Path) -> None:
    """Appends what a rank printed before it opened its own log (it may never have come so far) to that log."""
    for path in sorted(torchrun_logs(directory).glob("*/attempt_*/*/std*.log")):
        text = path.read_bytes()
        if text:
            with open(recording.log_path(directory, int(path.parent.name)), "ab") as log:
                log.write(text)
    shutil.rmtree(torchrun_logs(directory), ignore_errors=True)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
