"""Findings about memory: what ran out, what stacks up, and what the peak consists of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness.compare.steps import whole
from harness.report.finding import Finding, ranks_text
from harness.report.findings_settings import torch_release
from harness.text import MIB, counted, size
from harness.trace.cross_rank import POINT_TO_POINT

if TYPE_CHECKING:
    from harness.report.build import Report

# Pending memory that is worth a word: bytes, and percent of the active peak.
STACKED_BYTES = 64 * MIB
STACKED_PCT = 2.0
UNEVEN_PCT = 5.0
SITES_SHOWN = 3

REFERENCES_SINCE = (2, 8)
"""The first torch whose collectives record no streams (pytorch#150398)."""
HOLD = "Hold a reference until the collective has been waited for, then free on the stream that allocated."
REUSE = (
    "Sends and receives record streams in every torch, and neither a variable nor a reference helps: keep their "
    "buffers and use them again."
)


def memory_findings(report: Report) -> Iterator[Finding]:
    yield from out_of_memory(report)
    yield from retries(report)
    yield from stacking(report)
    yield from uneven(report)
    yield from peak(report)


def devices(report: Report) -> list[tuple[int | None, dict[str, Any]]]:
    return [(file["rank"], device) for file in (report.memory or {"files": []})["files"] for device in file["devices"]]


def out_of_memory(report: Report) -> Iterator[Finding]:
    """Failed allocations, in snapshots and counted in step rows."""
    failed = [(rank, oom) for rank, device in devices(report) for oom in device["oom"]]
    if failed:
        rank, oom = failed[0]
        yield Finding(
            severity="high",
            title=f"{counted(len(failed), 'allocation')} failed: {size(oom['size_bytes'])} did not fit",
            evidence={k: oom[k] for k in ("size_bytes", "device_free_bytes", "allocated_bytes", "reserved_bytes")},
            where=f"{ranks_text([rank])}, {oom['site']}",
            advice="If reserved is far above allocated, expandable segments help; otherwise checkpoint activations, "
            "shard over more ranks or take a smaller micro-batch.",
        )
        return
    ranks = highest_count(report, "ooms")
    if ranks:
        yield Finding(
            severity="high",
            title="Allocations failed (out of memory) during the run",
            evidence={"ooms": sum(ranks.values())},
            where=ranks_text(list(ranks)),
            advice="A snapshot (recorder.memory) shows what was there.",
        )


def retries(report: Report) -> Iterator[Finding]:
    """The allocator emptied its cache and asked the driver again: it synchronises the device, and time goes."""
    ranks = highest_count(report, "alloc_retries")
    if ranks:
        yield Finding(
            severity="high",
            title=f"The allocator ran dry {counted(sum(ranks.values()), 'time')}, freed its cache and tried again",
            evidence={"alloc_retries": sum(ranks.values())},
            where=ranks_text(list(ranks)),
            advice="Each retry synchronises the device. Leave it more room: expandable segments, less memory at the "
            "peak, nothing else on the GPU.",
        )


def highest_count(report: Report, name: str) -> dict[int, int]:
    """Rank -> the last and highest value of a counter, without zeros."""
    rows = report.recording.steps if report.recording else {}
    most = {rank: max((whole(row, name) or 0 for row in steps), default=0) for rank, steps in rows.items()}
    return {rank: count for rank, count in most.items() if count}


def stacking(report: Report) -> Iterator[Finding]:
    """Freed blocks that could not be reused while other memory was allocated."""
    stacked = [
        (rank, device)
        for rank, device in devices(report)
        if device["stacking"]["max_pending_bytes"]
        and not_reusable(device) >= STACKED_BYTES
        and 100 * not_reusable(device) >= STACKED_PCT * (device["peak_active_bytes"] or 0)
    ]
    if not stacked:
        return
    _, device = max(stacked, key=lambda pair: not_reusable(pair[1]))
    lost = not_reusable(device)
    found, active = device["stacking"], device["peak_active_bytes"]
    sites = [
        f"{one['site']} ({counted(one['blocks'], 'block')}, {size(one['bytes'])})"
        for one in (found["sites"] or found["pending_sites"])[:SITES_SHOWN]
    ]
    yield Finding(
        severity="high" if active and lost > 0.1 * active else "medium",
        title=f"Memory stacks up: {size(lost)} freed and not reusable at once",
        evidence={
            "not_reusable_bytes": lost,
            "max_pending_bytes": found["max_pending_bytes"],
            "blocks": found["blocks"],
            "peak_allocated_bytes": device["peak_allocated_bytes"],
            "peak_active_bytes": active,
        },
        where=f"{ranks_text([r for r, _ in stacked])}; {'; '.join(sites)}",
        advice=f"These blocks were lent to another stream with record_stream and wait for it. {_release(report)}",
    )


def _release(report: Report) -> str:
    """How memory comes back in time, by what of the run records streams: collectives until torch 2.8 or where
    `training.collective_memory` says so, sends and receives always (docs/probes.md, "record_streams")."""
    if not _sends(report):
        return HOLD
    return REUSE if _collectives_hold_references(report) else f"{HOLD} {REUSE}"


def _sends(report: Report) -> bool:
    """Whether ranks send to one another point to point, by their traces or, without any, by the configuration."""
    kinds = {one["kind"] for entry in (report.overlap or {"ranks": []})["ranks"] for one in entry["collectives"]}
    if kinds:
        return bool(kinds & POINT_TO_POINT)
    config = report.config
    return config is not None and (config.parallelism.pp > 1 or config.workload == "point_to_point")


def _collectives_hold_references(report: Report) -> bool:
    """Whether that is known: none of them records a stream."""
    release = torch_release(report.recording.manifest) if report.recording else None
    marked = report.config is not None and report.config.training.collective_memory != "references"
    return release is not None and release >= REFERENCES_SINCE and not marked


def not_reusable(device: dict[str, Any]) -> int:
    """Bytes that were freed and not reusable at once: the active peak above the allocated one, or what was pending at
    an allocation if that is more. Both are lower bounds of the largest active − allocated; the first counts blocks
    freed before the history began, too."""
    above = (device["peak_active_bytes"] or 0) - (device["peak_allocated_bytes"] or 0)
    return max(above, device["stacking"]["max_pending_bytes"] or 0)


def uneven(report: Report) -> Iterator[Finding]:
    """Ranks whose peaks differ: the largest decides what fits."""
    peaks = {item["rank"]: item["peak_allocated_bytes"] for item in report.ranks if item["peak_allocated_bytes"]}
    if len(peaks) < 2:
        return
    most, least = max(peaks, key=lambda rank: peaks[rank]), min(peaks, key=lambda rank: peaks[rank])
    if 100 * (peaks[most] - peaks[least]) > UNEVEN_PCT * peaks[most]:
        yield Finding(
            severity="low",
            title=f"Ranks need unequal memory: {size(peaks[least])} to {size(peaks[most])}",
            evidence={"lowest_peak_allocated_bytes": peaks[least], "highest_peak_allocated_bytes": peaks[most]},
            where=f"rank {least} and rank {most}",
            advice="The fullest rank decides what fits: even out the layers of pipeline stages, or the shards.",
        )


def peak(report: Report) -> Iterator[Finding]:
    """When the peak is, and what most of it is: measured where there is a snapshot, else by the ledger."""
    ranked = [item for item in report.ranks if item["peak_allocated_bytes"]]
    evidence: dict[str, Any] = {}
    phase, where = None, ""
    composed = [(rank, device) for rank, device in devices(report) if device["peak_composition"]]
    rank, device = max(composed, key=lambda pair: pair[1]["peak_allocated_bytes"] or 0, default=(None, {}))
    if ranked:
        # Of the rank whose composition is known: only some may have a snapshot.
        same_rank = [item for item in ranked if item["rank"] == rank]
        top = max(same_rank or ranked, key=lambda item: item["peak_allocated_bytes"])
        phases = top["peak_allocated_bytes_by_phase"]
        phase = max(phases, key=lambda name: phases[name]) if phases else None
        evidence["peak_allocated_bytes"] = top["peak_allocated_bytes"]
        where = f"rank {top['rank']}"
    parts: list[tuple[str, int]] = []
    if composed:
        parts = [(share["category"], share["bytes"]) for share in device["peak_composition"]]
        evidence["peak_requested_bytes"] = device["peak_allocated_bytes"]
        where, basis = ranks_text([rank]), "measured, requested bytes"
    elif report.prediction is not None:
        every = report.prediction.ranks
        same = [item for item in every if where == f"rank {item.rank}"]
        predicted = max(same or every, key=lambda item: item.peak_allocated_bytes)
        parts = [(entry.category, entry.at_peak_bytes) for entry in predicted.entries]
        basis = "predicted"
        if not ranked:
            # Nothing was measured: this name leads to the page of predictions.
            evidence["predicted_peak_allocated_bytes"] = predicted.peak_allocated_bytes
            where, basis = f"rank {predicted.rank}", f"predicted, {size(predicted.peak_allocated_bytes)} in all"
    if not (phase or parts):
        return
    parts = [part for part in sorted(parts, key=lambda part: -part[1]) if part[1] > 0]
    title = f"Memory peaks in the {phase} phase" if phase else "The memory peak"
    if parts:
        total = sum(part[1] for part in parts)
        largest = ", ".join(f"{name} {100 * part / total:.0f} %" for name, part in parts[:3])
        title += f": {largest} ({basis})"
        evidence |= {"largest_part": parts[0][0], "largest_part_bytes": parts[0][1]}
    yield Finding(
        severity="info",
        title=title,
        evidence=evidence,
        where=where,
        advice="The largest parts are where a smaller peak comes from: activations by checkpointing, states and "
        "parameters by sharding over more ranks, logits by a vocabulary-parallel or chunked loss.",
    )
