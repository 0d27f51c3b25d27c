"""Which configurations can run at all; everything here is decided before a process starts. Free of torch."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from harness.checkpoints import find_checkpoint, read_header
from harness.compilation import require_compilation, require_compilation_on
from harness.config import Decoder, Parallelism, Trainer
from harness.context_parallel import chunks as chunks_of_rank
from harness.errors import UsageError
from harness.float8 import require_float8, require_float8_on
from harness.limits import require_possible
from harness.pipeline.requirements import require_pipeline, splits_backward
from harness.workloads.config import WorkloadName

TEXT_TOKENS = 258
"""Of the byte-level tokenizer: 256 bytes, and one each for the beginning and the end of a document."""

POSITIVE_TRAINING = (
    "steps",
    "micro_batch_size",
    "accumulation_steps",
    "loss_chunks",
    "seq_len",
    "init_timeout_s",
    "train_timeout_s",
)

USED_BY: dict[WorkloadName, tuple[str, ...]] = {
    "training": (
        "model",
        "parallelism",
        "activation_checkpoint",
        "compile",
        "float8",
        "optimizer",
        "data",
        "checkpoint",
    ),
    "collectives": ("collectives",),
    "point_to_point": ("point_to_point",),
}
"""The parts of a configuration that only one workload reads."""


def validate(config: Trainer.Config) -> None:
    """Raises `UsageError`, one line that says what to change, for a configuration that cannot run."""
    require_possible(config)
    _validate_workload(config)
    model, layout, training = config.model, config.parallelism, config.training
    positive = {
        "world_size": config.world_size,
        **{
            f"model.{n}": getattr(model, n)
            for n in _names(Decoder.Config)
            if n not in ("norm_eps", "rope_theta", "tied_embeddings")
        },
        **{f"parallelism.{n}": getattr(layout, n) for n in ("dp_replicate", "cp", "tp", "pp")},
        **{f"training.{n}": getattr(training, n) for n in POSITIVE_TRAINING},
        "activation_checkpoint.every": config.activation_checkpoint.every,
        "checkpoint.keep": config.checkpoint.keep,
        "checkpoint.timeout_s": config.checkpoint.timeout_s,
        "recorder.max_history_entries": config.recorder.max_history_entries,
    }
    for name, value in positive.items():
        _require(value >= 1, f"{name}={value} must be at least 1")
    _require(
        layout.dp_shard >= 1 or layout.dp_shard == -1,
        f"parallelism.dp_shard={layout.dp_shard} must be at least 1, or -1",
    )
    others = layout.dp_replicate * layout.cp * layout.tp * layout.pp
    if layout.dp_shard == -1:
        _require(
            config.world_size % others == 0,
            f"world_size={config.world_size} is not divisible by parallelism.{_degrees(layout)}: "
            f"use a multiple of {others} processes, or degrees that divide {config.world_size}",
        )
    else:
        product = others * layout.dp_shard
        _require(
            config.world_size == product,
            f"parallelism.dp_shard={layout.dp_shard} × {_degrees(layout)} needs {product} processes, "
            f"world_size={config.world_size}: set world_size (--nproc) to {product} or parallelism.dp_shard to -1",
        )

    _require_an_effect(config)
    require_pipeline(config)
    _require_checkpointing(config)
    _require_chunks(config)
    require_compilation(config)
    require_float8(config)
    tp = layout.tp
    _require(
        model.dim % model.n_heads == 0,
        f"model.dim={model.dim} is not divisible by model.n_heads={model.n_heads}",
    )
    _require(
        model.head_dim % 2 == 0,
        f"model.dim/model.n_heads={model.head_dim} must be even for rotary embeddings",
    )
    _require(
        model.n_heads % model.n_kv_heads == 0,
        f"model.n_heads={model.n_heads} is not divisible by model.n_kv_heads={model.n_kv_heads}",
    )
    for name in ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size"):
        value = getattr(model, name)
        _require(
            value % tp == 0,
            f"model.{name}={value} is not divisible by parallelism.tp={tp}: use a tp that divides it",
        )
    _require_divisible_sequence(config)
    _require(
        0 <= config.data.ignored_share < 1,
        f"data.ignored_share={config.data.ignored_share} must be in [0, 1)",
    )
    _require(training.max_norm > 0, f"training.max_norm={training.max_norm} must be above 0")
    _require(config.optimizer.lr >= 0, f"optimizer.lr={config.optimizer.lr} must not be negative")
    _require(
        0 <= config.optimizer.min_lr_factor <= 1,
        f"optimizer.min_lr_factor={config.optimizer.min_lr_factor} must be in [0, 1]",
    )
    for name, value in {
        "optimizer.warmup_steps": config.optimizer.warmup_steps,
        "training.gc_interval": training.gc_interval,
        "checkpoint.interval": config.checkpoint.interval,
    }.items():
        _require(value >= 0, f"{name}={value} must not be negative")
    _require(
        config.data.dataset != "text" or model.vocab_size >= TEXT_TOKENS,
        f"model.vocab_size={model.vocab_size} must be at least {TEXT_TOKENS} for data.dataset=text: "
        "256 bytes, one token before and one after a document",
    )
    _require(
        config.data.dataset == "text" or config.data.path is None,
        f"data.path={config.data.path} is read with data.dataset=text only: set --data.dataset text, or leave it out",
    )
    _require(
        config.checkpoint.interval > 0 or not config.checkpoint.asynchronous,
        "checkpoint.asynchronous=true has no effect with checkpoint.interval=0, which saves nothing: set the interval",
    )
    for name in ("trace", "memory"):
        window = getattr(config.recorder, name)
        _require(window.start >= 0 and window.steps >= 0, f"recorder.{name}: start and steps must not be negative")


GATHERED_BY_SCHEDULE = ("fsdp_prefetch", "fsdp_async_unshard")
"""What torch.distributed.pipelining decides itself (schedules.py, UNSHARD)."""


def _require_an_effect(config: Trainer.Config) -> None:
    """A setting of communication that the layout does not have would change nothing, silently."""
    layout, usual = config.parallelism, Parallelism.Config()
    _require(
        layout.fsdp_prefetch == "default" or layout.fsdp_prefetch >= 0,
        f"parallelism.fsdp_prefetch={layout.fsdp_prefetch} must be a number of units, 0 or above, or default",
    )
    for name, axis, degree in (
        ("fsdp_prefetch", "dp_shard", config.fsdp_shards),
        ("fsdp_async_unshard", "dp_shard", config.fsdp_shards),
        ("fsdp_reduce_scatter_group", "dp_shard", config.fsdp_shards),
        ("cp_attention", "cp", layout.cp),
        ("cp_load_balance", "cp", layout.cp),
        ("tp_async", "tp", layout.tp),
    ):
        value, default = getattr(layout, name), getattr(usual, name)
        _require(
            value == default or degree > 1,
            f"parallelism.{name}={value} has no effect with parallelism.{axis}={degree}, which has nothing to "
            f"communicate: leave it at {default}, or raise {axis}",
        )
        _require(
            value == default or layout.pp == 1 or name not in GATHERED_BY_SCHEDULE,
            f"parallelism.{name}={value} has no effect with parallelism.pp={layout.pp}, whose schedule gathers each "
            f"stage whole and asynchronously: leave it at {default}",
        )


def _require_divisible_sequence(config: Trainer.Config) -> None:
    """Every chunk of a sequence has equally many tokens, on every rank."""
    layout, seq_len = config.parallelism, config.training.seq_len
    parts, names, tip = 1, [], ""
    if layout.cp > 1:
        chunks = len(chunks_of_rank(0, layout.cp, layout.cp_load_balance))
        parts, names = layout.cp * chunks, [f"parallelism.cp={layout.cp} × {chunks} chunks"]
    if layout.tp > 1 and layout.sequence_parallel:
        tip = " or set parallelism.sequence_parallel to false" if seq_len % parts == 0 else ""
        parts, names = parts * layout.tp, [*names, f"parallelism.tp={layout.tp} (sequence parallel)"]
    _require(
        seq_len % parts == 0,
        f"training.seq_len={seq_len} is not divisible by {' × '.join(names)}: use a multiple of {parts}{tip}",
    )


def _require_checkpointing(config: Trainer.Config) -> None:
    mode, every = config.activation_checkpoint.mode, config.activation_checkpoint.every
    _require(
        every == 1 or mode != "none",
        f"activation_checkpoint.every={every} has no effect with activation_checkpoint.mode=none: set the mode, or "
        "leave it at 1",
    )
    layers = config.model.n_layers
    _require(
        every <= layers,
        f"activation_checkpoint.every={every}: none of model.n_layers={layers} layers would be the last of so many; "
        f"use at most {layers}",
    )
    _require(
        mode == "none" or not splits_backward(config),
        f"activation_checkpoint.mode={mode}: the schedule has backward in two parts, for inputs and for weights, "
        "and a layer is computed again for one only: use a schedule with whole backwards, such as 1F1B or "
        "Interleaved1F1B, or none",
    )


def _require_chunks(config: Trainer.Config) -> None:
    """The loss in chunks, and gradients that are reduced with the last micro-batch only."""
    training, layout = config.training, config.parallelism
    chunks = training.loss_chunks
    _require(
        chunks == 1 or layout.pp == 1,
        f"training.loss_chunks={chunks}: a pipeline (parallelism.pp={layout.pp}) has its last stage compute the loss "
        "of a micro-batch whole; set it to 1",
    )
    parts = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    _require(
        chunks == 1 or training.seq_len % (parts * chunks) == 0,
        f"training.seq_len={training.seq_len}: what a rank has of a sequence, 1/{parts}, is not divisible by "
        f"training.loss_chunks={chunks}: use a multiple of {parts * chunks}",
    )
    passes = training.accumulation_steps
    _require(
        training.reduce_every_micro_batch or (passes > 1 and layout.pp == 1 and config.world_size > layout.tp),
        f"training.reduce_every_micro_batch=false has no effect with training.accumulation_steps={passes}, "
        f"parallelism.pp={layout.pp} and {config.world_size // (layout.tp * layout.pp)} data-parallel ranks: it is "
        "about several micro-batches, without a pipeline, on several such ranks",
    )


def _validate_workload(config: Trainer.Config) -> None:
    workload, loop, line = config.workload, config.collectives, config.point_to_point
    for other in USED_BY.keys() - {workload}:
        for name in USED_BY[other]:
            _require(
                getattr(config, name) == getattr(Trainer.Config(), name),
                f"{name}: nothing of it acts on workload={workload}: leave it at its default",
            )
    _require(
        workload == "training" or not config.training.cpu_offload,
        f"training.cpu_offload=true: workload={workload} has no parameters to keep in host memory; leave it out",
    )
    for name, value in {
        **{f"collectives.{n}": getattr(loop, n) for n in ("iterations", "rows", "dim")},
        **{f"point_to_point.{n}": getattr(line, n) for n in ("sends", "activation_mib")},
    }.items():
        _require(value >= 1, f"{name}={value} must be at least 1")
    _require(
        loop.async_op or loop.api == "c10d",
        "collectives.async_op=false is for collectives.api=c10d: functional collectives are asynchronous",
    )
    if workload == "point_to_point":
        _require(config.world_size >= 2, f"world_size={config.world_size}: point_to_point sends from rank to rank")
        _require(
            config.training.collective_memory == "references",
            f"training.collective_memory={config.training.collective_memory} does not act on point_to_point, "
            "which torch records on streams in any case: leave it out",
        )


def validate_device(config: Trainer.Config, device: str) -> None:
    """Raises `UsageError` for what does nothing on `device`, cuda or cpu, once that is known, and `UnavailableError`
    for a package that is missing here."""
    policy = config.training.collective_memory
    _require(
        device == "cuda" or policy == "references",
        f"training.collective_memory={policy} needs CUDA: on CPUs no allocator waits for streams; leave it out",
    )
    require_offload_on(config, device)
    require_float8_on(config, device)
    require_compilation_on(config, device)


def require_offload_on(config: Trainer.Config, device: str) -> None:
    """Raises `UsageError` on CPUs, also where nothing is run and so nothing else is asked of the machine."""
    _require(
        device == "cuda" or not config.training.cpu_offload,
        "training.cpu_offload=true needs CUDA: on CPUs parameters are in host memory already; leave it out",
    )


def validate_rehearsal(config: Trainer.Config) -> None:
    """Raises `UsageError` for what needs other ranks, or the values of a training, which a rehearsal does not have."""
    _require(
        config.workload == "training",
        f"workload={config.workload}: mode rehearsal sends nothing, and a workload does nothing else",
    )
    policy = config.training.collective_memory
    _require(
        policy == "references",
        f"training.collective_memory={policy}: mode rehearsal sends nothing that memory could wait for; leave it out",
    )
    interval, load = config.checkpoint.interval, config.checkpoint.load
    _require(interval == 0, f"checkpoint.interval={interval}: mode rehearsal trains nothing to save; set it to 0")
    _require(load is None, f"checkpoint.load={load}: mode rehearsal has no ranks to load it with; leave it out")


def validate_inputs(config: Trainer.Config) -> None:
    """Raises `UsageError` if a file that the run starts from is not there, `InputError` if it cannot be read.

    Apart from `validate`, which also serves those who only look at the configuration of a run of long ago.
    """
    data, steps = config.data, config.training.steps
    if data.dataset == "text":
        _require(
            data.path is not None,
            'data.dataset=text needs --data.path FILE, one JSON object like {"text": "…"} per line',
        )
        path = Path(str(data.path))
        _require(path.exists(), f"data.path={path}: there is no such file (seen from {Path.cwd()})")
        _require(path.is_file(), f"data.path={path} is not a file: give one with a JSON object per line")
        _require(os.access(path, os.R_OK), f"data.path={path} cannot be read: permission denied")
        _require(path.stat().st_size > 0, f"data.path={path} is empty")
    if config.checkpoint.load is not None:
        checkpoint = find_checkpoint(Path(config.checkpoint.load))
        step = read_header(checkpoint).step
        _require(
            step < steps,
            f"checkpoint.load={checkpoint} is at step {step}, training.steps={steps}: set it above {step} to go on",
        )


def _degrees(layout: Parallelism.Config) -> str:
    """The degrees a user set besides dp_shard: tp always, others where they are larger than 1."""
    names = [name for name in ("dp_replicate", "cp", "pp") if getattr(layout, name) > 1]
    return " × ".join(f"{name}={getattr(layout, name)}" for name in [*names, "tp"])


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message)


def _names(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]
