"""torch.compile of the decoder's layers and of the loss, and what became of it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import utils as dynamo
from torch._functorch import config as functorch_config
from torch._inductor import cudagraph_utils

from harness import config
from harness.errors import UsageError
from harness.trainer.loss import Loss, cross_entropy_sum
from harness.trainer.model.decoder import Decoder

MOST_REASONS = 5
LAYER_CODE, LOSS_CODE = "compiled_layer", "compiled_loss"
"""Names of the functions here that torch compiles, which its metrics are by."""
MOST_METRICS = 100_000
"""Kept by torch: it keeps 64 unless told, and each capture of a CUDA graph is one, too."""


class Compiled:
    """What `config.compile` asks of one training, and a record of what torch made of it.

    To be built once for each training of a process: it drops what was compiled for an earlier one, whose process groups
    are gone. Raises `UsageError` where torch.compile is off, which the environment of now need not say.
    """

    def __init__(self, config: config.Trainer.Config, device: torch.device) -> None:
        self._wanted, self._device = config.compile, device
        checkpointing = config.activation_checkpoint
        self._budget = checkpointing.memory_budget if checkpointing.mode == "memory_budget" else 1.0
        self._micro_batches = config.training.accumulation_steps
        self._eager: Counter[str] = Counter()
        self._layers = self._kinds = 0
        self._seen: Any = None
        self._graph_log = _SkippedGraphs()
        if self._wanted.blocks or self._wanted.loss:
            if torch._dynamo.config.disable:
                raise UsageError(
                    "compile.blocks or compile.loss: torch.compile is off in this process, by TORCH_COMPILE_DISABLE=1 "
                    "when torch was imported or by torch._dynamo.config.disable=True; take that away"
                )
            torch._dynamo.reset()
            dynamo.counters.clear()
            dynamo.clear_compilation_metrics()
            dynamo.set_compilation_metrics_limit(MOST_METRICS)
            functorch_config.activation_memory_budget = self._budget
            # Since torch 2.13 a mesh is an input of tensor-parallel graphs, whose size a budget asks for: it has none.
            if hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size"):
                functorch_config.unsafe_treat_script_objects_as_zero_size = True
            if self._wanted.cuda_graphs:
                self._graph_log.listen()

    def layers(self, model: Decoder, checkpointed: set[str]) -> None:
        """Replaces each layer's own forward, checkpointing included, by a compiled one. FSDP2, whose hooks stay
        outside, comes after; names of modules and parameters stay as they are. `checkpointed`: names of the layers that
        compute some of their forward again, which are another kind than the others."""
        if not self._wanted.blocks:
            return
        for name, layer in model.layers.items():
            layer.forward = self._layer(f"layers.{name}", layer.forward)
        self._layers = len(model.layers)
        self._kinds = len({name in checkpointed for name in model.layers})

    def loss(self) -> Loss:
        """`cross_entropy_sum`, compiled if that is asked for."""
        if not self._wanted.loss:
            return cross_entropy_sum

        def compiled_loss(*args: Any) -> torch.Tensor:
            self._note_eager("loss")
            return cross_entropy_sum(*args)

        return self._compile(compiled_loss)

    def start_step(self) -> None:
        """What the graphs of the step before returned is not needed any more."""
        if self._wanted.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()

    def has_news(self) -> bool:
        """Since it was last asked, something was compiled or captured, or ran without having been."""
        if not self._wanted.blocks and not self._wanted.loss:
            return False
        seen = len(dynamo.get_compilation_metrics()), set(self._eager), self._cuda_graphs()
        before, self._seen = self._seen, seen
        return bool(seen != before)

    def facts(self) -> dict[str, Any]:
        """What was compiled up to now, as JSON (docs/recording.md, `compile`)."""
        metrics = [one for one in dynamo.get_compilation_metrics() if one.co_filename == __file__]
        graphs = Counter(str(one.co_name) for one in metrics if one.fail_reason is None)
        reasons = [one.recompile_reason for one in metrics if one.recompile_reason]
        return {
            "backend": self._wanted.backend,
            "layers": self._layers,
            "layer_kinds": self._kinds,
            "layer_graphs": graphs[LAYER_CODE],
            "loss_graphs": graphs[LOSS_CODE],
            "graph_breaks": dynamo.counters["graph_break"].total(),
            "recompile_reasons": [reason.splitlines()[0].strip() for reason in reasons][:MOST_REASONS],
            "ran_eagerly": dict(self._eager),
            "cuda_graphs": self._cuda_graphs(),
        }

    def _layer(self, name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def compiled_layer(*args: Any) -> Any:
            self._note_eager(name)
            return compute(*args)

        return self._compile(compiled_layer, **({"triton.cudagraphs": True} if self._wanted.cuda_graphs else {}))

    def _compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Shapes of a training never change: nothing is compiled for sizes that vary. A part that torch cannot compile
        whole is an error, not one that silently runs in pieces."""
        backend = self._wanted.backend
        return torch.compile(function, backend=backend, fullgraph=True, dynamic=False, options=options or None)

    def _note_eager(self, name: str) -> None:
        """Counts where a part runs without being compiled, which torch before 2.13 does without a word; no graph holds
        this."""
        if not torch.compiler.is_compiling():
            self._eager[name] += 1

    def _cuda_graphs(self) -> dict[str, Any] | None:
        """Graphs that a step replays, how often one was captured, and how often and why inductor left one out."""
        if not self._wanted.cuda_graphs:
            return None
        from torch._inductor.cudagraph_trees import get_container

        manager: Any = get_container(self._device.index or 0).tree_manager
        waiting: list[Any] = [] if manager is None else [node for nodes in manager.roots.values() for node in nodes]
        captured = 0
        while waiting:
            captured += 1
            waiting += [node for nodes in waiting.pop().children.values() for node in nodes]
        return {
            "graphs": 2 * self._layers * self._micro_batches,
            "captured": captured,
            "skips": dynamo.counters["inductor"]["cudagraph_skips"],
            "skip_reasons": self._graph_log.reasons,
        }


class _SkippedGraphs(logging.Handler):
    """Takes down why inductor captured no CUDA graph, which it says to a log that nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []

    def listen(self) -> None:
        names = ("cudagraphs_log", "perf_hint_log")  # of torch 2.13 and before
        for logger in (getattr(cudagraph_utils, name, None) for name in names):
            if logger is not None:
                logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().splitlines()[0]
        if record.levelno >= logging.WARNING and text not in self.reasons and len(self.reasons) < MOST_REASONS:
            self.reasons.append(text)
