"""The report in a terminal: what ran, steps, ranks, communication by mesh dimension, prediction beside measurement."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from harness.compare.steps import PEAKS
from harness.compare.text import collectives
from harness.config import Trainer
from harness.ledger import Prediction
from harness.ledger.prediction import RankMemory
from harness.ledger.time_text import compared_lines
from harness.report import lifetime, pipeline
from harness.report.build import Report
from harness.report.over_ranks import incomplete_steps, waited_for_all
from harness.text import (
    counted,
    in_ranges,
    milliseconds,
    number,
    percent,
    printable,
    quantity,
    signed_percent,
    size,
    table,
)
from harness.trace.analysis import HOST_WAITED

STEPS_SHOWN = 12
RANKS_SHOWN = 8
LINES_SHOWN = 8
FINDINGS_SHOWN = 5

MEMORY_SOURCES = {
    "cuda_allocator": "allocated, by the CUDA caching allocator",
    "tensor_storages": "allocated, by tracking live tensor storages",
    "rss": "resident set of the process",
}


def render(report: Report) -> str:
    """The whole text; sections without input are left out, what is missing is said. Of a recording in which nothing
    was measured only its head."""
    if not report.read:
        return "\n".join(map(printable, _head(report)))
    sections = [
        _head(report),
        _findings(report),
        _steps(report),
        _ranks(report),
        _overlap(report),
        _communication(report),
        pipeline.render(report.pipeline) if report.pipeline else (),
        lifetime.render(report),
    ]
    sections += [_ledger(report), compared_lines(report.prediction.time) if report.prediction else ()]
    sections.append(_snapshots(report))
    return "\n\n".join("\n".join(map(printable, lines)) for section in sections if (lines := list(section)))


def _head(report: Report) -> Iterator[str]:
    yield f"{report.path}   mode {report.mode}"
    recording = report.recording
    if recording is None:
        return
    manifest, config = recording.manifest, report.config
    if config is not None:
        ranks, precision, *rest = layout(config).values()
        yield f"  {config.name}: {ranks}; {precision}"
        yield f"  {'; '.join(rest)}"
    if report.float8 is not None:
        yield f"  float8: {report.float8.words()}"
    if report.compilation is not None:
        yield f"  compile: {report.compilation.words()}"
    versions = manifest.get("versions") or {}
    known = [f"{name} {versions[name]}" for name in ("torch", "cuda", "nccl", "driver") if versions.get(name)]
    devices = {str((rank.get("device") or {}).get("name")) for rank in recording.ranks.values()}
    if known or devices:
        yield "  " + ", ".join(known + sorted(devices))
    if report.standing is not None:
        yield f"  {report.standing.headline()}"
        yield from (f"  {line}" for line in report.standing.details())
    if recording.missing_ranks and report.read:
        yield f"  without a step: rank {in_ranges(recording.missing_ranks)}"


def layout(config: Trainer.Config) -> dict[str, str]:
    """A configuration in a few words each: layout, precision, then model and batch, or the workload's pattern."""
    parallel, model, training = config.parallelism, config.model, config.training
    if config.workload != "training":
        return {
            "layout": counted(config.world_size, "rank"),
            "precision": training.mixed_precision_param,
            "workload": config.workload,
            **getattr(config, config.workload).words(),
        }
    degrees = {"dp_replicate": parallel.dp_replicate, "dp_shard": config.dp_shard, "cp": parallel.cp}
    degrees |= {"tp": parallel.tp, "pp": parallel.pp}
    shown = " × ".join(f"{name} {n}" for name, n in degrees.items() if n > 1 or name in ("dp_shard", "tp"))
    micro_batches = f"{config.pipeline_micro_batches} × " if parallel.pp > 1 else ""
    sequence = " with sequence parallel" if parallel.tp > 1 and parallel.sequence_parallel else ""
    return {
        "layout": f"{counted(config.world_size, 'rank')}, {shown}{sequence}",
        "precision": training.mixed_precision_param,
        "model": f"{model.params:,} parameters ({model.n_layers} layers, width {model.dim}, vocabulary "
        f"{model.vocab_size:,})",
        "batch": f"{micro_batches}{training.micro_batch_size} × {training.seq_len // parallel.cp} tokens per rank",
    }


def _findings(report: Report) -> Iterator[str]:
    if not report.findings:
        return
    yield "Findings"
    for finding in report.findings[:FINDINGS_SHOWN]:
        yield f"  {finding.severity:6}  {printable(finding.title)}"
        yield f"          {printable(finding.where)}"
        figures = ", ".join(f"{name} {evidence_text(name, value)}" for name, value in finding.evidence.items())
        if figures:
            yield f"          {printable(figures)}"
        if finding.severity != "info":
            yield f"          → {printable(finding.advice)}"
    if len(report.findings) > FINDINGS_SHOWN:
        yield f"  {len(report.findings) - FINDINGS_SHOWN} more: --json, --html"


