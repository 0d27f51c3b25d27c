"""The configuration of a run: nested dataclasses, free of torch.

A run is a function that returns a `Trainer.Config` (see `harness.recipes`). Every component of the trainer has a
class here that owns its `Config`; `Config.build(...)` imports the implementation when it is called, and the
implementation subclasses the class here, so `Decoder.Config` is the same object with and without torch.
All sizes are per rank unless a field says global; byte sizes follow from dtypes, never from fields.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from harness.compilation import Compile
from harness.context_parallel import Exchange, LoadBalance
from harness.float8 import Float8
from harness.pipeline.config import Pipeline
from harness.workloads.config import Collectives, PointToPoint, WorkloadName

if TYPE_CHECKING:
    from pathlib import Path

    from harness.record.recorder import Recorder as RecorderImpl
    from harness.trainer.model.decoder import Decoder as DecoderImpl
    from harness.trainer.trainer import Trainer as TrainerImpl
    from harness.workloads.workload import Workload

DType = Literal["float32", "bfloat16"]
CollectiveMemory = Literal["references", "record_stream", "record_stream_async"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}


class Decoder:
    """A Llama decoder: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        vocab_size: int = 2048
        dim: int = 256
        """Width of the residual stream."""
        n_layers: int = 4
        n_heads: int = 8
        n_kv_heads: int = 4
        ffn_dim: int = 768
        """Width of the feed-forward network between w1/w3 and w2."""
        tied_embeddings: bool = False
        """The head uses the embedding's matrix (Llama 3.2 1B and 3B)."""
        norm_eps: float = 1e-5
        rope_theta: float = 500_000.0

        @property
        def head_dim(self) -> int:
            return self.dim // self.n_heads

        @property
        def kv_dim(self) -> int:
            """Width of the keys (and of the values): n_kv_heads · head_dim."""
            return self.n_kv_heads * self.head_dim

        @property
        def block_params(self) -> int:
            """Parameters of one transformer block, two norms included."""
            attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_dim
            return attention + 3 * self.dim * self.ffn_dim + 2 * self.dim

        @property
        def params(self) -> int:
            """Parameters of the whole model: embedding, blocks, last norm, head."""
            matrices = 1 if self.tied_embeddings else 2
            return self.n_layers * self.block_params + matrices * self.vocab_size * self.dim + self.dim

        def flops_per_token(self, seq_len: int) -> int:
            """Matrix-product operations of forward and backward for one token.

            6 per parameter that multiplies (looking up an embedding does not) plus 12·layers·dim·seq_len for causal
            attention counted in full, the convention of PaLM (arXiv 2204.02311, appendix B), nanoGPT and
            torchtitan, so that MFU compares with theirs.
            """
            matmul_params = self.params - (0 if self.tied_embeddings else self.vocab_size * self.dim)
            return 6 * matmul_params + 12 * self.n_layers * self.dim * seq_len

        def build(self, *, seq_len: int) -> DecoderImpl:
            """The model on the current default device (use `meta`); `seq_len` sizes the rotary table."""
            from harness.trainer.model.decoder import Decoder as Implementation

            return Implementation(self, seq_len=seq_len)


