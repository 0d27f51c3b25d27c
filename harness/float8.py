"""Linear layers in float8: which ones a configuration converts, and which configurations can have them. Free of torch.

The layers are torchao's Float8Linear (torchao/float8/float8_linear.py): weights stay what they are, the operands of the
three matrix products of a linear layer are converted to one byte an element, with scales computed anew each time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, TypedDict

from harness.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from harness.config import Trainer

Recipe = Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"]
COLUMN_PARALLEL = ("wq", "wk", "wv", "w1", "w3")
"""Tensor parallelism shards their output, that of `wo` and `w2` their input."""
LINEARS = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")
MULTIPLE = 16
"""What cuBLAS and CUTLASS need of the dimensions of a float8 product (aten/src/ATen/native/cuda/ScaledBlas.cpp)."""
INSTALL = "pip install 'meshscope[float8]'"


class Float8:
    """Matrix products in float8 (arXiv 2209.05433), as torchao makes them."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        recipe: Recipe = "none"
        """How operands are scaled: one scale a tensor (`tensorwise`), one a row or column (`rowwise`), or the latter
        with the products for weight gradients in the compute dtype (`rowwise_with_gw_hp`)."""
        emulate: bool = False
        """The same values from products in float32, on any device: for tests, it is slower than no float8 at all."""
        linears: list[str] = field(default_factory=lambda: list(LINEARS))
        """Which linear layers of every decoder layer; one with a dimension, on a tensor-parallel rank, that is no
        multiple of 16 stays as it is, and so does the head."""


class Left(TypedDict):
    count: int
    reason: str


class Outcome(TypedDict):
    """What became of a rank's linear layers, as ranks/rank{r}.json says it: name -> how many."""

    recipe: str
    torchao: str
    emulated: bool
    gpu_has_float8: bool
    converted: dict[str, int]
    left: dict[str, Left]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Of the linear layers of a decoder layer: those converted, and why others are not."""

    converted: tuple[str, ...]
    left: dict[str, str]


def conversion(config: Trainer.Config) -> Conversion:
    """What `config.float8` makes of each of LINEARS; all are left where there is no recipe."""
    left = {name: why for name in LINEARS if (why := _why_left(config, name))}
    return Conversion(converted=tuple(name for name in LINEARS if name not in left), left=left)


def _why_left(config: Trainer.Config, name: str) -> str | None:
    if config.float8.recipe == "none":
        return "float8.recipe=none"
    if name not in config.float8.linears:
        return "not in float8.linears"
    if odd := [size for size in local_shape(config, name) if size % MULTIPLE]:
        return f"{odd[0]} is no multiple of {MULTIPLE}"
    return None


def local_shape(config: Trainer.Config, name: str) -> tuple[int, int]:
    """Rows and columns of a layer's weight on one tensor-parallel rank."""
    model, tp = config.model, config.parallelism.tp
    rows = {"wk": model.kv_dim, "wv": model.kv_dim, "w1": model.ffn_dim, "w3": model.ffn_dim}.get(name, model.dim)
    columns = model.ffn_dim if name == "w2" else model.dim
    return (rows // tp, columns) if name in COLUMN_PARALLEL else (rows, columns // tp)


def require_float8(config: Trainer.Config) -> None:
    """Raises `UsageError` for what torchao or its kernels cannot do, and for settings that change nothing."""
    float8, usual = config.float8, Float8.Config()
    if float8.recipe == "none":
        for name in ("emulate", "linears"):
            if getattr(float8, name) != getattr(usual, name):
                raise UsageError(
                    f"float8.{name} has no effect with float8.recipe=none: set the recipe, or leave it out"
                )
        return
    unknown = [name for name in float8.linears if name not in LINEARS]
    if unknown or not float8.linears or len(set(float8.linears)) < len(float8.linears):
        raise UsageError(f"float8.linears={','.join(float8.linears)}: name some of {', '.join(LINEARS)}, each once")
    from harness.pipeline.requirements import splits_backward  # which knows the whole configuration, and so this part

    if splits_backward(config):
        raise UsageError(
            f"float8.recipe={float8.recipe}: the schedule has backward in two parts, for inputs and for weights, and "
            "the backward of a float8 layer is one, which each part would do whole: use a schedule with whole "
            "backwards, such as 1F1B or Interleaved1F1B"
        )
    tokens = config.training.micro_batch_size * config.training.seq_len // config.parallelism.cp
    if tokens % MULTIPLE and not float8.emulate and float8.recipe != "rowwise_with_gw_hp":
        raise UsageError(
            f"float8.recipe={float8.recipe}: products for weight gradients add up over the {tokens} tokens of a rank "
            f"and forward, which is no multiple of {MULTIPLE}: change training.seq_len, or use rowwise_with_gw_hp"
        )


def require_float8_on(config: Trainer.Config, device: str) -> None:
    """Raises `UsageError` for a recipe that `device` (cuda, cpu) does not have, `UnavailableError` without torchao."""
    float8 = config.float8
    if float8.recipe == "none":
        return
    if device == "cpu" and not float8.emulate:
        raise UsageError(
            f"float8.recipe={float8.recipe}: this trainer multiplies float8 on GPUs only (compute capability 8.9 and "
            "above); on a CPU set float8.emulate to true (slow), or the recipe to none"
        )
    if find_spec("torchao") is None:
        raise UnavailableError(f"float8.recipe={float8.recipe} needs torchao: {INSTALL}")
