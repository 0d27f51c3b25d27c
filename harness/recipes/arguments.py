"""The arguments of every command that takes a run: `--module`, `--config`, `--nproc` and dotted overrides."""

from __future__ import annotations

import argparse

from harness.config import Trainer
from harness.config_json import with_overrides
from harness.pipeline.requirements import with_table
from harness.recipes import BUILT_IN, load_config


def add_recipe_arguments(
    parser: argparse.ArgumentParser, *, module: str | None = None, config: str | None = None
) -> None:
    """`module` and `config` are defaults; without them the options are required."""
    shown = "" if module is None else f" (default: {module})"
    parser.add_argument(
        "--module",
        required=module is None,
        default=module,
        metavar="M",
        help=f"{', '.join(BUILT_IN)}; or your own: a .py file, or a dotted name under this folder (runs.mine){shown}",
    )
    shown = "" if config is None else f" (default: {config})"
    parser.add_argument(
        "--config",
        required=config is None,
        default=config,
        metavar="C",
        help=f"the function of M that returns the run{shown}",
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="number of ranks (the run's world_size)")
    parser.epilog = "Any field can be replaced: --training.steps 20 --parallelism.tp=1 (run --print-config lists all)."


def config_from(args: argparse.Namespace) -> Trainer.Config:
    """The run that the arguments mean, checked; raises `UsageError` in one line if it cannot be."""
    overrides = list(args.overrides)
    if args.nproc is not None:
        overrides.append(("world_size", str(args.nproc)))
    config = with_table(with_overrides(load_config(args.module, args.config), overrides))
    config.validate()
    return config