class Parallelism:
    """How the ranks are laid out; the product of all degrees is the world size."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        dp_replicate: int = 1
        """HSDP: copies of the sharded model, their gradients all-reduced (2-D data parallelism with dp_shard)."""
        dp_shard: int = -1
        """FSDP2 shard degree; -1 takes the ranks that the other degrees leave."""
        cp: int = 1
        """Context parallelism: ranks that share every sequence, with some of its tokens each."""
        cp_attention: Exchange = "allgather"
        """How queries come to the keys and values of other ranks: all of them gathered, or one rank's after the other
        passed round a `ring`."""
        cp_load_balance: LoadBalance = "head_tail"
        """Which tokens a rank has: a chunk near the beginning and the one as far from the end, so that all attend to
        equally many; `none`: one piece, in order."""
        tp: int = 1
        pp: int = 1
        sequence_parallel: bool = True
        """Keeps activations between tensor-parallel regions sharded over the sequence (tp > 1)."""
        reshard_after_forward: Literal["default", "always", "never"] = "default"
        """`default`: every FSDP unit except the last one (norm and head, with the embedding if tied) is freed after
        its forward; `always`: that one too; `never`: all stay gathered until their backward. In a pipeline (pp > 1) all
        stay gathered from one micro-batch to the next, until the schedule frees them; `always` is refused."""
        fsdp_prefetch: int | Literal["default"] = "default"
        """Units gathered ahead of the one that runs. A number: so many, in forward and in backward, each asked for as
        soon as its predecessor is copied out (0: none). `default`: one in backward, and in forward none but what the
        host, which runs ahead of the device, issues early."""
        fsdp_async_unshard: bool = False
        """All-gathers with `async_op=True`: on the process group's own stream, into memory of the compute stream. In
        forward they then overlap only with `fsdp_prefetch` of 1 or more."""
        fsdp_reduce_scatter_group: Literal["shared", "separate"] = "shared"
        """`separate`: gradients are reduce-scattered in a process group of their own over the same ranks, so that NCCL
        need not finish an all-gather first."""
        tp_async: bool = False
        """Redistributions of tensor parallelism are waited for where their result is used, not where they start."""


class ActivationCheckpoint:
    """What a layer keeps of its forward; backward computes the rest again (arXiv 1604.06174)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        mode: Literal["none", "full", "selective", "memory_budget"] = "none"
        """`none`: all that backward needs. `full`: the layer's input. `selective`: the input, what attention and
        reduce-scatters return, and every other matrix product. `memory_budget`: what torch.compile chooses to fit
        `memory_budget`; needs `compile.blocks`."""
        memory_budget: float = 0.5
        """Of that mode: what a layer may keep, between its input alone (0) and all that torch.compile would keep (1)
        (torch._functorch.config.activation_memory_budget)."""
        every: int = 1
        """One layer in so many, the last of each group; the others keep all."""


class Optimizer:
    @dataclass(kw_only=True, slots=True)
    class Config:
        lr: float = 3e-4
        beta1: float = 0.9
        beta2: float = 0.95
        eps: float = 1e-8
        weight_decay: float = 0.1
        implementation: Literal["auto", "fused", "foreach"] = "auto"
        """AdamW kernel; `auto` is fused on CUDA, with `training.cpu_offload` too, and foreach on CPU."""
        warmup_steps: int = 0
        """Steps over which the learning rate rises linearly to `lr`."""
        schedule: Literal["constant", "cosine"] = "constant"
        """After the warm-up: `lr` throughout, or a half cosine down to `min_lr_factor`·lr at the last step."""
        min_lr_factor: float = 0.1

        def lr_at(self, step: int, steps: int) -> float:
            """The learning rate of `step` (from 0) of a run of `steps`."""
            if step < self.warmup_steps:
                return self.lr * (step + 1) / self.warmup_steps
            if self.schedule == "constant":
                return self.lr
            progress = min(1.0, (step - self.warmup_steps) / max(1, steps - 1 - self.warmup_steps))
            cosine = (1 + math.cos(math.pi * progress)) / 2
            return self.lr * (self.min_lr_factor + (1 - self.min_lr_factor) * cosine)

        def resolved(self, target: Literal["cuda", "cpu"]) -> Literal["fused", "foreach"]:
            if self.implementation == "auto":
                return "fused" if target == "cuda" else "foreach"
            return self.implementation


class Data:
    @dataclass(kw_only=True, slots=True)
    class Config:
        dataset: Literal["synthetic", "text"] = "synthetic"
        """`synthetic`: token sequences that are a function of seed, step and sample, with structure to learn.
        `text`: documents of a local file, byte by byte, packed into full sequences."""
        path: str | None = None
        """`text`: a file with one JSON object per line, its document under `text`."""
        ignored_share: float = 0.0
        """`synthetic`: share of the labels masked out of the loss (0 to below 1); valid-token counts get uneven."""


