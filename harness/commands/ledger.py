"""`meshscope ledger`: predicted memory and communication of a run, next to what a recording of it measured."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

from harness import compare
from harness.config import Trainer
from harness.errors import EXIT_OK, EXIT_PARTIAL, InputError
from harness.ledger import Prediction, predict
from harness.ledger.operators import Target
from harness.ledger.text import report
from harness.recipes.arguments import add_recipe_arguments, config_from
from harness.recording import Recording, read_recording
from harness.text import one_line

TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument(
        "--target",
        choices=get_args(Target),
        help="operator table: cuda kernels, or the storages that a CPU run tracks (default: that of --against, "
        "else training.device, else cuda)",
    )
    parser.add_argument("--against", type=Path, metavar="RECORDING", help="compare with what this recording measured")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Exits 4 if `--against` names a recording that lacks peaks of some ranks, 3 if it has none at all."""
    config = config_from(args)
    recording = read_recording(args.against) if args.against else None
    target: Target = (
        args.target
        or (compare.recorded_target(recording) if recording else None)
        or ("cpu" if config.training.device == "cpu" else "cuda")
    )
    prediction = predict(config, target)
    errors = _put_beside(prediction, config, recording) if recording else []
    if args.json:
        print(json.dumps(prediction.to_json() | {"errors": [e.to_json() for e in errors]}, allow_nan=False))
    else:
        print(report(prediction))
    for error in errors:
        print(f"meshscope ledger: error: {one_line(str(error))}", file=sys.stderr)
    return EXIT_PARTIAL if errors else EXIT_OK


def _put_beside(prediction: Prediction, config: Trainer.Config, recording: Recording) -> list[InputError]:
    """Raises `UsageError` if the recording is of another configuration, `InputError` if it states no peak at all."""
    compare.require_same(recording.manifest.get("config"), config)
    missing = compare.put_beside(prediction, recording)
    if all(rank.measured_peak_allocated_bytes is None for rank in prediction.ranks):
        raise InputError(recording.directory, "states no allocated peak of a step after the first")
    return missing
