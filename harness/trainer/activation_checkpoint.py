"""Activation checkpointing: a layer keeps less of its forward, and computes the rest again when backward needs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from harness.config import ActivationCheckpoint
from harness.recording import RECOMPUTE_RANGE
from harness.trainer.model.decoder import Decoder

ATTENTION = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
"""Fused kernels; attention that torch composes of plain operators is computed again."""

Policy = Callable[..., CheckpointPolicy]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint_layers(
    model: Decoder, config: ActivationCheckpoint.Config, *, keeps_attention: bool, compiled: bool = False
) -> set[str]:
    """Makes every `config.every`-th layer keep its input and, if selective, what `_policy` says; returns the names of
    these layers.

    `keeps_attention`: not with context parallelism, whose attention is as many kernels as ranks; what one returns is as
    large as what all of them are merged into.

    To be called between tensor parallelism, whose redistributions are part of what a layer computes again, and FSDP2,
    whose hooks stay outside: parameters are gathered for backward before anything is computed again.

    `compiled`: torch.compile will trace the layer. What is computed again is then part of its one backward graph, in
    the order that the compiler finds best, and no range in a trace surrounds it. A memory budget is kept to by
    torch.compile alone.
    """
    if config.mode in ("none", "memory_budget"):
        return set()
    names = {name for name in model.layers if (int(name) + 1) % config.every == 0}
    for name in names:
        layer, selective = model.layers[name], config.mode == "selective"
        if compiled:
            _checkpoint_traceably(layer, partial(_selective_contexts, keeps_attention) if selective else None)
        else:
            policy = partial(_policy, keeps_attention) if selective else None
            _checkpoint(layer, f"{RECOMPUTE_RANGE} (layers.{name})", policy)
    return names


def _checkpoint(layer: nn.Module, label: str, policy: Callable[[], Policy] | None) -> None:
    """Replaces the layer's own forward, not the layer: names of modules and parameters stay as they are."""
    compute = layer.forward

    def contexts() -> Contexts:
        forward, again = create_selective_checkpoint_contexts(policy()) if policy else (nullcontext(), nullcontext())
        return forward, _labelled(label, again)

    def forward(*args: torch.Tensor) -> Any:
        # The decoder draws no random numbers. Without an early stop all of a layer is computed again, as in torchtitan.
        return checkpoint(
            compute, *args, use_reentrant=False, context_fn=contexts, preserve_rng_state=False, early_stop=False
        )

    layer.forward = forward


def _checkpoint_traceably(layer: nn.Module, contexts: Callable[[], Contexts] | None) -> None:
    """As `_checkpoint`, in the form that torch.compile understands: contexts that are those of
    `create_selective_checkpoint_contexts` and nothing else, from a function or a partial one
    (torch/_dynamo/variables/higher_order_ops.py CheckpointHigherOrderVariable)."""
    compute = layer.forward
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if contexts is not None:
        options["context_fn"] = contexts

    def forward(*args: torch.Tensor) -> Any:
        return checkpoint(compute, *args, **options)

    layer.forward = forward


def _selective_contexts(keeps_attention: bool) -> Contexts:
    contexts: Contexts = create_selective_checkpoint_contexts(_policy(keeps_attention))
    return contexts


@contextmanager
def _labelled(label: str, again: AbstractContextManager[Any]) -> Iterator[None]:
    with torch.profiler.record_function(label), again:
        yield


def _policy(keeps_attention: bool) -> Policy:
    """torchtitan's list (torchtitan/distributed/activation_checkpoint.py): what attention and reduce-scatters return,
    the largest values that float8 is scaled by, one each, and every other matrix product, beginning with the first. A
    product of float8 operands is asked for as `mm` of these, not as the kernel that makes it."""
    aten, functional = torch.ops.aten, torch.ops._c10d_functional
    attention = ATTENTION if keeps_attention else ()
    saved = {getattr(aten, name).default for name in attention if hasattr(aten, name)}
    saved |= {functional.reduce_scatter_tensor.default, aten.max.default}
    products: Counter[bool] = Counter()  # torch before 2.13 asks again in backward

    def saves(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = operator in saved
        if operator is aten.mm.default:
            products[context.is_recompute] += 1
            keeps = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return saves