class Training:
    @dataclass(kw_only=True, slots=True)
    class Config:
        device: Literal["auto", "cuda", "cpu"] = "auto"
        steps: int = 10
        micro_batch_size: int = 1
        """Sequences per data-parallel rank and forward."""
        accumulation_steps: int = 1
        """Micro-batches per optimizer step."""
        reduce_every_micro_batch: bool = True
        """Gradients are reduced over data-parallel ranks as each micro-batch ends. Otherwise with the last: those of
        the others are added up whole on every rank, in the dtype of the reduction."""
        loss_chunks: int = 1
        """Head and loss run over one so many-th of the sequence after the other, forward and backward, so that the
        logits never exist whole. The unit of norm and head is freed after its forward, gathered once for all chunks,
        and once more for the norm's backward, unless `reshard_after_forward` is never."""
        seq_len: int = 256
        mixed_precision_param: DType = "bfloat16"
        """Dtype of gathered parameters and of compute; shards, optimizer states and reductions are float32."""
        mixed_precision_reduce: DType = "float32"
        cpu_offload: bool = False
        """CUDA only: parameters, gradients and optimizer states stay in host memory, where AdamW runs; FSDP2 copies a
        shard to the GPU for each all-gather, and each reduced gradient back."""
        max_norm: float = 1.0
        """Gradients are clipped to this global 2-norm."""
        seed: int = 0
        deterministic: bool = False
        """Deterministic kernels, or an error where torch has none."""
        collective_memory: CollectiveMemory = "references"
        """What keeps the tensors of a collective alive on CUDA: `references`, torch's own since 2.8; `record_stream`;
        `record_stream_async`, what torch 2.2 to 2.7 did, which spared synchronous calls such as FSDP2's."""
        gc_interval: int = 50
        """Python's garbage collector runs every so many steps, tagged `gc`, and never by itself; 0 leaves it alone."""
        init_timeout_s: int = 300
        """A collective that hangs this long ends the run, until the first step is done."""
        train_timeout_s: int = 100
        """The same from the second step on."""


class Checkpoint:
    """Model, optimizer, data position and step through torch.distributed.checkpoint."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        interval: int = 0
        """Saved into the recording every so many steps and after the last; 0 saves none."""
        keep: int = 2
        """How many of the latest stay."""
        asynchronous: bool = False
        """Training goes on while a thread of each rank writes a copy of what is saved, in host memory as long as that
        lasts. One save at a time: the next waits for it, and so does the end of the run."""
        timeout_s: int = 1800
        """A rank that takes this long to save or load its part ends the run; that of training does not count then."""
        load: str | None = None
        """A recording to go on from, at the latest checkpoint in it, or one of its checkpoints. A seed checkpoint holds
        the weights to begin with."""


@dataclass(kw_only=True, slots=True)
class Window:
    """Steps [start, start + steps), counted from the first that the run itself makes; `steps=0` is off."""

    start: int = 0
    steps: int = 0

    def __contains__(self, step: int) -> bool:
        return self.start <= step < self.start + self.steps

    def after(self, completed_steps: int) -> Window:
        """The same steps in numbers of a training that had made `completed_steps` when this run took it up."""
        return Window(start=completed_steps + self.start, steps=self.steps)


class Recorder:
    """What is recorded; the implementation, `harness.record.Recorder`, attaches to any training loop."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        trace: Window = field(default_factory=lambda: Window(start=4, steps=2))
        """Steps under torch.profiler; one chrome trace per rank."""
        memory: Window = field(default_factory=lambda: Window(start=2, steps=2))
        """CUDA: steps under allocator history, one snapshot per rank at its end. With `start=0` the history begins with
        the recorder: the trainer's model is built in it, and `meshscope whatif` then knows everything.
        CPU: steps in which every live tensor storage is tracked."""
        max_history_entries: int = 1_000_000
        peak_tflops: float | None = None
        """Peak of one device for MFU; None takes the device's datasheet figure where known, else MFU is null."""

        def build(self, directory: Path, **runtime: Any) -> RecorderImpl:
            from harness.record.recorder import Recorder as Implementation

            return Implementation(directory, config=self, **runtime)


