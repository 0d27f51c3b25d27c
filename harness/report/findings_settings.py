"""Findings about the environment that ranks were started with: what holds a run back, and what does nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.report.finding import Finding, of_time, ranks_text
from harness.report.findings_communication import EXPOSED_MEDIUM_PCT
from harness.report.over_ranks import ALL
from harness.variables import KNOWN

if TYPE_CHECKING:
    from harness.report.build import Report

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
DEFAULT_CONNECTIONS = 8
"""CUDA's own, where the variable is unset (CUDA C++ programming guide, CUDA environment variables)."""


def setting_findings(report: Report) -> Iterator[Finding]:
    if report.recording is None:
        return
    environments = {rank: document.get("environment_before") or {} for rank, document in report.recording.ranks.items()}
    if report.mode in ("real", "shared-gpu"):
        yield from few_connections(environments, report)
    yield from ignored_variables(environments, report.recording.manifest)


def few_connections(environments: dict[int, dict[str, str]], report: Report) -> Iterator[Finding]:
    """Fewer hardware queues than CUDA gives by itself: streams that share one wait for each other."""
    few = {
        rank: int(text)
        for rank, environment in environments.items()
        if (text := environment.get(CONNECTIONS, "").strip()).isdecimal() and 0 < int(text) < DEFAULT_CONNECTIONS
    }
    if not few:
        return
    whole = next((item for item in report.dimensions if item["dimension"] == ALL), None)
    exposed_ns, span_ns = (whole["exposed_ns"], whole["span_ns"]) if whole else (None, None)
    share = 100 * exposed_ns / span_ns if exposed_ns is not None and span_ns else None
    fewest = min(few.values())
    yield Finding(
        severity=of_time("medium" if share is not None and share > EXPOSED_MEDIUM_PCT else "low", report.mode),
        title=f"{CONNECTIONS}={fewest}: what waits in one stream holds up others"
        + ("" if share is None else f", and communication is exposed for {share:.0f} % of the traced time"),
        evidence={"connections": fewest, "exposed_ns": exposed_ns, "exposed_of_traced_time_pct": share},
        where=f"{ranks_text(list(few))}, mode {report.mode}",
        advice=f"Unset it (CUDA's default is {DEFAULT_CONNECTIONS}) in the environment that starts the ranks; "
        "meshscope probe max_connections measures the difference.",
    )


def ignored_variables(environments: dict[int, dict[str, str]], manifest: dict[str, object]) -> Iterator[Finding]:
    """Variables that were set and that this torch does not use, though it knows their names."""
    release = torch_release(manifest)
    if release is None:
        return
    for known in KNOWN:
        ranks: list[int | None] = [rank for rank, environment in environments.items() if known.name in environment]
        if ranks and known.ignored_since and release >= known.ignored_since[0]:
            yield Finding(
                severity="info",
                title=f"{known.name} is set and does nothing",
                evidence={},
                where=ranks_text(ranks),
                advice=f"Ignored by torch {release[0]}.{release[1]}: {known.ignored_since[1]}.",
            )


def torch_release(manifest: dict[str, object]) -> tuple[int, int] | None:
    """(major, minor) of the torch that ran; None where the manifest does not say."""
    versions = manifest.get("versions")
    release = re.match(r"(\d+)\.(\d+)", str(versions.get("torch"))) if isinstance(versions, dict) else None
    return (int(release[1]), int(release[2])) if release else None
