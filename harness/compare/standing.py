"""How a recording stands, in words: how it ended or whether anybody still writes it, and what its ranks failed with."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.recording import Recording, log_path, rank_path, steps_path
from harness.text import in_ranges

# A process that started this much later than a file names its id is another one with the same id.
SLACK_S = 5.0
FAILURES_SHOWN = 4
# What ranks say that were ended because of another's failure or an interruption (harness.record.ending).
TERMINATED = "terminated by SIGTERM"


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """`state` and `reason` are those of status.json, None where it cannot be read. `before_first_step`: no rank has
    ended a step. `abandoned` says why a run that should go on does not, None where it does or that is not known.
    `failures` are the lines of the exceptions of ranks, the earliest first; `logs` is their folder if there is one."""

    state: str | None
    reason: str | None
    before_first_step: bool
    abandoned: str | None
    failures: list[str]
    logs: str | None

    def headline(self) -> str:
        words = self.state or "no readable status.json"
        if self.before_first_step:
            words += " before its first step" if self.state in ("failed", "invalid") else ", no step has ended"
        words += f": {self.reason}" if self.reason else ""
        return words + (f", but {self.abandoned}" if self.abandoned else "")

    def details(self) -> list[str]:
        """What the headline leaves out of a run that did not go well: other failures of ranks, where the logs are."""
        if self.state not in ("failed", "invalid") and not self.abandoned:
            return []
        told = f"{self.reason or ''} {TERMINATED if self.reason else ''}"
        more = [failure for failure in self.failures if failure.partition(": ")[2] not in told]
        lines = more[:FAILURES_SHOWN]
        lines += [f"and {len(more) - FAILURES_SHOWN} more: ranks/"] if len(more) > FAILURES_SHOWN else []
        return lines + ([f"logs: {self.logs}"] if self.logs else [])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def standing(recording: Recording) -> Standing:
    status = recording.status
    logs = log_path(recording.directory, 0).parent
    return Standing(
        state=status.state if status else None,
        reason=status.reason if status else None,
        before_first_step=not any(recording.steps.values()),
        abandoned=_abandoned(recording),
        failures=_failures(recording),
        logs=str(logs) if logs.is_dir() else None,
    )


def _failures(recording: Recording) -> list[str]:
    """`rank 1: ValueError: …`, ranks that say the same together."""
    ranks_of: dict[str, list[int]] = {}
    failed = recording.failed_ranks
    for rank in sorted(failed, key=lambda rank: (_ended_ns(recording.ranks[rank]), rank)):
        ranks_of.setdefault(failed[rank], []).append(rank)
    return [f"{'rank' if len(r) == 1 else 'ranks'} {in_ranges(r)}: {line}" for line, r in ranks_of.items()]


def _ended_ns(document: dict[str, Any]) -> int:
    """When a rank failed; one that died before its recorder was there does not say, and comes first."""
    when = document.get("failed_unix_ns") or document.get("ended_unix_ns")
    return when if type(when) is int else 0


def _abandoned(recording: Recording) -> str | None:
    """Why nobody writes a recording any more that is planned or running: its launcher is gone, or without one all
    ranks that have not ended. Known on the host where they ran, by Linux's /proc."""
    status = recording.status
    if status is None or status.state not in ("planned", "running"):
        return None
    launcher = recording.manifest.get("launcher")
    unfinished = [recording.ranks[rank] for rank in recording.unfinished_ranks]
    if isinstance(launcher, dict):
        hosts = [launcher.get("host")] if launcher.get("host") else [r.get("host") for r in recording.ranks.values()]
        who, processes = f"its launcher (pid {launcher.get('pid')})", [(launcher.get("pid"), status.updated_unix_ns)]
        verb = "is"
    else:
        hosts = [document.get("host") for document in unfinished]
        who, verb = "the processes of its ranks", "are"
        processes = [(document.get("pid"), _written_ns(recording, document)) for document in unfinished]
    here = socket.gethostname()
    if not processes or not hosts or any(host != here for host in hosts):
        return None
    if not all(type(pid) is int and is_gone(pid, written_ns) for pid, written_ns in processes):
        return None
    return f"{who} {verb} gone and no row came for {_silence_s(recording, status.updated_unix_ns):,} s"


def _written_ns(recording: Recording, document: dict[str, Any]) -> int:
    return rank_path(recording.directory, document["rank"]).stat().st_mtime_ns


def _silence_s(recording: Recording, updated_ns: int) -> int:
    """Since the last row; without one, since the state was written."""
    rows = [steps_path(recording.directory, rank) for rank, found in recording.steps.items() if found]
    last_ns = max((path.stat().st_mtime_ns for path in rows), default=updated_ns)
    return max(0, (time.time_ns() - last_ns) // 1_000_000_000)


def is_gone(pid: int, written_ns: int) -> bool:
    """Whether the process that had this id at a time (unix ns) has ended; False where that cannot be told."""
    if not Path("/proc/self/stat").exists():
        return False
    try:
        # proc(5): the name in parentheses may hold anything; then state, …, start time (the 22nd field, in ticks).
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (PermissionError, StopIteration):
        return False
    started_s = int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0] in "ZX" or started_s > written_ns / 1e9 + SLACK_S
