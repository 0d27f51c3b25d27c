"""The training loop, with every phase visible to the recorder."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from harness import config
from harness.config_json import to_dict
from harness.pipeline.plan import plan
from harness.recording import MODE_VARIABLE, Mode
from harness.trainer.build import build_on_meta
from harness.trainer.checkpoint import Checkpointer, agree_on_checkpoint
from harness.trainer.chunked_loss import ChunkedLoss
from harness.trainer.context_parallel import ContextParallel
from harness.trainer.data import build_batches
from harness.trainer.float8 import NO_PEAK
from harness.trainer.fully_sharded import reduce_scatter_groups
from harness.trainer.initialise import initialise
from harness.trainer.legacy_streams import collective_memory
from harness.trainer.loss import IGNORE_INDEX
from harness.trainer.model.decoder import Decoder
from harness.trainer.optimizer import build_optimizer, clip_grad_norm_
from harness.trainer.parallel_dims import DATA_AXES, ParallelDims, axis_group, axis_ranks
from harness.trainer.pipeline import Pipeline
from harness.trainer.tied_ends import TiedEnds
from harness.validation import validate_device, validate_inputs, validate_rehearsal

if TYPE_CHECKING:
    from harness.record.recorder import Recorder


class Trainer(config.Trainer):
    """One rank of a run: meta model → its stages → float8 → tensor and context parallel → activation checkpointing →
    FSDP2 → materialise → initialise → optimizer → steps.

    Reads torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK); without it, it is the only rank. With
    MESHSCOPE_MODE=rehearsal it is that rank of a world whose other ranks are not there: every step allocates what it
    would among them, and its losses, gradients and norms mean nothing. Raises `UsageError` and `InputError` as
    `harness.validation` does.
    """

    def __init__(self, config: config.Trainer.Config, directory: Path) -> None:
        self.config = config
        self.directory = directory
        self.device, self.mode = device_and_mode(config)
        if config.training.deterministic:
            use_deterministic_kernels()
        self.dims = ParallelDims.from_config(config)
        self.plan = plan(config) if self.dims.pp > 1 else None
        self.pipeline: Pipeline | None = None
        self.chunked_loss: ChunkedLoss | None = None
        self.tied_ends: TiedEnds | None = None

    def train(self) -> list[float]:
        """Trains up to `training.steps` steps, from where a loaded checkpoint stands, into a recording at `directory`;
        returns the global loss of every step."""
        training, load = self.config.training, self.config.checkpoint.load
        rehearses = self.mode == "rehearsal"
        joined = rehearsed_group() if rehearses else process_group(self.device, training.init_timeout_s)
        with joined, controlled_gc(training.gc_interval), collective_memory(training.collective_memory):
            self.mesh = self.dims.build_mesh(self.device.type)
            self.data_groups = [group for axis in DATA_AXES if (group := axis_group(self.mesh, axis)) is not None]
            self.tp_group = axis_group(self.mesh, "tp")
            context = self.dims.context_group(self.mesh)
            self.context = None if context is None else ContextParallel.of(self.config, context)
            loaded = None if load is None else agree_on_checkpoint(Path(load))
            first = loaded[1].step if loaded else 0
            windows = self.config.recorder
            # A trace of a rehearsal would show a step without its communication.
            trace = config.Window() if rehearses else windows.trace.after(first)
            recorder = replace(windows, trace=trace, memory=windows.memory.after(first)).build(
                self.directory,
                first_step=first,
                device=self.device,
                run_config=to_dict(self.config),
                mesh=axis_ranks(self.mesh, context),
                mode=self.mode,
                tokens_per_step=self.config.tokens_per_step,
                flops_per_token=self.config.model.flops_per_token(training.seq_len),
                devices_per_token=self.dims.tp * self.dims.cp * self.dims.pp,
                no_peak=None if self.config.float8.recipe == "none" else NO_PEAK,
            )
            dp_rank, dp_size = self.dims.data_rank(self.mesh), self.dims.dp_replicate * self.dims.dp_shard
            with (
                ExitStack() as ending,
                recorder,
                closing(build_batches(self.config, dp_rank=dp_rank, dp_size=dp_size)) as self.batches,
                abandoned_collectives(self.device),
            ):
                with recorder.category("parameter"):
                    self.model = self._build_model(recorder)
                self.optimizer = build_optimizer(self.config.optimizer, self.model.parameters(), self.device)
                recorder.watch(self.model, self.optimizer)
                checkpoints = Checkpointer(
                    self.config.checkpoint,
                    self.directory,
                    mesh=self.mesh,
                    model=self.model,
                    optimizer=self.optimizer,
                    batches=self.batches,
                    tied_ends=self.tied_ends,
                )
                ending.callback(checkpoints.close)  # once the recorder has written what it has
                if loaded:
                    with recorder.category("optimizer_state"):
                        checkpoints.load(*loaded)
                losses: list[torch.Tensor] = []
                for step in range(first, training.steps):
                    saves = checkpoints.is_due(step + 1, training.steps)
                    tags = ["checkpoint"] if saves or checkpoints.is_saving() else []
                    losses.append(self._step(step, recorder, tags))
                    if self.compiled.has_news():
                        recorder.about(compile=self.compiled.facts())
                    # Compilation and connections are done: what takes long from here on hangs.
                    if step == first and not rehearses:
                        set_timeouts(self.mesh, context, training.train_timeout_s)
                    if saves:
                        checkpoints.save(step + 1)
                checkpoints.wait()
                return [loss.item() for loss in losses]

    def _build_model(self, recorder: Recorder) -> Decoder:
        """The model, or of a pipeline what this rank holds of it, whose stages then share its modules."""
        training = self.config.training
        built = build_on_meta(self.config, self.mesh, self.device, plan=self.plan, context=self.context)
        model, self.compiled = built.model, built.compiled
        self.loss = self.compiled.loss()
        if built.float8 is not None:
            recorder.about(float8=built.float8)
        model.to_empty(device="cpu" if training.cpu_offload else self.device)
        model.tie_embeddings()
        initialise(model, training.seed, self.device)
        if self.plan is not None:
            if self.config.tied_across_stages:
                self.tied_ends = TiedEnds(model, self.plan, self.mesh)
            self.pipeline = Pipeline(
                self.plan, model, built.roots, self.config, self.mesh, self.device, recorder, self.loss
            )
        elif training.loss_chunks > 1:
            self.chunked_loss = ChunkedLoss(self.config, model, self.tp_group, recorder, self.loss)
        return model

    def _step(self, step: int, recorder: Recorder, tags: list[str]) -> torch.Tensor:
        """One optimizer step; returns the loss averaged over the valid tokens of all ranks and micro-batches, still
        on the device: reading it here would make the host wait for every step."""
        training = self.config.training
        collects = training.gc_interval > 0 and step > 0 and step % training.gc_interval == 0
        with recorder.step(tags=[*tags, *(["gc"] if collects else [])]):
            if collects:
                gc.collect(1)
            batches = [self._next_batch() for _ in range(training.accumulation_steps)]
            self.optimizer.zero_grad(set_to_none=True)
            self.compiled.start_step()
            valid = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in batches]).sum()
            self._sum_over_data(valid)

            total = torch.zeros((), device=self.device)
            for left, (tokens, labels) in zip(reversed(range(len(batches))), batches, strict=True):
                total += self._micro_batch(tokens, labels, valid, recorder, is_last=left == 0)
            with recorder.phase("optimizer"):
                copies = self.tied_ends.copies if self.tied_ends is not None else ()
                if self.tied_ends is not None:
                    self.tied_ends.add_up_gradients()
                grad_norm = clip_grad_norm_(self.model.parameters(), training.max_norm, self.mesh, copies=copies)
                lr = self.config.optimizer.lr_at(step, training.steps)
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                self.optimizer.step()

            self._sum_over_data(total)
            if (stages := axis_group(self.mesh, "pp")) is not None:  # only the last one has a loss
                dist.all_reduce(total, group=stages)
            recorder.log(loss=total, grad_norm=grad_norm, lr=lr)
        return total

    def _micro_batch(
        self, tokens: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor, recorder: Recorder, *, is_last: bool
    ) -> torch.Tensor:
        """Forward and backward, of a pipeline those of a whole pass; returns this rank's part of the loss, detached."""
        if self.pipeline is not None:
            return self.pipeline.run(tokens, labels, valid)
        reduces = is_last or self.config.training.reduce_every_micro_batch
        cast(FSDPModule, self.model).set_requires_gradient_sync(reduces)
        if self.chunked_loss is not None:
            return self.chunked_loss.run(tokens, labels, valid, reduces=reduces)
        with recorder.phase("forward"):
            # No name is kept for the logits: they must not outlive what backward needs of them.
            loss = self.loss(self.model(tokens), labels, self.tp_group) / valid
        with recorder.phase("backward"):
            loss.backward()
        return loss.detach()

    def _sum_over_data(self, value: torch.Tensor) -> None:
        """Adds up a 0-d tensor over all ranks that see different tokens, one axis after the other."""
        for group in self.data_groups:
            dist.all_reduce(value, group=group)

    def _next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's tokens and labels, int64 [micro_batch, seq], of a pipeline all micro-batches of a pass; of seq
        under context parallelism its part. Ranks of the same `tp` and `pp` groups share them."""
        tokens, labels = self.batches.next_batch()
        if self.model.positions is not None:
            tokens, labels = tokens[:, self.model.positions], labels[:, self.model.positions]
        return tokens.to(self.device), labels.to(self.device)


def device_and_mode(config: config.Trainer.Config) -> tuple[torch.device, Mode | None]:
    """Where this rank runs, once it is sure that `config` can run there. Raises as `harness.validation` does."""
    config.validate()
    validate_inputs(config)
    device = local_device(config.training.device)
    validate_device(config, device.type)
    mode = mode_here(device)
    if mode == "rehearsal":
        validate_rehearsal(config)
    return device, mode


def local_device(wanted: str) -> torch.device:
    """This rank's device: a GPU by LOCAL_RANK (several ranks share one where there are fewer), or the CPU."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def mode_here(device: torch.device) -> Mode | None:
    """The mode a launcher says, else shared-gpu where other ranks run on the same GPU, since its times are not a
    cluster's and figures must say so; None where the device tells it."""
    launched = os.environ.get(MODE_VARIABLE)
    if launched == "rehearsal":
        return "rehearsal"
    shares = device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()
    return "shared-gpu" if shares else None


