"""The part of a run's configuration that is about its pipeline (see `harness.config`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


class Pipeline:
    """How the model is cut into stages and in which order micro-batches pass them (parallelism.pp > 1)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        schedule: ScheduleName = "1F1B"
        micro_batches: int | None = None
        """Forwards of `training.micro_batch_size` sequences in one pass of the schedule, which reduces gradients once
        at its end; `training.accumulation_steps` is how many passes an optimizer step makes. None: as many as
        stages."""
        stages_per_rank: int | None = None
        """None: what the schedule takes, 2 where it takes several."""
        first_stage_less_layers: int = 1
        """The stage with the embedding gets so many layers fewer than an even share; likewise the last, with head."""
        last_stage_less_layers: int = 1
        split: list[list[str]] | None = None
        """Names of the modules of each stage, such as [["tok_embeddings", "layers.0"], ["layers.1", "norm",
        "lm_head"]], instead of an even share."""
        csv: str | None = None
        """File with the actions of each pipeline rank as one row, instead of `schedule`."""
        table: str | None = None
        """The text of that file, read when a run is configured, so that the run does not depend on it later."""
