"""Linear layers that multiply in float8: torchao's Float8Linear in the place of torch's, with the same parameters."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch

from harness import config
from harness.errors import UnavailableError
from harness.float8 import INSTALL, LINEARS, Left, Outcome, conversion
from harness.trainer.model.decoder import Decoder

NEEDS = (8, 9)
"""Compute capability of the first GPUs that multiply float8 (Ada; Hopper is 9.0)."""

NO_PEAK = "none: part of the products are float8, and no datasheet has a peak for the mix"


def convert_linears(model: Decoder, config: config.Trainer.Config, device: torch.device) -> Outcome | None:
    """Converts the linear layers that `harness.float8.conversion` names, of the layers that `model` has, and says what
    became of each, for the recording; None without a recipe.

    To be called on the meta model, before anything is sharded: names and parameters stay as they are, so that
    checkpoints of either kind load into the other. Raises `UnavailableError` without torchao, and on a GPU without
    float8 unless that is emulated.
    """
    float8 = config.float8
    if float8.recipe == "none":
        return None
    _require_kernels(float8.recipe, device, emulate=float8.emulate)
    convert, recipe_of = _torchao()
    plan = conversion(config)
    recipe = dataclasses.replace(recipe_of(float8.recipe), emulate=float8.emulate)
    for layer in model.layers.values():
        convert(layer, config=recipe, module_filter_fn=lambda _, name: name.split(".")[-1] in plan.converted)
    layers = len(model.layers)
    left = {name: Left(count=layers, reason=plan.left[name]) for name in LINEARS if name in plan.left and layers}
    if model.lm_head is not None:
        left["lm_head"] = Left(count=1, reason="the head is never converted")
    return {
        "recipe": float8.recipe,
        "torchao": version("torchao"),
        "emulated": float8.emulate,
        "gpu_has_float8": device.type == "cuda" and torch.cuda.get_device_capability(device) >= NEEDS,
        "converted": {name: layers for name in plan.converted if layers},
        "left": left,
    }


def _require_kernels(recipe: str, device: torch.device, *, emulate: bool) -> None:
    if emulate or device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < NEEDS:
        raise UnavailableError(
            f"float8.recipe={recipe}: {torch.cuda.get_device_name(device)} has compute capability "
            f"{found[0]}.{found[1]}, float8 products need {NEEDS[0]}.{NEEDS[1]} or above (Ada, Hopper): "
            "set the recipe to none, or float8.emulate to true to try out the values"
        )


def _torchao() -> tuple[Any, Any]:
    """The conversion and the recipes of torchao."""
    try:
        with _errors_only("torchao", "torch.utils._pytree"):  # they warn of kernels that this is not about
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UnavailableError(f"torchao cannot be imported ({error}): {INSTALL}") from None
    return convert_to_float8_training, Float8LinearConfig.from_recipe_name


@contextmanager
def _errors_only(*loggers: str) -> Iterator[None]:
    before = {logger: logger.level for logger in map(logging.getLogger, loggers)}
    try:
        for logger in before:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)
