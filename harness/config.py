"""The configuration of a run: nested dataclasses, free of torch.

A run is a function that returns a `Trainer.Config` (see `harness.recipes`). Every component of the trainer has a
class here that owns its `Config`; `Config.build(...)` imports the implementation when it is called, and the
implementation subclasses the class here, so `Decoder.Config` is the same object with and without torch.
All sizes are per rank unless a field says global; byte sizes follow from dtypes, never from fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import msgspec.inspect

from harness.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from harness.record.recorder import Recorder as RecorderImpl
    from harness.trainer.model.decoder import Decoder as DecoderImpl
    from harness.trainer.trainer import Trainer as TrainerImpl

DType = Literal["float32", "bfloat16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}


class Decoder:
    """A Llama decoder: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU, untied embeddings."""

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
            return self.n_layers * self.block_params + 2 * self.vocab_size * self.dim + self.dim

        def flops_per_token(self, seq_len: int) -> int:
            """Matrix-product operations of forward and backward for one token.

            6 per parameter that multiplies (the embedding is a look-up) plus 12·layers·dim·seq_len for causal
            attention counted in full, the convention of PaLM (arXiv 2204.02311, appendix B), nanoGPT and
            torchtitan, so that MFU compares with theirs.
            """
            matmul_params = self.params - self.vocab_size * self.dim
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
        dp_shard: int = -1
        """FSDP2 shard degree; -1 takes the ranks that the other degrees leave."""
        cp: int = 1
        tp: int = 1
        pp: int = 1
        sequence_parallel: bool = True
        """Keeps activations between tensor-parallel regions sharded over the sequence (tp > 1)."""
        reshard_after_forward: Literal["default", "always", "never"] = "default"
        """`default`: every FSDP unit except the last one (norm and head) is freed after its forward;
        `always`: that one too; `never`: all stay gathered until their backward."""


class Optimizer:
    @dataclass(kw_only=True, slots=True)
    class Config:
        lr: float = 3e-4
        beta1: float = 0.9
        beta2: float = 0.95
        eps: float = 1e-8
        weight_decay: float = 0.1
        implementation: Literal["auto", "fused", "foreach"] = "auto"
        """AdamW kernel; `auto` is fused on CUDA and foreach on CPU."""

        def resolved(self, target: Literal["cuda", "cpu"]) -> Literal["fused", "foreach"]:
            if self.implementation == "auto":
                return "fused" if target == "cuda" else "foreach"
            return self.implementation


class Data:
    @dataclass(kw_only=True, slots=True)
    class Config:
        dataset: Literal["synthetic"] = "synthetic"
        """`synthetic`: token sequences that are a function of seed, step and sample, with structure to learn."""
        ignored_share: float = 0.0
        """Share of the labels masked out of the loss (0 to below 1); makes valid-token counts uneven."""


class Training:
    @dataclass(kw_only=True, slots=True)
    class Config:
        device: Literal["auto", "cuda", "cpu"] = "auto"
        steps: int = 10
        micro_batch_size: int = 1
        """Sequences per data-parallel rank and step."""
        seq_len: int = 256
        mixed_precision_param: DType = "bfloat16"
        """Dtype of gathered parameters and of compute; shards, optimizer states and reductions are float32."""
        mixed_precision_reduce: DType = "float32"
        max_norm: float = 1.0
        """Gradients are clipped to this global 2-norm."""
        seed: int = 0
        init_timeout_s: int = 300
        """Process-group timeout: a collective that hangs this long ends the run."""


@dataclass(kw_only=True, slots=True)
class Window:
    """Steps [start, start + steps), counted from 0; `steps=0` is off."""

    start: int = 0
    steps: int = 0

    def __contains__(self, step: int) -> bool:
        return self.start <= step < self.start + self.steps


class Recorder:
    """What is recorded; the implementation, `harness.record.Recorder`, attaches to any training loop."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        trace: Window = field(default_factory=lambda: Window(start=4, steps=2))
        """Steps under torch.profiler; one chrome trace per rank."""
        memory: Window = field(default_factory=lambda: Window(start=2, steps=2))
        """CUDA: steps under allocator history, one snapshot per rank at its end.
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
        world_size: int = 1
        model: Decoder.Config = field(default_factory=Decoder.Config)
        parallelism: Parallelism.Config = field(default_factory=Parallelism.Config)
        training: Training.Config = field(default_factory=Training.Config)
        optimizer: Optimizer.Config = field(default_factory=Optimizer.Config)
        data: Data.Config = field(default_factory=Data.Config)
        recorder: Recorder.Config = field(default_factory=Recorder.Config)

        def build(self, directory: Path) -> TrainerImpl:
            """The trainer of this rank (torchrun's environment says which); raises as `validate` does."""
            from harness.trainer.trainer import Trainer as Implementation

            return Implementation(self, directory)

        @property
        def dp_shard(self) -> int:
            """The shard degree with -1 resolved."""
            layout = self.parallelism
            if layout.dp_shard != -1:
                return layout.dp_shard
            return self.world_size // (layout.dp_replicate * layout.cp * layout.tp * layout.pp)

        def validate(self) -> None:
            """Raises `UsageError`, one line that says what to change, for a configuration that cannot run."""
            _validate(self)


def _validate(config: Trainer.Config) -> None:
    model, layout, training = config.model, config.parallelism, config.training
    positive = {
        "world_size": config.world_size,
        **{f"model.{n}": getattr(model, n) for n in _names(Decoder.Config) if n not in ("norm_eps", "rope_theta")},
        **{f"parallelism.{n}": getattr(layout, n) for n in ("dp_replicate", "cp", "tp", "pp")},
        **{f"training.{n}": getattr(training, n) for n in ("steps", "micro_batch_size", "seq_len", "init_timeout_s")},
        "recorder.max_history_entries": config.recorder.max_history_entries,
    }
    for name, value in positive.items():
        _require(value >= 1, f"{name}={value} must be at least 1")
    _require(
        layout.dp_shard >= 1 or layout.dp_shard == -1,
        f"parallelism.dp_shard={layout.dp_shard} must be at least 1, or -1",
    )
    for name in ("dp_replicate", "cp", "pp"):
        degree = getattr(layout, name)
        _require(degree == 1, f"parallelism.{name}={degree}: this version trains dp_shard × tp only; set it to 1")

    others = layout.dp_replicate * layout.cp * layout.tp * layout.pp
    if layout.dp_shard == -1:
        _require(
            config.world_size % others == 0,
            f"world_size={config.world_size} is not divisible by parallelism.tp={layout.tp}: "
            f"use a multiple of {others} processes, or a tp that divides {config.world_size}",
        )
    else:
        product = others * layout.dp_shard
        _require(
            config.world_size == product,
            f"parallelism.dp_shard={layout.dp_shard} × tp={layout.tp} needs {product} processes, "
            f"world_size={config.world_size}: set world_size (--nproc) to {product} or parallelism.dp_shard to -1",
        )

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
    if layout.sequence_parallel:
        _require(
            training.seq_len % tp == 0,
            f"training.seq_len={training.seq_len} is not divisible by parallelism.tp={tp} (sequence parallel): "
            f"use a multiple of {tp} or set parallelism.sequence_parallel to false",
        )
    _require(
        0 <= config.data.ignored_share < 1,
        f"data.ignored_share={config.data.ignored_share} must be in [0, 1)",
    )
    _require(training.max_norm > 0, f"training.max_norm={training.max_norm} must be above 0")
    _require(config.optimizer.lr >= 0, f"optimizer.lr={config.optimizer.lr} must not be negative")
    for name in ("trace", "memory"):
        window = getattr(config.recorder, name)
        _require(window.start >= 0 and window.steps >= 0, f"recorder.{name}: start and steps must not be negative")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message)


