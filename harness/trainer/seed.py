"""The initial weights of a model as a checkpoint that every layout begins with, bit for bit the same."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from harness import config
from harness.checkpoints import Header, checkpoint_path
from harness.trainer.checkpoint_writer import CheckpointWriter, one_line
from harness.trainer.initialise import initialise


def write_seed_checkpoint(config: config.Trainer.Config, directory: Path) -> Path:
    """Writes the checkpoint of step 0 of `config.model` and `config.training.seed` under `directory`, as a recording
    would hold it, and returns its folder.

    In this process alone, on its CPU: the whole model in float32, without layout, optimizer or data. Runs that do not
    load it compute the same weights themselves, each rank its shard; on a GPU, or with another torch, the last bits may
    differ.

    Raises `InputError` if it cannot be written.
    """
    with torch.device("meta"):
        model = config.model.build(seq_len=config.training.seq_len)
    model.to_empty(device="cpu")
    model.tie_embeddings()
    initialise(model, config.training.seed)
    header = Header(
        step=0,
        data=None,
        model=config.model,
        world_size=1,
        mesh={},
        torch=str(torch.__version__),
        saved_unix_ns=time.time_ns(),
    )
    final = checkpoint_path(directory, 0)
    writer = CheckpointWriter(final, header)
    try:
        with one_line(writer.partial, "cannot be written"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant to be
            dcp_save({"model": dict(model.named_parameters())}, storage_writer=writer, no_dist=True)
    finally:
        writer.close()
    return final
