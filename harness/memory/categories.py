"""What a block holds: what our recorder found to hold it at the end, else the label of its allocation, else what its
stack, stream and phase tell.

The rules know the files and functions of PyTorch's FSDP2, tensor parallelism, pipelining, optimizers and
checkpointing. The first rule that holds decides, so the most specific stand first.

A label that says no more than its phase does (what our recorder writes where the loop named only the phase) stands
behind the specific rules: the all-gather buffers and logits of a forward are no activations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from harness.memory.frames import has_python_frames, stack_text
from harness.memory.replay import BlockLife
from harness.text import printable

PRE_WINDOW = "pre_window"
BACKWARD = "backward"
UNKNOWN = "unknown"

# Labels the recorder derives from the phase alone.
_PHASE_LABELS = {"forward": "activation", "backward": "gradient", "optimizer": "optimizer_state"}


@dataclass(frozen=True, slots=True)
class Rule:
    """`category` applies when every pattern is found in the stack, written `file:function` per line, and the
    block's stream is the default one (handle 0), a side stream, or either."""

    category: str
    patterns: tuple[re.Pattern[str], ...]
    stream: Literal["default", "side", "any"] = "any"


def _rule(category: str, *patterns: str, stream: Literal["default", "side", "any"] = "any") -> Rule:
    return Rule(category, tuple(re.compile(pattern, re.MULTILINE) for pattern in patterns), stream)


SPECIFIC_RULES = (
    _rule("optimizer_state", r"optim/\w+\.py:(?:_init_group|init_state)$"),
    _rule("optimizer_temporary", r"torch/optim/\w+\.py:"),
    # FSDP2. A sharded gradient is the output of the reduce-scatter, on that collective's own stream.
    _rule("all_gather_output", r"_fsdp_collectives\.py:allocate$", r":foreach_all_gather$"),
    _rule("all_gather_input", r":(?:_get_param_all_gather_inputs|foreach_all_gather)$"),
    _rule(
        "unsharded_parameter", r"_fsdp_param\.py:(?:init_all_gather_outputs|alloc_all_gather_outputs|alloc_storage)$"
    ),
    _rule("unsharded_parameter", r":foreach_all_gather_copy_out$"),
    _rule("unsharded_gradient", r":to_accumulated_grad_if_needed$"),
    _rule("reduce_scatter_input", r":foreach_reduce_scatter_copy_in$"),
    _rule("reduce_scatter_input", r":foreach_reduce$", stream="default"),
    _rule("gradient", r":foreach_reduce$", stream="side"),
    _rule("pipeline_buffer", r"pipelining/(?:stage|schedules)\.py:(?:_make_tensor_from_meta|_create_\w*recv\w*)$"),
    _rule("recompute", r"utils/checkpoint\.py:(?:unpack_hook|recompute_fn|_recompute\w*|backward)$"),
    _rule("logits_loss", r"(?:^|/)loss\.py:|:(?:cross_entropy|nll_loss|log_softmax)$"),
    _rule("redistribution", r"_functional_collectives\.py:(?!__torch_dispatch__)|_redistribute\.py:|_context_parallel"),
)

GENERAL_RULES = (
    _rule(BACKWARD, r":backward$|autograd/\w+\.py:(?:_make_grads|_engine_run_backward)$"),
    _rule("parameter", r":(?:to_empty|init_states|init_weights|reset_parameters|_init_sharded_param|_apply)$"),
    _rule("activation", r":forward$|torch/nn/functional\.py:"),
)


def labels_of(metadata: str) -> dict[str, str]:
    """The `key=value` pairs of a `user_metadata` string such as `category=gradient;phase=backward;step=3`;
    whatever is written otherwise is ignored."""
    pairs = (part.partition("=") for part in re.split(r"[;|,]", printable(metadata)))
    return {key.strip(): value.strip() for key, sign, value in pairs if sign and key.strip() and value.strip()}


def category_of(block: BlockLife, *, history_has_stacks: bool) -> str:
    """The category of a block: of its holder at the end, else its label, else the first rule that holds, else that of
    its phase, else what its missing stack means.

    A block from before the history without a stack is `pre_window`. One allocated within it without a Python
    stack, where others have one, comes from autograd's own threads: `backward`.
    """
    if block.held_as is not None:
        return block.held_as
    labels = labels_of(block.metadata)
    label = labels.get("category")
    if label and label != _PHASE_LABELS.get(labels.get("phase", "")):
        return label
    stack = stack_text(block.frames)
    if category := _first_match(SPECIFIC_RULES, stack, block.stream):
        return category
    if label:
        return label
    if category := _first_match(GENERAL_RULES, stack, block.stream):
        return category
    if block.phase in _PHASE_LABELS:  # by a range: in the backward, gradients of activations as well
        return BACKWARD if block.phase == "backward" else _PHASE_LABELS[block.phase]
    if has_python_frames(block.frames):
        return UNKNOWN
    if block.allocated_at is None:
        return PRE_WINDOW
    return BACKWARD if history_has_stacks else UNKNOWN


def _first_match(rules: tuple[Rule, ...], stack: str, stream: int) -> str | None:
    if not stack:
        return None
    side = "default" if stream == 0 else "side"
    for rule in rules:
        if rule.stream in ("any", side) and all(pattern.search(stack) for pattern in rule.patterns):
            return rule.category
    return None