def _names(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def to_dict(config: Trainer.Config) -> dict[str, Any]:
    """The whole tree as JSON-ready builtins."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    return tree


def to_json(config: Trainer.Config) -> str:
    return json.dumps(to_dict(config), indent=2)


def from_dict(tree: dict[str, Any], *, strict: bool = True) -> Trainer.Config:
    """The configuration that `to_dict` gave, or one with fields left out (their defaults).

    `strict=False` also takes numbers and booleans written as strings, as a command line gives them.
    Raises `UsageError` naming the field for an unknown name or a value of the wrong type.
    """
    _reject_unknown(tree, Trainer.Config, "")
    try:
        return msgspec.convert(tree, Trainer.Config, strict=strict)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        raise UsageError(f"configuration: {place.rstrip('`') or 'value'}: {reason}") from None


def from_json(text: str | bytes) -> Trainer.Config:
    """Reads what `to_json` wrote; raises `UsageError`."""
    try:
        tree = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UsageError(f"configuration is not a JSON object: {error}") from None
    return from_dict(tree)


def field_names(cls: Any = Trainer.Config, prefix: str = "") -> list[str]:
    """Every dotted name that can be overridden, in order: `model.dim`, `training.steps`, …"""
    names: list[str] = []
    for name, kind in _fields_of(cls).items():
        names += field_names(kind, f"{prefix}{name}.") if dataclasses.is_dataclass(kind) else [prefix + name]
    return names


def _fields_of(cls: Any) -> dict[str, Any]:
    """Field name -> the dataclass it holds, or a msgspec type for a plain value."""
    info = msgspec.inspect.type_info(cls)
    assert isinstance(info, msgspec.inspect.DataclassType)
    return {f.name: getattr(f.type, "cls", f.type) for f in info.fields}


def _reject_unknown(tree: Any, cls: Any, prefix: str) -> None:
    if not isinstance(tree, dict):
        return
    known = _fields_of(cls)
    for name, value in tree.items():
        if name not in known:
            raise UsageError(
                f"configuration has no field {prefix}{name}; known: {', '.join(prefix + k for k in known)}"
            )
        if dataclasses.is_dataclass(known[name]):
            _reject_unknown(value, known[name], f"{prefix}{name}.")


def with_overrides(config: Trainer.Config, overrides: list[tuple[str, str]]) -> Trainer.Config:
    """A copy with dotted fields replaced by values as a command line gives them (the last of a name wins).

    Raises `UsageError` for a name that does not exist, with the closest ones, or for a value of the wrong type.
    """
    names = field_names()
    tree = to_dict(config)
    for dotted, value in overrides:
        if dotted not in names:
            close = difflib.get_close_matches(dotted, names, n=3, cutoff=0.5) or [
                n for n in names if n.split(".")[-1] == dotted.split(".")[-1]
            ]
            hint = f"; did you mean {' or '.join('--' + c for c in close)}?" if close else " (--print-config lists all)"
            raise UsageError(f"no field --{dotted}{hint}")
        *path, leaf = dotted.split(".")
        node = tree
        for part in path:
            node = node[part]
        node[leaf] = value
    return from_dict(tree, strict=False)