def evidence_text(name: str, value: object) -> str:
    """A figure of a finding, or a name in it, as text."""
    return quantity(name, value) if value is None or isinstance(value, int | float) else str(value)


def _steps(report: Report) -> Iterator[str]:
    """Time of the slowest rank, and the peak of every rank; of a rehearsal the peaks alone."""
    if not report.steps:
        return
    shown = report.steps[-STEPS_SHOWN:]
    ranks = [item["rank"] for item in report.ranks][:RANKS_SHOWN]
    skipped = f", the last {len(shown)} of {len(report.steps)}" if len(shown) < len(report.steps) else ""
    timed = report.mode != "rehearsal"
    yield f"Steps{skipped}: {'time of the slowest rank, ' if timed else ''}peak memory of each rank"
    rows = []
    for item in shown:
        peaks = [_peak(item["ranks"].get(rank), item["memory_source"]) for rank in ranks]
        rows.append(
            [
                str(item["step"]),
                *(_pace(item, mfu=_has_mfu(report)) if timed else []),
                *peaks,
                str(item["memory_source"] or "n/a"),
                f" {' '.join(item['tags'])}",
            ]
        )
    pace = ["ms", "loss", "norm", "tok/s/dev", *(["MFU %"] if _has_mfu(report) else [])] if timed else []
    headers = ["step", *pace, *(f"rank {r}" for r in ranks), "memory is", " tags"]
    yield from table(headers, rows, last_left=True)
    if len(report.ranks) > RANKS_SHOWN:
        yield f"  {len(report.ranks) - RANKS_SHOWN} more ranks: --json"
    sources = {item["memory_source"] for item in shown} & MEMORY_SOURCES.keys()
    yield "  " + "; ".join(f"{source}: {MEMORY_SOURCES[source]}" for source in sorted(sources))


def _pace(item: dict[str, Any], *, mfu: bool) -> list[str]:
    figures = [milliseconds(item["wall_ns"]), number(item["loss"]), number(item["grad_norm"], 3)]
    return [*figures, number(item["tokens_per_s"], 0), *([number(item["mfu_pct"], 1)] if mfu else [])]


def _peak(row: dict[str, Any] | None, source: str | None) -> str:
    return size(row["peak_rss_bytes" if source == "rss" else "peak_allocated_bytes"]) if row else "n/a"


def _has_mfu(report: Report) -> bool:
    return any(item["mfu_pct"] is not None for item in report.steps)


def _ranks(report: Report) -> Iterator[str]:
    if not report.ranks:
        return
    names = {"peak_allocated_bytes": "allocated", "peak_active_bytes": "active", "peak_reserved_bytes": "reserved"}
    names |= {"peak_requested_bytes": "requested", "peak_rss_bytes": "resident (host)"}
    known = [peak for peak in PEAKS if any(item[peak] is not None for item in report.ranks)]
    phases = list(dict.fromkeys(name for item in report.ranks for name in item["peak_allocated_bytes_by_phase"]))
    timed = report.mode != "rehearsal"
    time = "median step time without the first, traced and tracked steps; " if timed else ""
    yield f"Ranks: {time}highest peaks; allocated peak by phase"
    rows = [
        [
            str(item["rank"]),
            str(item["steps"]),
            *([milliseconds(item["median_step_wall_ns"])] if timed else []),
            *(size(item[peak]) for peak in known),
            *(size(item["peak_allocated_bytes_by_phase"].get(name)) for name in phases),
        ]
        for item in report.ranks
    ]
    yield from table(["rank", "steps", *(["ms"] if timed else []), *(names[peak] for peak in known), *phases], rows)


