"""`meshscope ledger`: predicted memory, communication and time of a run, next to what a recording of it measured."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

from harness import compare
from harness.allocator import Settings
from harness.allocator.conf import parse_conf
from harness.commands import add_json_argument
from harness.compare.pipeline import pipeline_of
from harness.compare.text import collectives
from harness.config import Trainer
from harness.errors import EXIT_OK, EXIT_PARTIAL, InputError, UsageError
from harness.ledger import Prediction, predict
from harness.ledger.operators import Target
from harness.ledger.text import report
from harness.recipes.arguments import add_recipe_arguments, config_from
from harness.report.pipeline import plan_text, render
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
    parser.add_argument(
        "--alloc-conf",
        metavar="CONF",
        help="settings of the CUDA allocator as in PYTORCH_ALLOC_CONF (default: those of --against, else torch's)",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="RECORDING",
        help="compare with what this recording, or folder of traces and snapshots, measured",
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help="calibration that the time of a step on GPUs is predicted with: a shipped one, a file of meshscope "
        "calibrate, or none (default: the shipped one of the recording's device, without a recording h200)",
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Exits 4 if what `--against` names lacks peaks or has files that cannot be read, 3 if nothing of it can be."""
    config = config_from(args)
    measured = compare.measure(args.against) if args.against else None
    recording = measured.recording if measured else None
    target: Target = (
        args.target
        or (compare.recorded_target(recording) if recording else None)
        or ("cpu" if config.training.device == "cpu" else "cuda")
    )
    if args.alloc_conf is not None and target == "cpu":
        raise UsageError(f"--alloc-conf {args.alloc_conf}: target cpu has no CUDA allocator; leave it out")
    settings = Settings() if args.alloc_conf is None else parse_conf(args.alloc_conf)
    if args.alloc_conf is None and recording is not None:
        settings = compare.recorded_settings(recording)
    prediction = predict(config, target, settings=settings)
    prediction.time = compare.time_of(config, target, measured, args.hardware)
    errors = _put_beside(prediction, config, measured) if measured else []
    rows = compare.communication(prediction, measured.captures) if measured else []
    pipeline = pipeline_of(config, measured.captures if measured else [])
    if args.json:
        found = compare.ledger_json(prediction, rows) | {"errors": [error.to_json() for error in errors]}
        if pipeline is not None:
            found["pipeline"] = pipeline.to_json()
        print(json.dumps(found, allow_nan=False))
    else:
        print(report(prediction))
        if pipeline is not None and pipeline.plan is not None:
            text = render(pipeline) if measured else plan_text(pipeline.plan, pipeline.passes)
            print("", *text, sep="\n")
        if any(row.measured_count is not None for row in rows):
            print("", *collectives(rows, compared=True), sep="\n")
        elif measured and measured.captures:
            print("\nNo complete step is in the traces: communication was not measured.")
    for error in errors:
        print(f"meshscope ledger: error: {one_line(str(error))}", file=sys.stderr)
    return EXIT_PARTIAL if errors else EXIT_OK


def _put_beside(prediction: Prediction, config: Trainer.Config, measured: compare.Measured) -> list[InputError]:
    """What is missing; raises `UsageError` if the recording is of another configuration."""
    compare.put_lines_beside(prediction, measured)
    recording = measured.recording
    if recording is None:
        return [InputError(measured.path, "is no recording: its peaks per step are unknown"), *measured.errors]
    compare.require_same(recording.manifest.get("config"), config)
    missing = compare.put_beside(prediction, recording)
    if all(rank.measured_peak_allocated_bytes is None for rank in prediction.ranks):
        missing = [InputError(recording.directory, "states no allocated peak of a step after the first")]
    # What is wrong with rows and manifest shows in the peaks that are missing.
    own = {str(error) for error in (*recording.errors, *compare.config_errors(recording))}
    stands = "" if measured.standing is None else measured.standing.headline()
    return missing + [e for e in measured.errors if str(e) not in own and not (stands and e.reason.startswith(stands))]
