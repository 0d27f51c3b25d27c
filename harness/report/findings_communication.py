"""Findings about communication: what is exposed, what cannot overlap, and who is waited for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.compare.waits import waiting
from harness.report.finding import Finding, Severity, of_time, ranks_text
from harness.report.findings_host import why_late
from harness.report.over_ranks import ALL
from harness.trace import Capture
from harness.trace.activity import Activity
from harness.trace.events import MISSING
from harness.trace.figures import COMMUNICATION, COMPUTE

if TYPE_CHECKING:
    from harness.report.build import Report

# Exposed communication, percent of the time it ran in.
EXPOSED_HIGH_PCT = 20.0
EXPOSED_MEDIUM_PCT = 5.0
# Exposed so much, a dimension that is not data-parallel is waited for at once, as eager tensor parallelism does.
NOTHING_HIDDEN_PCT = 95.0
# Communication on the stream of the computation, percent of a dimension's communication.
SHARED_STREAM_PCT = 5.0
# Waiting, percent of the communication that could be matched over ranks; where it is most, advice about overlap comes
# second; and one rank's share of it beyond its turn.
WAIT_PCT = 25.0
MOSTLY_WAIT_PCT = 50.0
LATE_SHARE = 0.5


def communication_findings(report: Report) -> Iterator[Finding]:
    if report.complete_overlap is None:
        return
    cross_rank = report.complete_overlap["cross_rank"]
    collectives = by_dimension(cross_rank["collectives"]) if cross_rank["aligned"] else {}
    costly = {d["dimension"] for d in report.dimensions if 100 * d["exposed_ns"] > EXPOSED_MEDIUM_PCT * d["span_ns"]}
    yield from exposed(report.dimensions, report.mode, {name: wait_pct(each) for name, each in collectives.items()})
    yield from on_compute_stream(report.complete_captures, report.mode, costly)
    plain_ns = report.metrics["step_wall_ns"].value
    hosts = {item["rank"]: why_late(item, plain_ns) for item in report.mean_parts if item["idle_host_ns"]}
    yield from late_ranks(collectives, costly, report.mode, hosts)


def by_dimension(collectives: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for item in collectives:
        found.setdefault(item["dimension"], []).append(item)
    return found


def wait_pct(collectives: Sequence[dict[str, Any]]) -> float:
    """Waiting in percent of waiting and transfer, of items of `harness.trace.cross_rank`."""
    wait_ns, transfer_ns = waiting(collectives)
    return 100 * wait_ns / (wait_ns + transfer_ns) if wait_ns else 0.0


def exposed(dimensions: Sequence[dict[str, Any]], mode: str, waits_pct: Mapping[str, float]) -> Iterator[Finding]:
    """Per mesh dimension: the share of its communication that no computation hides, and the kind that dominates."""
    found = [item for item in dimensions if item["dimension"] != ALL and item["comm_ns"]]
    for item in sorted(found, key=lambda item: -item["exposed_ns"]):
        name, kinds = item["dimension"], item["kinds"]
        share = 100 * item["exposed_ns"] / item["comm_ns"]
        of_span = 100 * item["exposed_ns"] / item["span_ns"] if item["span_ns"] else 0.0
        severity: Severity = "info"
        if of_span > EXPOSED_MEDIUM_PCT:
            severity = "high" if of_span > EXPOSED_HIGH_PCT else "medium"
        host = "" if item["sources"] == ["device"] else " (host time)"
        kind = kinds[0]["kind"] if kinds else None
        if severity == "info":
            title = f"{name}: {100 - share:.0f} % of communication is hidden by compute{host}"
        elif item["sources"] == ["host"] and not item["overlap_ns"]:
            title = f"{name}: the host waited for every collective, {of_span:.0f} % of the traced time"
        else:
            title = f"{name}: {share:.0f} % of communication is exposed, {of_span:.0f} % of the traced time{host}"
        yield Finding(
            severity=of_time(severity, mode),
            title=title,
            evidence={
                "comm_ns": item["comm_ns"],
                "exposed_ns": item["exposed_ns"],
                "exposed_pct": share,
                "dominant_kind": kind,
                "dominant_exposed_ns": kinds[0]["exposed_ns"] if kinds else None,
            },
            where=f"{name}, {ranks_text(item['ranks'])} (means), mode {mode}",
            advice="Little to gain here."
            if severity == "info"
            else waits_first(name, waits_pct.get(name, 0.0)) + advice(name, kind, share),
        )


def waits_first(dimension: str, pct: float) -> str:
    """What to say before advice about overlap, which does not help against ranks that are late."""
    if pct <= MOSTLY_WAIT_PCT or dimension.removeprefix("mesh_") == "pp":
        return ""
    return f"First see why ranks wait for one another ({pct:.0f} % of it is waiting, not transfer). "


def advice(dimension: str, kind: str | None, exposed_pct: float) -> str:
    if "world" in dimension:  # all ranks, for whatever reason
        return "See which collectives wait: meshscope overlap --by collective."
    if dimension.removeprefix("mesh_") == "pp":
        return (
            "Mostly stages that wait for each other: the schedule's bubble and stages of unequal cost. More "
            "micro-batches, another schedule or another split of the layers; the Pipeline section has the grid."
        )
    if dimension.removeprefix("mesh_") == "cp":
        return (
            "Attention needs the keys and values of all ranks at once: fewer CP ranks, longer sequences, or "
            "parallelism.cp_attention=ring, which attends to one block while the next is sent."
        )
    if "tp" in dimension or ("dp" not in dimension and exposed_pct > NOTHING_HIDDEN_PCT):
        return (
            "Eager tensor parallelism waits for each of its collectives. Fewer TP ranks, or async TP (compiled, "
            "symmetric memory) which splits products so that they hide it."
        )
    if kind == "all_gather":
        return (
            "The computation between two all-gathers is too short for the next one: larger micro-batch or sequence, "
            "explicit prefetch of more units, or reshard_after_forward=never where memory allows."
        )
    if kind == "reduce_scatter":
        return (
            "The backward between two reduce-scatters is too short: larger micro-batch or sequence, or a bfloat16 "
            "reduction (half the bytes)."
        )
    return "See which collectives wait: meshscope overlap --by collective."


def on_compute_stream(captures: Sequence[Capture], mode: str, costly: Collection[str]) -> Iterator[Finding]:
    """Per dimension: communication that runs on the stream of the computation and so cannot overlap with it.

    `costly`: dimensions whose exposed communication takes a part of the step that matters; of others it is `low`.
    """
    totals: dict[str, list[int]] = {}
    streams: set[int] = set()
    ranks: dict[str, list[int | None]] = {}
    for capture in captures:
        for device in capture.devices:
            stream = compute_stream(device.activity)
            if stream is None:
                continue
            for name in device.activity.dimensions():
                mask = device.activity.dimension(name)
                shared = device.activity.union(mask & (device.activity.stream == stream)).total_ns()
                total = totals.setdefault(name, [0, 0])
                total[0] += shared
                total[1] += device.activity.union(mask).total_ns()
                if shared:
                    streams.add(stream)
                    ranks.setdefault(name, []).append(capture.rank)
    for name, (shared, total_ns) in totals.items():
        if total_ns and 100 * shared / total_ns > SHARED_STREAM_PCT:
            share, on = 100 * shared / total_ns, ", ".join(map(str, sorted(streams)))
            yield Finding(
                severity=of_time("medium" if name in costly else "low", mode),
                title=f"{name}: {share:.0f} % of its communication runs on the compute stream and cannot overlap there",
                evidence={"on_compute_stream_ns": shared, "comm_ns": total_ns, "on_compute_stream_pct": share},
                where=f"{name}, stream {on}, {ranks_text(ranks[name])} (sums), mode {mode}",
                advice="Synchronous collectives run on the stream that calls them: async_op=True, with wait() only "
                "where the result is needed.",
            )


def compute_stream(activity: Activity) -> int | None:
    """The stream that computes longest; None without streams."""
    computes = (activity.role == COMPUTE) & (activity.stream != MISSING)
    streams, index = np.unique(activity.stream[computes], return_inverse=True)
    if not streams.size or not (activity.role == COMMUNICATION).any():
        return None
    busy = np.bincount(index, weights=(activity.end - activity.start)[computes])
    return int(streams[int(busy.argmax())])


def late_ranks(
    collectives: Mapping[str, Sequence[dict[str, Any]]],
    costly: Collection[str],
    mode: str,
    hosts: Mapping[int | None, str | None],
) -> Iterator[Finding]:
    """Per dimension: how much of its communication is waiting, and whether one rank is the one waited for.

    `hosts`: of a rank what its host has to do with its being late, if anything.
    Waiting costs time where the communication is exposed (`costly`); where compute hides it, the finding is `low`.
    """
    for name, items in collectives.items():
        total, transfer = waiting(items)
        waits: dict[int, float] = {}
        for item in items:
            waits[item["last_rank"]] = waits.get(item["last_rank"], 0) + waiting([item])[0]
        share = wait_pct(items)
        if share < WAIT_PCT:
            continue
        late, caused = max(waits.items(), key=lambda pair: pair[1])
        members = max(len(item["wait_ns"]) for item in items)
        one = caused / total > max(LATE_SHARE, 1.5 / members)
        yield Finding(
            severity=of_time("medium" if name in costly else "low", mode),
            title=f"{name}: ranks wait for rank {late}"
            if one
            else f"{name}: {share:.0f} % of communication is waiting",
            evidence={
                "wait_ns": round(total),
                "transfer_ns": transfer,
                "wait_pct": share,
                "caused_by_last_rank_pct": 100 * caused / total,
            },
            where=f"{name}, {len(items)} collectives, means over ranks; rank {late} is waited for longest, mode {mode}",
            advice=hosts.get(late) or "That rank has more to do, a slower device or host, or less data-loading ahead."
            if one
            else "The last to arrive changes: ranks compute unevenly long or their hosts launch late. "
            "It is not the network.",
        )