class Trainer:
    @dataclass(kw_only=True, slots=True)
    class Config:
        """One run, whole. `world_size` is how many processes are started."""

        name: str = "run"
        workload: WorkloadName = "training"
        """`collectives` and `point_to_point` train nothing: the ranks repeat one pattern of communication."""
        world_size: int = 1
        model: Decoder.Config = field(default_factory=Decoder.Config)
        parallelism: Parallelism.Config = field(default_factory=Parallelism.Config)
        pipeline: Pipeline.Config = field(default_factory=Pipeline.Config)
        activation_checkpoint: ActivationCheckpoint.Config = field(default_factory=ActivationCheckpoint.Config)
        compile: Compile.Config = field(default_factory=Compile.Config)
        float8: Float8.Config = field(default_factory=Float8.Config)
        training: Training.Config = field(default_factory=Training.Config)
        optimizer: Optimizer.Config = field(default_factory=Optimizer.Config)
        data: Data.Config = field(default_factory=Data.Config)
        checkpoint: Checkpoint.Config = field(default_factory=Checkpoint.Config)
        recorder: Recorder.Config = field(default_factory=Recorder.Config)
        collectives: Collectives.Config = field(default_factory=Collectives.Config)
        point_to_point: PointToPoint.Config = field(default_factory=PointToPoint.Config)

        @property
        def tokens_per_step(self) -> int:
            """Tokens of one data-parallel rank in one optimizer step."""
            training = self.training
            sequences = training.micro_batch_size * self.pipeline_micro_batches * training.accumulation_steps
            return sequences * training.seq_len

        @property
        def pipeline_micro_batches(self) -> int:
            """Forwards of one pass of the pipeline schedule; 1 without a pipeline."""
            if self.parallelism.pp == 1:
                return 1
            from harness.pipeline.plan import micro_batches

            return micro_batches(self)

        def build(self, directory: Path) -> TrainerImpl | Workload:
            """This rank's trainer, or workload (torchrun's environment says which rank); raises as `validate` does."""
            if self.workload == "collectives":
                from harness.workloads.collectives import Collectives as CollectivesImpl

                return CollectivesImpl(self, directory)
            if self.workload == "point_to_point":
                from harness.workloads.point_to_point import PointToPoint as PointToPointImpl

                return PointToPointImpl(self, directory)
            from harness.trainer.trainer import Trainer as Implementation

            return Implementation(self, directory)

        @property
        def dp_shard(self) -> int:
            """The shard degree with -1 resolved."""
            layout = self.parallelism
            if layout.dp_shard != -1:
                return layout.dp_shard
            return self.world_size // (layout.dp_replicate * layout.cp * layout.tp * layout.pp)

        @property
        def tied_across_stages(self) -> bool:
            """The first and the last stage of a pipeline both have the matrix of tied embeddings."""
            return self.model.tied_embeddings and self.parallelism.pp > 1

        @property
        def fsdp_shards(self) -> int:
            """How many ranks FSDP2 shards over: context-parallel ranks hold the same parameters, and count."""
            return self.dp_shard * self.parallelism.cp

        @property
        def fsdp_axis(self) -> str:
            """The mesh dimension that FSDP2 shards over and communicates in."""
            return "dp_shard" if self.parallelism.cp == 1 else "dp_shard_cp"

        def validate(self) -> None:
            """Raises `UsageError`, one line that says what to change, for a configuration that cannot run."""
            from harness.validation import validate

            validate(self)
