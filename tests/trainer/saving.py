"""Small runs that save and load checkpoints, and what they left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from harness.config import (
    Checkpoint,
    Data,
    Decoder,
    Optimizer,
    Parallelism,
    Recorder,
    Trainer,
    Training,
    Window,
)
from harness.recording import read_recording

LAYOUTS = {
    "single": Parallelism.Config(dp_shard=1),
    "fsdp4": Parallelism.Config(dp_shard=4),
    "fsdp2_tp2": Parallelism.Config(dp_shard=2, tp=2),
    "hsdp2x2": Parallelism.Config(dp_replicate=2, dp_shard=2),
    "pp2_fsdp2": Parallelism.Config(pp=2, dp_shard=2),
    "pp2_tp2": Parallelism.Config(pp=2, dp_shard=1, tp=2),
    "cp2_tp2": Parallelism.Config(dp_shard=1, cp=2, tp=2),
    "pp2": Parallelism.Config(pp=2, dp_shard=1),
    "tp2": Parallelism.Config(dp_shard=1, tp=2),
    "tp4": Parallelism.Config(dp_shard=1, tp=4),
}
# Losses of float32 runs differ between layouts by the order of their sums.
LOSS_TOLERANCE = 2e-6


def configuration(
    documents: Path, layout: str = "single", *, steps: int, load: Path | None = None, interval: int = 2, keep: int = 2
) -> Trainer.Config:
    """8 sequences a step whatever the layout; no dimension of the model divides by 4, so that shards are uneven."""
    parallelism = LAYOUTS[layout]
    data_parallel = parallelism.dp_replicate * parallelism.dp_shard
    return Trainer.Config(
        name=layout,
        world_size=data_parallel * parallelism.cp * parallelism.tp * parallelism.pp,
        model=Decoder.Config(vocab_size=258, dim=36, n_layers=2, n_heads=6, n_kv_heads=2, ffn_dim=58),
        parallelism=parallelism,
        training=Training.Config(
            device="cpu",
            steps=steps,
            micro_batch_size=4 // data_parallel // parallelism.pp,  # a pipeline of 2 takes 2 micro-batches at a time
            accumulation_steps=2,
            seq_len=32,
            mixed_precision_param="float32",
        ),
        optimizer=Optimizer.Config(lr=1e-2),
        data=Data.Config(dataset="text", path=str(documents)),
        checkpoint=Checkpoint.Config(interval=interval, keep=keep, load=None if load is None else str(load)),
        recorder=Recorder.Config(trace=Window(steps=0), memory=Window(steps=0)),
    )


def losses_of(directory: Path, *, complete: bool = True) -> dict[int, float]:
    """Step -> loss, which all ranks must agree on; those of a killed run may have got further than others."""
    recording = read_recording(directory)
    series = [{row["step"]: row["loss"] for row in rows} for rows in recording.steps.values()]
    longest = max(series, key=len)
    for other in series:
        assert other.items() <= longest.items(), "ranks disagree on the global loss"
        assert not complete or len(other) == len(longest)
    return longest


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint, by name."""
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp_load(tensors, checkpoint_id=checkpoint, no_dist=True)
    return tensors
