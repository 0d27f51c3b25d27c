"""`meshscope ledger`: predicted memory and communication of a run, next to what a recording of it measured."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from harness.config import Trainer, to_dict
from harness.errors import EXIT_OK, EXIT_PARTIAL, InputError, UsageError
from harness.ledger import Prediction, predict
from harness.ledger.operators import Target
from harness.ledger.text import report
from harness.recipes.arguments import add_recipe_arguments, config_from
from harness.recording import Recording, read_recording

TAKES_OVERRIDES = True

TARGET_OF_SOURCE: dict[str, Target] = {"cuda_allocator": "cuda", "tensor_storages": "cpu"}
"""Where a recording's peaks come from -> the operator table that describes it."""

DECIDES_MEMORY = {
    "model": ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim"),
    "parallelism": ("dp_replicate", "cp", "tp", "pp", "sequence_parallel", "reshard_after_forward"),
    "training": ("micro_batch_size", "seq_len", "mixed_precision_param", "mixed_precision_reduce"),
    "optimizer": ("implementation",),
}


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
    measured = steady_peaks(recording, config) if recording else {}
    target: Target = args.target or _target_of(recording) or ("cpu" if config.training.device == "cpu" else "cuda")
    prediction = predict(config, target)
    errors = list(put_beside(prediction, measured, recording)) if recording else []
    if args.json:
        print(json.dumps(prediction.to_json() | {"errors": [e.to_json() for e in errors]}, allow_nan=False))
    else:
        print(report(prediction))
    for error in errors:
        print(f"meshscope ledger: error: {error}", file=sys.stderr)
    return EXIT_PARTIAL if errors else EXIT_OK


def steady_peaks(recording: Recording, config: Trainer.Config) -> dict[int, int]:
    """Rank -> highest allocated peak in bytes of its steps from the second on.

    Raises `UsageError` if the recording is of another configuration, `InputError` if it states no such peak.
    """
    _require_same(recording.manifest.get("config"), config)
    peaks: dict[int, int] = {}
    for rank, rows in recording.steps.items():
        found = [row["peak_allocated_bytes"] for row in rows if row.get("step", 0) >= 1 and _states_peak(row)]
        if found:
            peaks[rank] = max(found)
    if not peaks:
        raise InputError(recording.directory, "states no allocated peak of a step after the first")
    return peaks


def put_beside(prediction: Prediction, measured: dict[int, int], recording: Recording) -> Iterator[InputError]:
    """Fills in measured peaks and errors, 100·(predicted − measured)/measured; yields what is missing."""
    for rank in prediction.ranks:
        rank.measured_peak_allocated_bytes = peak = measured.get(rank.rank)
        if peak:
            rank.error_pct = 100 * (rank.peak_allocated_bytes - peak) / peak
        elif rank.rank in (recording.manifest.get("recorded_ranks") or range(prediction.world_size)):
            yield InputError(recording.directory, f"rank {rank.rank}: no allocated peak of a step after the first")


def _states_peak(row: dict[str, Any]) -> bool:
    return type(row.get("peak_allocated_bytes")) is int and row.get("memory_source") in TARGET_OF_SOURCE


def _target_of(recording: Recording | None) -> Target | None:
    rows = [row for rows in recording.steps.values() for row in rows if _states_peak(row)] if recording else []
    return TARGET_OF_SOURCE[rows[0]["memory_source"]] if rows else None


def _require_same(recorded: Any, config: Trainer.Config) -> None:
    """A recording of another trainer has no configuration of ours, or only parts: what is not there is not compared."""
    if not isinstance(recorded, dict):
        return
    ours = to_dict(config)
    pairs = [("world_size", recorded.get("world_size"), ours["world_size"])]
    for section, names in DECIDES_MEMORY.items():
        theirs = recorded.get(section)
        if isinstance(theirs, dict):
            pairs += [(f"{section}.{name}", theirs.get(name), ours[section][name]) for name in names]
    different = [f"{name} {theirs!r}, here {here!r}" for name, theirs, here in pairs if theirs not in (None, here)]
    if different:
        raise UsageError(f"--against is a recording of another configuration: it has {'; '.join(different)}")