def _overlap(report: Report) -> Iterator[str]:
    """Every mesh dimension over the ranks: lowest and highest hidden share, mean times per traced file."""
    if report.overlap is None:
        return
    incomplete = [f"  {sentence}" for sentence in incomplete_steps(report.captures)]
    if report.complete_overlap is None:
        yield "Communication by mesh dimension: no complete step is in the traces"
        yield from incomplete
        return
    entries = report.complete_overlap["ranks"]
    sources = sorted({entry["source"] for entry in entries})
    steps = {item["step"] for entry in entries for item in entry["steps"]}
    yield (
        f"Communication by mesh dimension: traced steps {in_ranges(steps) or 'not named'}; "
        f"{' and '.join(sources)} time in ms, mean of {counted(len(entries), 'rank')}"
    )
    rows = []
    for item in report.dimensions:
        low, high = item["lowest_overlap_pct"], item["highest_overlap_pct"]
        hidden = percent(low) if low == high else f"{number(low, 2)} to {percent(high)}"
        means = (milliseconds(item[key]) for key in ("comm_ns", "overlap_ns", "exposed_ns"))
        rows.append([item["dimension"], *means, hidden])
    yield from table(["dimension", "communication", "hidden by compute", "exposed", "hidden share, over ranks"], rows)
    if "host" in sources:
        yield "  host time: what the calls took on the CPU, not device time (gloo has no device events)"
        if waited_for_all(report.dimensions):
            yield f"  {HOST_WAITED}"
    if len(report.dimensions) > 2:
        yield "  dimensions that communicate at the same time: exposed times need not add up"
    yield from incomplete


def _communication(report: Report) -> Iterator[str]:
    yield from collectives(report.communication, compared=report.prediction is not None)


def _ledger(report: Report) -> Iterator[str]:
    prediction = report.prediction
    if prediction is None:
        if report.not_predicted:
            yield f"No prediction: {report.not_predicted}"
        return
    reserves = any(rank.peak_reserved_bytes is not None for rank in prediction.ranks)
    what = "allocated and reserved peaks" if reserves else "allocated peak"
    yield f"Ledger: {what} from the second step on, predicted for {prediction.target} and measured"
    rows = [
        [
            str(rank.rank),
            size(rank.peak_allocated_bytes),
            size(rank.measured_peak_allocated_bytes),
            signed_percent(rank.error_pct),
            *(_reserved(rank) if reserves else []),
            f" {rank.at}",
        ]
        for rank in prediction.ranks
        if report.mode != "rehearsal" or rank.measured_peak_allocated_bytes is not None
    ]
    of, also = ("allocated", ["reserved", "measured", "error"]) if reserves else ("predicted", [])
    yield from table(["rank", of, "measured", "error", *also, " at"], rows, last_left=True)
    if report.mode == "rehearsal":
        yield from _stood_for(prediction)
    for _, group in groupby(prediction.ranks, key=lambda rank: rank.alike_rank):
        first = next(group)
        yield f"  what rank {first.rank} holds then:"
        lines = [[e.category, size(e.at_peak_bytes), f" {e.formula}"] for e in first.entries if e.at_peak_bytes]
        headers = ["line", "bytes", " formula of its most"]
        yield from table(headers, lines[:LINES_SHOWN], last_left=True, indent="    ")
        if len(lines) > LINES_SHOWN:
            yield f"    and {len(lines) - LINES_SHOWN} smaller lines: meshscope ledger"
        break


def _reserved(rank: RankMemory) -> list[str]:
    predicted, measured = rank.peak_reserved_bytes, rank.measured_peak_reserved_bytes
    return [size(predicted), size(measured), signed_percent(rank.reserved_error_pct)]


def _stood_for(prediction: Prediction) -> Iterator[str]:
    """Which ranks each kind of rehearsed ranks stands for."""
    for alike in dict.fromkeys(rank.alike_rank for rank in prediction.ranks):
        ranks = [rank for rank in prediction.ranks if rank.alike_rank == alike]
        rehearsed = [rank.rank for rank in ranks if rank.measured_peak_allocated_bytes is not None]
        others = f"{counted(len(ranks), 'rank')} alike: {in_ranges([rank.rank for rank in ranks])}"
        yield f"  {others}; rehearsed: {in_ranges(rehearsed) or 'none'}"


def _snapshots(report: Report) -> Iterator[str]:
    if report.memory is None or not report.memory["files"]:
        return
    yield "Allocator snapshots: peaks in requested bytes; stacking: freed and not yet reusable at an allocation"
    rows = []
    for file in report.memory["files"]:
        for device in file["devices"]:
            rows.append(
                [
                    "?" if file["rank"] is None else str(file["rank"]),
                    str(device["device"]),
                    str(device["history"]),
                    size(device["peak_allocated_bytes"]),
                    size(device["peak_active_bytes"]),
                    size(device["peak_reserved_bytes"]),
                    *stacked(device["stacking"]),
                ]
            )
    headers = ["rank", "device", "history", "allocated", "active", "reserved", "stacked blocks", "most pending"]
    yield from table(headers, rows)


def stacked(stacking: dict[str, Any]) -> tuple[str, str]:
    """Blocks that stacked up and the most bytes that were pending, in words where there were none."""
    blocks, pending = stacking["blocks"], stacking["max_pending_bytes"]
    return ("n/a" if blocks is None else f"{blocks:,}" if blocks else "none", size(pending) if pending != 0 else "none")
