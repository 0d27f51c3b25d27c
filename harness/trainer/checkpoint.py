"""Saving and loading a training run through torch.distributed.checkpoint (DCP), by parameter name.

Names and global shapes are those of the whole model, so what one layout saved, any other loads: DCP reads for each
rank the parts that its shards need. A parameter that two modules share (tied embeddings) is stored once.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh

from harness import config
from harness.checkpoints import (
    PARTIAL_SUFFIX,
    Header,
    checkpoint_path,
    complete_checkpoints,
    find_checkpoint,
    header_path,
    partial_checkpoints,
    read_header,
)
from harness.errors import InputError, UsageError
from harness.recording import write_json
from harness.trainer.data import Batches
from harness.trainer.model.decoder import Decoder


def agree_on_checkpoint(path: Path) -> tuple[Path, Header]:
    """`find_checkpoint` as rank 0 sees it, so that no rank picks a later one of a recording that still grows."""
    found = [find_checkpoint(path) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    checkpoint = found[0]
    assert checkpoint is not None
    return checkpoint, read_header(checkpoint)


class Checkpointer:
    """Saves into the recording at `directory` and loads from any; all ranks make every call together."""

    def __init__(
        self,
        config: config.Checkpoint.Config,
        directory: Path,
        *,
        mesh: DeviceMesh,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
    ) -> None:
        self._config = config
        self._directory = directory
        self._mesh = mesh
        self._model = model
        self._optimizer = optimizer
        self._batches = batches

    def is_due(self, completed_steps: int, steps: int) -> bool:
        """Every `interval` steps, and after the last one."""
        interval = self._config.interval
        return interval > 0 and (completed_steps % interval == 0 or completed_steps == steps)

    def save(self, completed_steps: int) -> None:
        """Returns once the checkpoint is complete on every rank and those beyond `keep` are gone.

        Raises `InputError` if it cannot be written; earlier ones are then as they were.
        """
        final = checkpoint_path(self._directory, completed_steps)
        partial = final.with_name(final.name + PARTIAL_SUFFIX)
        started_ns = time.perf_counter_ns()
        leads = dist.get_rank() == 0
        try:
            with _locked(partial) if leads else nullcontext():
                with _one_line(partial, "cannot be written"):
                    dcp_save(self._tensors(), checkpoint_id=partial)
                if leads:  # all ranks have written and flushed their files
                    header = self._header(completed_steps, time.perf_counter_ns() - started_ns)
                    write_json(header_path(partial), msgspec.to_builtins(header))
                    _flush_folder(partial)
                    partial.rename(final)
                    _flush_folder(final.parent)
        except OSError as error:
            raise InputError(partial, f"cannot be written: {error.strerror}") from None
        if leads:
            for old in complete_checkpoints(final.parent)[: -self._config.keep]:
                abandoned = old.with_name(old.name + PARTIAL_SUFFIX)
                old.rename(abandoned)  # never a half-deleted one under a complete one's name
            remove_abandoned(final.parent)
        dist.barrier()  # else the other ranks' next step would begin with waiting for rank 0

    def load(self, checkpoint: Path, header: Header) -> None:
        """Overwrites parameters, optimizer states and data position, in place.

        Raises `UsageError` if it is of another model (the first tensor or field that differs) or data set,
        `InputError` if it cannot be read. As everywhere in torch, its non-tensor part is unpickled: load what you
        trust.
        """
        tensors = self._tensors()
        with _one_line(checkpoint, "cannot be read"):
            dcp_load(tensors, checkpoint_id=checkpoint, planner=_Planner(checkpoint, self._names_of_all(tensors)))
        for name, saved in msgspec.to_builtins(header.model).items():
            here = getattr(self._model.config, name)
            if here != saved:  # what no shape tells, such as the number of heads
                raise UsageError(f"checkpoint.load={checkpoint}: its model.{name} is {saved}, this model's is {here}")
        self._batches.load_state_dict(header.data)
        if dist.get_rank() == 0:
            remove_abandoned(checkpoint.parent)

    def _tensors(self) -> dict[str, Any]:
        """Parameters and optimizer states themselves, not copies. A new optimizer gets its states: torch makes a
        step of zero gradients at a learning rate of zero for it."""
        states = get_optimizer_state_dict(self._model, self._optimizer)["state"]
        return {"model": dict(self._model.named_parameters()), "optimizer": states}

    def _names_of_all(self, tensors: dict[str, Any]) -> set[str]:
        """The names of the tensors of all ranks: pipeline stages have different ones."""
        own = set(flatten_state_dict(tensors)[0])
        if "pp" not in (self._mesh.mesh_dim_names or ()):
            return own
        gathered: list[set[str]] = [own] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        return set().union(*gathered)

    def _header(self, completed_steps: int, save_ns: int) -> Header:
        return Header(
            step=completed_steps,
            data=self._batches.state_dict(),
            model=self._model.config,
            world_size=dist.get_world_size(),
            mesh={axis: self._mesh.size(dim) for dim, axis in enumerate(self._mesh.mesh_dim_names or ())},
            torch=str(torch.__version__),
            saved_unix_ns=time.time_ns(),
            save_ns=save_ns,
        )


class _Planner(DefaultLoadPlanner):
    """Says which tensor differs before anything is read; DCP itself takes a checkpoint of a larger model."""

    def __init__(self, checkpoint: Path, names_of_all: set[str]) -> None:
        super().__init__()
        self._checkpoint, self._names_of_all = checkpoint, names_of_all

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        saved = {
            name: list(entry.size) if isinstance(entry, TensorStorageMetadata) else None
            for name, entry in metadata.state_dict_metadata.items()
        }
        for name, tensor in self.state_dict.items():
            if name not in saved:
                raise UsageError(f"checkpoint.load={self._checkpoint}: this model has {name}, the checkpoint has not")
            if saved[name] != list(tensor.shape):
                raise UsageError(
                    f"checkpoint.load={self._checkpoint}: {name} is {saved[name]}, this model's is {list(tensor.shape)}"
                )
        for name in saved:
            if name not in self._names_of_all:
                raise UsageError(f"checkpoint.load={self._checkpoint}: it has {name}, this model has not")


@contextmanager
def _one_line(checkpoint: Path, what: str) -> Iterator[None]:
    """Turns DCP's exception, the tracebacks of all ranks, into the first rank's reason."""
    try:
        yield
    except CheckpointException as error:
        _, (reason, _) = min(error.failures.items())
        if isinstance(reason, UsageError):
            raise reason from None
        line = traceback.format_exception_only(reason)[-1].strip().splitlines()[0]
        raise InputError(checkpoint, f"{what}: {line}") from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Makes `folder` and holds a lock on it that the kernel lets go when this process dies, however it does."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: the folder is then never taken for abandoned
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def remove_abandoned(folder: Path) -> None:
    """Deletes half-written checkpoints whose writer is dead; what cannot be deleted stays, it is never loaded."""
    for partial in partial_checkpoints(folder):
        with suppress(OSError):
            descriptor = os.open(partial, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(partial, ignore_errors=True)
            finally:
                os.close(descriptor)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
