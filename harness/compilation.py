"""What of a training torch.compile compiles, and which configurations can have it. Free of torch."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

from harness.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from harness.config import Trainer

Backend = Literal["inductor", "aot_eager"]
COMPILERS = ("c++", "g++", "clang++")
SWITCHES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
"""Variables that turn torch.compile off where they are 1 (torch/_dynamo/config.py, eval_frame.py `_optimize`)."""


class Compile:
    """torch.compile of parts of the model: each decoder layer by itself, and the loss."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        blocks: bool = False
        """Every decoder layer is compiled by itself, whole, after activation checkpointing and before FSDP2."""
        loss: bool = False
        """The loss is compiled: its cast to float32 is fused and no copy of the logits is kept."""
        backend: Backend = "inductor"
        """`inductor` writes fused kernels. `aot_eager` runs the operators of the compiled graphs one by one: what
        backward keeps is the same, nothing is fused, no compiler is needed."""
        cuda_graphs: bool = False
        """Forward and backward of a compiled layer are captured and replayed as CUDA graphs where inductor finds that
        they can be."""


class CudaGraphs(TypedDict):
    graphs: NotRequired[int]  # recordings of the first version of this do not say
    captured: int
    skips: int
    skip_reasons: list[str]


class Outcome(TypedDict):
    """What became of a rank's layers and loss, as ranks/rank{r}.json says it (docs/recording.md, `compile`)."""

    backend: str
    layers: int
    layer_kinds: int
    layer_graphs: int
    loss_graphs: int
    graph_breaks: int
    recompile_reasons: list[str]
    ran_eagerly: dict[str, int]
    cuda_graphs: CudaGraphs | None


def require_compilation(config: Trainer.Config) -> None:
    """Raises `UsageError` for what torch cannot compile, and for settings that change nothing."""
    wanted, usual = config.compile, Compile.Config()
    if not wanted.blocks:
        if wanted.cuda_graphs:
            raise UsageError("compile.cuda_graphs=true has no effect with compile.blocks=false: set blocks to true")
        if wanted.backend != usual.backend and not wanted.loss:
            raise UsageError(
                f"compile.backend={wanted.backend} has no effect with compile.blocks=false and compile.loss=false: set "
                "one of them to true, or leave it out"
            )
    _require_budget(config)
    if wanted.blocks:
        _require_blocks(config)


def _require_blocks(config: Trainer.Config) -> None:
    layout = config.parallelism
    if layout.cp > 1:
        raise UsageError(
            f"compile.blocks=true with parallelism.cp={layout.cp}: attention over several ranks sends while it "
            "computes, and torch.compile cannot make one graph of that; set blocks to false, or cp to 1"
        )
    if layout.tp_async:
        raise UsageError(
            "compile.blocks=true with parallelism.tp_async=true: a compiled layer takes no tensor that is still on its "
            "way, and decides itself where it waits; set one of them to false"
        )
    from harness.pipeline.requirements import splits_backward  # which knows the whole configuration, and so this part

    if splits_backward(config):
        raise UsageError(
            "compile.blocks=true: the schedule has backward in two parts, for inputs and for weights, and the backward "
            "of a compiled layer is one; use a schedule with whole backwards, such as 1F1B or Interleaved1F1B"
        )
    if config.compile.cuda_graphs:
        if config.compile.backend != "inductor":
            raise UsageError(
                f"compile.cuda_graphs=true with compile.backend={config.compile.backend}: inductor captures them; "
                "leave backend at inductor"
            )
        if layout.pp > 1:
            raise UsageError(
                f"compile.cuda_graphs=true with parallelism.pp={layout.pp}: a layer's activations of several "
                "micro-batches live at once, and the replay of a graph writes them to one place; set pp to 1"
            )


def _require_budget(config: Trainer.Config) -> None:
    """`activation_checkpoint.mode=memory_budget` is torch.compile's, of all compiled layers alike."""
    checkpointing = config.activation_checkpoint
    if checkpointing.mode != "memory_budget":
        if checkpointing.memory_budget != type(checkpointing)().memory_budget:
            raise UsageError(
                f"activation_checkpoint.memory_budget={checkpointing.memory_budget} has no effect with "
                f"activation_checkpoint.mode={checkpointing.mode}: set mode to memory_budget, or leave it out"
            )
        return
    if not config.compile.blocks:
        raise UsageError(
            "activation_checkpoint.mode=memory_budget: torch.compile keeps to a budget, and layers are not compiled; "
            "set compile.blocks to true, or use full or selective"
        )
    if not 0 <= checkpointing.memory_budget <= 1:
        raise UsageError(f"activation_checkpoint.memory_budget={checkpointing.memory_budget} must be in [0, 1]")
    if checkpointing.every != 1:
        raise UsageError(
            f"activation_checkpoint.every={checkpointing.every} with mode=memory_budget: all layers are compiled with "
            "one budget; leave every at 1"
        )


def require_compilation_on(config: Trainer.Config, device: str) -> None:
    """Raises `UsageError` for what does nothing on `device`, cuda or cpu, or in this environment, or fails there,
    `UnavailableError` without a compiler."""
    wanted = config.compile
    switch = next((name for name in SWITCHES if os.environ.get(name) == "1"), None)
    if (wanted.blocks or wanted.loss) and switch:
        raise UsageError(
            f"compile.{'blocks' if wanted.blocks else 'loss'}=true: {switch}=1 turns torch.compile off; unset it"
        )
    if device == "cuda":
        return
    if wanted.cuda_graphs:
        raise UsageError("compile.cuda_graphs=true needs CUDA: on CPUs nothing is captured; leave it out")
    if wanted.blocks and config.activation_checkpoint.mode == "full" and config.parallelism.tp > 1:
        raise UsageError(
            f"compile.blocks=true with activation_checkpoint.mode=full and parallelism.tp={config.parallelism.tp}: "
            "on CPUs torch keeps a random state for attention that is computed again, and mixes it up with the mesh "
            "of the gradients (torch/_functorch/partitioners.py functionalize_rng_ops); use selective"
        )
    if (wanted.blocks or wanted.loss) and wanted.backend == "inductor" and compiler() is None:
        raise UnavailableError(
            "compile.backend=inductor needs a C++ compiler on CPUs, and there is none: apt-get install g++, name one "
            "in CXX, or set compile.backend to aot_eager"
        )


def compiler() -> str | None:
    """The path of a C++ compiler, as inductor looks for it (torch/_inductor/cpp_builder.py get_cpp_compiler)."""
    named = os.environ.get("CXX")
    return next((path for name in (*([named] if named else []), *COMPILERS) if (path := shutil.which(name))), None)


MOVED = "what a layer reads is at another address in each step, as FSDP2 frees parameters and gathers them again"


def captured_again(graphs: CudaGraphs) -> bool:
    """Whether CUDA graphs of a rank (`compile.cuda_graphs` of a recording) were captured more often than by the first
    steps and one change after them."""
    return graphs["captured"] > 2 * graphs.get("graphs", graphs["captured"])
