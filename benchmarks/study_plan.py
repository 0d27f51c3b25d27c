"""What `multi_gpu_study` runs: models, layouts, and knobs with the layouts that they act on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from study_summary import Layout, Probe

from probes.inference import MIN_PAIRS

EXACT_PAIRS = 2
MODELS: dict[str, tuple[str, ...]] = {
    "real": (
        *("--module", "llama3", "--config", "llama3_1b", "--training.steps", "12", "--training.seq_len", "8192"),
        *("--training.micro_batch_size", "2", "--activation_checkpoint.mode", "selective"),
    ),
    "shared-gpu": ("--module", "llama3", "--config", "llama3_1b", "--training.seq_len", "2048"),
    "cpu": ("--module", "debug", "--config", "tiny", "--model.n_layers", "1"),
}
COLLECTIVES = ("--module", "workloads", "--config", "collectives")


def layouts_of(ranks: int, mode: str) -> list[Layout]:
    """Those of a power of two of ranks, most worth first. Pipelines and context parallelism come with as much tensor
    and data parallelism as the ranks allow."""
    half, rest = ranks // 2, _rest(ranks // 2)
    tail = "".join(f"_{'fsdp' if axis == 'dp_shard' else axis}{degree}" for axis, degree in rest.items() if degree > 1)
    found = [_layout(f"fsdp{half}_tp2", ranks, dp_shard=half, tp=2)] if ranks >= 4 else []
    found += [
        _layout(f"fsdp{ranks}", ranks, dp_shard=ranks, tp=1),
        _layout(f"tp{ranks}", ranks, dp_shard=1, tp=ranks),
        _layout(f"hsdp2{tail}", ranks, dp_replicate=2, **rest),
        _layout(f"cp2{tail}", ranks, cp=2, **rest),
        _layout(f"cp2_ring{tail}", ranks, {"parallelism.cp_attention": "ring"}, cp=2, **rest),
    ]
    if mode != "cpu":  # whose model has one layer
        found += [
            _layout(f"pp2_{name}{tail}", ranks, _pipeline(schedule, mode), pp=2, **rest)
            for name, schedule in (("1f1b", "1F1B"), ("zbv", "ZBVZeroBubble"))
        ]
    return found


def _rest(ranks: int) -> dict[str, int]:
    """How data and tensor parallelism share what one more axis leaves."""
    return {"dp_shard": ranks // 2, "tp": 2} if ranks > 2 else {"dp_shard": ranks, "tp": 1}


def _layout(name: str, ranks: int, fields: dict[str, int | str] | None = None, **degrees: int) -> Layout:
    return Layout(name, ranks, {f"parallelism.{axis}": n for axis, n in degrees.items()} | (fields or {}))


def _pipeline(schedule: str, mode: str) -> dict[str, int | str]:
    """One sequence a micro-batch, eight of them; layers keep all for backward, which is split."""
    fields = {"pipeline.schedule": schedule, "pipeline.micro_batches": 8, "model.tied_embeddings": "false"}
    alone = {"training.micro_batch_size": 1, "activation_checkpoint.mode": "none"}
    return fields | (alone if mode == "real" else {})


def probes_of(layouts: Sequence[Layout], on_cpu: bool) -> list[Probe]:
    """Knobs and the layouts that they act on, most worth first; the first choice of arms that the budget allows."""
    sharded = next(layout for layout in layouts if layout.name == f"fsdp{layout.ranks}")
    mixed = next((layout for layout in layouts if layout.name == f"fsdp{layout.ranks // 2}_tp2"), None)
    if on_cpu:
        return [
            Probe("fsdp.reshard", sharded, [["default", "never"]], metric="peak_allocated_bytes"),
            Probe("threads", sharded, [["1", "2"]]),
        ]
    connections = [["unset", "1", "8", "32"], ["unset", "1", "32"], ["unset", "1"]]
    found = [
        Probe("max_connections", sharded, connections),
        Probe("record_streams", sharded, [["references", "record_stream"]], model=COLLECTIVES),
        Probe("record_streams", sharded, [["unset", "0", "1"]], known_ahead=True),
        Probe("fsdp.reduce_scatter_group", sharded, [["shared", "separate"]]),
        Probe("fsdp.reshard", sharded, [["default", "never"]]),
        Probe("alloc_conf.expandable_segments", sharded, [["unset", "True"]], metric="peak_reserved_bytes"),
    ]
    return found + ([Probe("max_connections", mixed, connections)] if mixed else [])


def least_pairs(arms: int, metric: str | None) -> int:
    """Pairs without which no verdict but `no difference` is possible: the exact test of n pairs reaches p = 2·2⁻ⁿ at
    best, which has to be below 5 % over the comparisons (Bonferroni). Peaks that repeat to the byte need no test."""
    if metric in ("peak_allocated_bytes", "peak_reserved_bytes"):
        return EXACT_PAIRS
    return max(MIN_PAIRS, math.ceil(1 + math.log2((arms - 1) / 0.05)))
