"""What a block holds: labels first, then the rules from the most specific on."""

from __future__ import annotations

import pytest

from harness.memory.categories import GENERAL_RULES, SPECIFIC_RULES, category_of, labels_of
from harness.memory.replay import BlockLife

from .build import frame

FSDP = "torch/distributed/fsdp/_fully_shard/"


def block(*frames: tuple[str, str], stream: int = 0, metadata: str = "", in_history: bool = True) -> BlockLife:
    stack = [frame(name, filename) for filename, name in frames]
    return BlockLife(1, stream, stack, metadata, allocated_at=0 if in_history else None)


def category(item: BlockLife, *, stacks: bool = True) -> str:
    return category_of(item, history_has_stacks=stacks)


FORWARD = ("train.py", "forward")
BACKWARD = (FSDP + "_fsdp_param_group.py", "post_backward")


def collective(name: str) -> tuple[str, str]:
    return FSDP + "_fsdp_collectives.py", name


def param(name: str) -> tuple[str, str]:
    return FSDP + "_fsdp_param.py", name


ADAM = "torch/optim/adam.py"
FUNCTIONAL = "torch/distributed/_functional_collectives.py"
CHECKPOINT = "torch/utils/checkpoint.py"
MODULE = "torch/nn/modules/module.py"
IN_FORWARD = "category=activation;phase=forward;step=3"  # what the recorder derives from the phase alone


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (block((ADAM, "_init_group"), (ADAM, "step")), "optimizer_state"),
        (block((ADAM, "_multi_tensor_adam"), ("train.py", "step")), "optimizer_temporary"),
        (block(collective("allocate"), collective("foreach_all_gather"), stream=3), "all_gather_output"),
        (block(collective("_get_param_all_gather_inputs"), collective("foreach_all_gather")), "all_gather_input"),
        (block(param("alloc_storage"), collective("foreach_all_gather_copy_out"), FORWARD), "unsharded_parameter"),
        (block(param("init_all_gather_outputs"), FORWARD), "unsharded_parameter"),
        (block(param("to_accumulated_grad_if_needed"), BACKWARD), "unsharded_gradient"),
        (block(collective("allocate"), collective("foreach_reduce"), BACKWARD), "reduce_scatter_input"),
        (block(collective("allocate"), collective("foreach_reduce"), BACKWARD, stream=5), "gradient"),
        (block(("torch/distributed/pipelining/stage.py", "_make_tensor_from_meta")), "pipeline_buffer"),
        (block(FORWARD, (CHECKPOINT, "unpack_hook")), "recompute"),
        (block(FORWARD, (CHECKPOINT, "checkpoint")), "activation"),
        (block(("torch/nn/functional.py", "cross_entropy"), ("train.py", "step")), "logits_loss"),
        (block((FUNCTIONAL, "all_gather_tensor"), FORWARD), "redistribution"),
        (block((FUNCTIONAL, "__torch_dispatch__"), FORWARD), "activation"),
        (block(("kernels.py", "backward"), ("torch/autograd/function.py", "apply")), "backward"),
        (block((MODULE, "_apply"), (MODULE, "to_empty")), "parameter"),
        (block(("torch/nn/functional.py", "silu"), ("train.py", "mlp")), "activation"),
        (block(("train.py", "helper")), "unknown"),
        (block(), "backward"),
        (block(("??", "at::native::mm")), "backward"),
        (block(in_history=False), "pre_window"),
        (block(FORWARD, in_history=False), "activation"),
        (block((ADAM, "_init_group"), metadata="phase=optimizer;category=gradient; step=3"), "gradient"),
        (block(FORWARD, metadata="phase=forward"), "activation"),
        (block(("train.py", "helper"), metadata=IN_FORWARD), "activation"),
        (block(param("alloc_storage"), FORWARD, metadata=IN_FORWARD), "unsharded_parameter"),
        (block(param("alloc_storage"), metadata="category=activation"), "activation"),
        (block(("train.py", "backward"), metadata="category=gradient;phase=backward"), "gradient"),
    ],
)
def test_category(item: BlockLife, expected: str) -> None:
    assert category(item) == expected


def test_without_any_stack_in_the_history_nothing_is_guessed() -> None:
    assert category(block(), stacks=False) == "unknown"


def test_every_rule_states_a_pattern() -> None:
    assert all(rule.patterns and rule.category.isidentifier() for rule in SPECIFIC_RULES + GENERAL_RULES)


@pytest.mark.parametrize(
    ("metadata", "labels"),
    [
        ("", {}),
        ("category=parameter;phase=forward;step=3", {"category": "parameter", "phase": "forward", "step": "3"}),
        (" category = a ; junk ; =x; y= ", {"category": "a"}),
        ("step=1|phase=bwd", {"step": "1", "phase": "bwd"}),
        ("anything else", {}),
    ],
)
def test_labels(metadata: str, labels: dict[str, str]) -> None:
    assert labels_of(metadata) == labels
