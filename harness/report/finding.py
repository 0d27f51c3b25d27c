"""One thing worth knowing about a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

Severity = Literal["high", "medium", "low", "info"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

# Modes whose times are not those of a GPU per rank; what is said about time there is at most `low`.
NOT_A_CLUSTER = {
    "shared-gpu": "the ranks share one GPU: kernels, memory and collectives are real, their times are not a cluster's",
    "rehearsal": "one process rehearsed a rank of a larger run: memory is real, communication did not happen",
    "cpu": "the ranks ran on CPUs over gloo: times and the size of overlap say nothing about GPUs",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """`evidence` names figures as `--json` does, units in the names; `where` is a rank, step, dimension or site."""

    severity: Severity
    title: str
    evidence: dict[str, Any]
    where: str
    advice: str


def of_time(severity: Severity, mode: str) -> Severity:
    """The severity of a finding about time in a mode."""
    return "low" if mode in NOT_A_CLUSTER and severity in ("high", "medium") else severity


def ranks_text(ranks: list[int | None]) -> str:
    """`rank 3`, `ranks 0 to 7`, `ranks 0, 2, 5`; at most eight are listed."""
    known = sorted({rank for rank in ranks if rank is not None})
    if not known:
        return "rank unknown"
    if len(known) == 1:
        return f"rank {known[0]}"
    if known[-1] - known[0] == len(known) - 1:
        return f"ranks {known[0]} to {known[-1]}"
    more = f" and {len(known) - 8} more" if len(known) > 8 else ""
    return f"ranks {', '.join(map(str, known[:8]))}{more}"
