"""Step rows of a recording, put together over ranks and over steps.

Rows may come from any training loop and from a file cut short: a field that is not the number it should be is unknown.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from harness.recording import Recording

RATES = ("tokens_per_s", "tflops_per_s", "mfu_pct")
PEAKS = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes", "peak_requested_bytes", "peak_rss_bytes")

# Steps whose time is not training's alone: the recorder, a checkpoint or what follows an export runs in them.
DISTURBED = frozenset(
    {"warmup", "profiled", "profiler_warmup", "memory_history", "after_export", "checkpoint", "unfinished"}
)


def by_step(recording: Recording) -> list[dict[str, Any]]:
    """One item per step, in order: time and rates of the slowest rank, peaks per rank (bytes).

    `wall_ns` is the longest over the ranks; `tokens_per_s` (per device), `tflops_per_s` and `mfu_pct` are the lowest;
    loss and grad_norm are equal on all ranks. `plain` says whether the time is training's alone: neither the first
    step recorded nor one with a tag of `DISTURBED`. In a rehearsal times and rates are None: its steps did not
    communicate, and its ranks ran one after the other.
    """
    timed = recording.mode != "rehearsal"
    steps: dict[int, dict[int, Mapping[str, Any]]] = {}
    for rank, rows in sorted(recording.steps.items()):
        for row in rows:
            if type(row.get("step")) is int:
                steps.setdefault(row["step"], {})[rank] = row
    first = min(steps, default=None)
    items = []
    for number, of_rank in sorted(steps.items()):
        any_rank = next(iter(of_rank.values()))
        tags = list(dict.fromkeys(tag for row in of_rank.values() for tag in tags_of(row)))
        items.append(
            {
                "step": number,
                "wall_ns": highest(of_rank.values(), "wall_ns") if timed else None,
                "loss": number_of(any_rank, "loss"),
                "grad_norm": number_of(any_rank, "grad_norm"),
                **{rate: lowest(of_rank.values(), rate) if timed else None for rate in RATES},
                "memory_source": any_rank.get("memory_source"),
                "ranks": {rank: {peak: whole(row, peak) for peak in PEAKS} for rank, row in of_rank.items()},
                "tags": tags,
                "plain": number != first and not DISTURBED & set(tags),
            }
        )
    return items


def by_rank(recording: Recording, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One item per rank that has a step: the median time of its plain steps (see `by_step`), its highest peaks and
    those by phase."""
    plain = {item["step"] for item in steps if item["plain"] and item["wall_ns"] is not None}
    items = []
    for rank, rows in sorted(recording.steps.items()):
        if not rows:
            continue
        walls = [wall for row in rows if row.get("step") in plain and (wall := whole(row, "wall_ns"))]
        phases: dict[str, int] = {}
        for row in rows:
            for name, phase in phases_of(row).items():
                if (peak := whole(phase, "peak_allocated_bytes")) is not None:
                    phases[name] = max(phases.get(name, 0), peak)
        items.append(
            {
                "rank": rank,
                "steps": len(rows),
                "median_step_wall_ns": int(statistics.median(walls)) if walls else None,
                **{peak: highest(rows, peak) for peak in PEAKS},
                "peak_allocated_bytes_by_phase": phases,
            }
        )
    return items


def tags_of(row: Mapping[str, Any]) -> list[str]:
    tags = row.get("tags")
    return [str(tag) for tag in tags] if isinstance(tags, list) else []


def phases_of(row: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    phases = row.get("phases")
    if not isinstance(phases, Mapping):
        return {}
    return {str(name): phase for name, phase in phases.items() if isinstance(phase, Mapping)}


def whole(row: Mapping[str, Any], name: str) -> int | None:
    value = row.get(name)
    return value if type(value) is int else None


def number_of(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    return value if type(value) in (int, float) else None


def highest(rows: Iterable[Mapping[str, Any]], name: str) -> int | None:
    return max((value for row in rows if (value := whole(row, name)) is not None), default=None)


def lowest(rows: Iterable[Mapping[str, Any]], name: str) -> float | None:
    return min((value for row in rows if (value := number_of(row, name)) is not None), default=None)
