"""Saving and loading a training run through torch.distributed.checkpoint (DCP), by parameter name.

Names and global shapes are those of the whole model, so what one layout saved, any other loads: DCP reads for each
rank the parts that its shards need. A matrix that embedding and head share is stored once, under the embedding's name;
so is one that two stages of a pipeline have copies of.
"""

from __future__ import annotations

import time
from concurrent import futures
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh

from harness import config
from harness.checkpoints import Header, checkpoint_path, find_checkpoint, read_header
from harness.errors import UsageError
from harness.trainer.checkpoint_writer import CheckpointWriter, one_line, remove_abandoned
from harness.trainer.data import Batches
from harness.trainer.model.decoder import Decoder
from harness.trainer.tied_ends import TiedEnds, one_matrix


def agree_on_checkpoint(path: Path) -> tuple[Path, Header]:
    """`find_checkpoint` as rank 0 sees it, so that no rank picks a later one of a recording that still grows."""
    found = [find_checkpoint(path) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    checkpoint = found[0]
    assert checkpoint is not None
    return checkpoint, read_header(checkpoint)


class Checkpointer:
    """Saves into the recording at `directory` and loads from any; all ranks make every call together.

    Ranks wait for each other in a gloo group of their own, `checkpoint`: a slow disk of one is not a collective that
    hangs, and a save in the background gets into no collective of training.
    """

    def __init__(
        self,
        config: config.Checkpoint.Config,
        directory: Path,
        *,
        mesh: DeviceMesh,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        tied_ends: TiedEnds | None = None,
    ) -> None:
        self._config = config
        self._directory = directory
        self._mesh = mesh
        self._model = model
        self._optimizer = optimizer
        self._batches = batches
        self._tied_ends = tied_ends
        self._group: dist.ProcessGroup | None = None
        if config.interval or config.load is not None:
            timeout = timedelta(seconds=config.timeout_s)
            self._group = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoint")
        self._in_flight: tuple[Path, futures.Future[Metadata]] | None = None

    def is_due(self, completed_steps: int, steps: int) -> bool:
        """Every `interval` steps, and after the last one."""
        interval = self._config.interval
        return interval > 0 and (completed_steps % interval == 0 or completed_steps == steps)

    def is_saving(self) -> bool:
        """Whether a save goes on in the background; raises `InputError` if it has failed."""
        if self._in_flight is not None and self._in_flight[1].done():
            self.wait()
        return self._in_flight is not None

    def save(self, completed_steps: int) -> None:
        """Returns once the checkpoint is complete and those beyond `keep` are gone; an asynchronous one once the save
        before is, and what is saved now has been copied to host memory.

        Raises `InputError` if it, or the save before, cannot be written; earlier ones are then as they were.
        """
        self.wait()
        final = checkpoint_path(self._directory, completed_steps)
        writer = CheckpointWriter(final, self._header(completed_steps), keep=self._config.keep)
        tensors = self._tensors(with_optimizer=True)
        if self._config.asynchronous:
            self._in_flight = writer.partial, self._start(writer, tensors)
            return
        try:
            with one_line(writer.partial, "cannot be written"):
                dcp_save(tensors, storage_writer=writer, process_group=self._group)
        finally:
            writer.close()

    def wait(self) -> None:
        """For the save in the background, where there is one; raises `InputError` if it cannot be written."""
        if self._in_flight is None:
            return
        (partial, saved), self._in_flight = self._in_flight, None
        with one_line(partial, "cannot be written"):
            saved.result()

    def close(self) -> None:
        """Waits for a save that goes on behind a run that has failed; process groups must not end before it."""
        if self._in_flight is not None:
            futures.wait([self._in_flight[1]])

    def _start(self, writer: CheckpointWriter, tensors: dict[str, Any]) -> futures.Future[Metadata]:
        """Copies `tensors` and has a thread save the copies. Pinned memory would copy faster but is slow to get, and
        would have to be kept from save to save."""
        stager = DefaultStager(StagingOptions(False, False, False, False))
        future = dcp_async_save(tensors, storage_writer=writer, process_group=self._group, async_stager=stager)
        saved = cast("futures.Future[Metadata]", future)  # what it returns where staging is synchronous
        saved.add_done_callback(lambda _: writer.close())
        saved.add_done_callback(lambda _: stager.close())
        return saved

    def load(self, checkpoint: Path, header: Header) -> None:
        """Overwrites parameters, optimizer states and data position, in place; of a seed checkpoint parameters only.

        Raises `UsageError` if it is of another model (the first tensor or field that differs) or data set,
        `InputError` if it cannot be read. As everywhere in torch, its non-tensor part is unpickled: load what you
        trust.
        """
        tensors = self._tensors(with_optimizer=not header.is_seed)
        with one_line(checkpoint, "cannot be read"):
            planner = _Planner(checkpoint, self._names_of_all(tensors))
            dcp_load(tensors, checkpoint_id=checkpoint, planner=planner, process_group=self._group)
        if self._tied_ends is not None:
            self._tied_ends.copy_to_head(self._optimizer)
        for name, saved in msgspec.to_builtins(header.model).items():
            here = getattr(self._model.config, name)
            if here != saved:  # what no shape tells, such as the number of heads
                raise UsageError(f"checkpoint.load={checkpoint}: its model.{name} is {saved}, this model's is {here}")
        if header.data is not None:
            self._batches.load_state_dict(header.data)
        if dist.get_rank() == 0:
            remove_abandoned(checkpoint.parent)

    def _tensors(self, *, with_optimizer: bool) -> dict[str, Any]:
        """Parameters and optimizer states themselves, not copies. A new optimizer gets its states: torch makes a
        step of zero gradients at a learning rate of zero for it."""
        tensors: dict[str, Any] = {"model": dict(self._model.named_parameters())}
        if with_optimizer:
            tensors["optimizer"] = get_optimizer_state_dict(self._model, self._optimizer)["state"]
        if self._tied_ends is not None:
            return {part: one_matrix(of_name) for part, of_name in tensors.items()}
        return tensors

    def _names_of_all(self, tensors: dict[str, Any]) -> set[str]:
        """The names of the tensors of all ranks: pipeline stages have different ones."""
        own = set(flatten_state_dict(tensors)[0])
        if "pp" not in (self._mesh.mesh_dim_names or ()):
            return own
        gathered: list[set[str]] = [own] * dist.get_world_size()
        dist.all_gather_object(gathered, own, group=self._group)
        return set().union(*gathered)

    def _header(self, completed_steps: int) -> Header:
        return Header(
            step=completed_steps,
            data=self._batches.state_dict(),
            model=self._model.config,
            world_size=dist.get_world_size(),
            mesh={axis: self._mesh.size(dim) for dim, axis in enumerate(self._mesh.mesh_dim_names or ())},
            torch=str(torch.__version__),
            saved_unix_ns=time.time_ns(),
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