@contextmanager
def rehearsed_group() -> Iterator[None]:
    """RANK of WORLD_SIZE in a default group that reaches nobody: its collectives return at once, with wrong values
    (torch/csrc/distributed/c10d/FakeProcessGroup.hpp), and the groups of a mesh on it are of the same kind."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # the import registers the backend

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def process_group(device: torch.device, timeout_s: int) -> Iterator[None]:
    """The default group: NCCL on GPUs, gloo on CPUs, of torchrun's ranks or of this process alone."""
    alone = "RANK" not in os.environ
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
        store=dist.HashStore() if alone else None,  # type: ignore[attr-defined]
        rank=0 if alone else -1,
        world_size=1 if alone else -1,
    )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def abandoned_collectives(device: torch.device) -> Iterator[None]:
    """After an exception the device still waits in NCCL for peers that wait for this rank: nothing recorded on it could
    be written, nor the process end. Inside the recorder, this ends every group first."""
    try:
        yield
    except BaseException:  # SIGTERM and Ctrl-C, too, leave the device waiting; whatever it is goes on up
        if device.type == "cuda" and dist.is_initialized() and "nccl" in dist.get_backend_config():
            # torch up to 2.13 has no public way. If it fails, the exception that led here is still the one to tell.
            with suppress(RuntimeError):
                torch.distributed.distributed_c10d._abort_process_group()
        raise


def set_timeouts(mesh: DeviceMesh, context: dist.ProcessGroup | None, seconds: int) -> None:
    """From now on a collective of any group that hangs this long ends the run."""
    groups = [group for axis in mesh.mesh_dim_names or () if (group := axis_group(mesh, axis)) is not None]
    for group in [dist.group.WORLD, *groups, *([context] if context else []), *reduce_scatter_groups()]:
        # torch up to 2.13 has no public way; dist.set_timeout comes later.
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def use_deterministic_kernels() -> None:
    """Makes every kernel deterministic, or an error where torch has none; cuBLAS needs its workspace fixed for it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory would add kernels to every step, and nothing here reads what it did not write.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def controlled_gc(interval: int) -> Iterator[None]:
    """Keeps Python's garbage collector from stopping ranks one after the other at random; see `Training.Config`."""
    if interval == 0:
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
