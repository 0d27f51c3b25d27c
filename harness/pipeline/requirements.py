"""Which pipelines a configuration can have, and the schedule of a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from harness.config import Trainer
from harness.errors import UsageError
from harness.pipeline.actions import each_step
from harness.pipeline.config import Pipeline
from harness.pipeline.plan import plan

MOST_MICRO_BATCHES = 10_000
LEAST = {"micro_batches": 1, "stages_per_rank": 1, "first_stage_less_layers": 0, "last_stage_less_layers": 0}


def with_table(config: Trainer.Config) -> Trainer.Config:
    """The configuration with the text of `pipeline.csv` in it; raises `UsageError` if that cannot be read."""
    pipeline = config.pipeline
    if pipeline.csv is None or pipeline.table is not None:
        return config
    path = Path(pipeline.csv)
    try:
        if path.exists() and not path.is_file():  # a pipe or a device has no end
            raise UsageError(f"pipeline.csv={path} is not a file: name one with a row for each pipeline rank")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"pipeline.csv={pipeline.csv} cannot be read: {error.strerror}") from None
    except ValueError:  # a zero byte in its name, or not UTF-8
        raise UsageError(f"pipeline.csv={pipeline.csv} is not text") from None
    return dataclasses.replace(config, pipeline=dataclasses.replace(pipeline, table=text))


def require_pipeline(config: Trainer.Config) -> None:
    """Raises `UsageError` for a pipeline that cannot run, and for settings of one that the layout does not have."""
    pipeline, layout = config.pipeline, config.parallelism
    if layout.pp == 1:
        for field in dataclasses.fields(Pipeline.Config):
            value = getattr(pipeline, field.name)
            if value != field.default:
                shown = "" if field.name == "table" else f"={value}"
                raise UsageError(
                    f"pipeline.{field.name}{shown} has no effect with parallelism.pp=1: raise pp, or leave it out"
                )
        return
    for name, least in LEAST.items():
        value = getattr(pipeline, name)
        if value is not None and value < least:
            raise UsageError(f"pipeline.{name}={value} must be at least {least}")
    if (pipeline.micro_batches or 0) > MOST_MICRO_BATCHES:
        raise UsageError(f"pipeline.micro_batches={pipeline.micro_batches} must be at most {MOST_MICRO_BATCHES:,}")
    parts = layout.tp * config.fsdp_shards
    if config.model.tied_embeddings and config.model.vocab_size % parts:
        raise UsageError(
            f"model.vocab_size={config.model.vocab_size} with model.tied_embeddings and parallelism.pp={layout.pp}: "
            "the first and the last stage exchange gradients of equal parts of the matrix; use a multiple of "
            f"{parts} (tp × {config.fsdp_axis})"
        )
    if layout.reshard_after_forward == "always":  # torch finds no gradients of weights that are freed before an I
        raise UsageError(
            f"parallelism.reshard_after_forward=always with parallelism.pp={layout.pp}: a stage stays gathered from "
            "one micro-batch to the next, until its schedule frees it; set it to default"
        )
    if pipeline.csv is None or pipeline.table is not None:  # else the file is still to be read
        plan(config)


def splits_backward(config: Trainer.Config) -> bool:
    """The schedule has backward in two parts, for inputs and for weights."""
    if config.parallelism.pp == 1:
        return False
    return any(action.kind in ("I", "W") for row in plan(config).actions for action in each_step(row))
