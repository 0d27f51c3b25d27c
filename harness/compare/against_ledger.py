"""Measured beside predicted: joins a recording with the ledger's prediction for its own configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.allocator import Settings
from harness.allocator.conf import parse_conf
from harness.config import Trainer
from harness.config_json import from_dict, to_dict
from harness.errors import InputError, UsageError
from harness.ledger import Prediction
from harness.ledger.operators import Target
from harness.recording import Recording, manifest_path
from harness.trace import Capture, collective_counts, complete

TARGET_OF_SOURCE: dict[str, Target] = {"cuda_allocator": "cuda", "tensor_storages": "cpu"}
"""Where a recording's peaks come from -> the operator table that describes it."""

CONF_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch reads the second only where the first is not set (c10/core/AllocatorConfig.h)."""

DECIDES_MEMORY = {
    "model": ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "tied_embeddings"),
    "parallelism": (
        *("dp_replicate", "cp", "cp_attention", "cp_load_balance", "tp", "pp"),
        *("sequence_parallel", "reshard_after_forward"),
    ),
    "pipeline": (
        "schedule",
        "micro_batches",
        "stages_per_rank",
        "first_stage_less_layers",
        "last_stage_less_layers",
        "split",
        "table",
    ),
    "training": (
        "micro_batch_size",
        "accumulation_steps",
        "seq_len",
        "mixed_precision_param",
        "mixed_precision_reduce",
        "cpu_offload",
    ),
    "optimizer": ("implementation",),
}


Key = tuple[int | None, str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """Collectives of one kind in one mesh dimension, a step: predicted and recorded, None where one is unknown.

    `agree`: every rank and recorded step has exactly the predicted count, and bytes where its trace says them; None
    without both. `pipeline_rank` is that of the ranks it is about, None where all ranks are alike.
    """

    dimension: str
    kind: str
    predicted_count: int | None
    predicted_bytes: int | None
    measured_count: int | None
    measured_bytes: int | None
    agree: bool | None
    pipeline_rank: int | None = None


def recorded_config(recording: Recording) -> Trainer.Config | None:
    """The configuration of a run of this trainer; None for a recording of any other training loop, and for one that
    `config_errors` names."""
    try:
        return _config_of(recording)
    except UsageError:
        return None


def config_errors(recording: Recording) -> list[InputError]:
    """Why the manifest's configuration is none that this trainer could have run, if so."""
    try:
        _config_of(recording)
    except UsageError as error:
        return [InputError(manifest_path(recording.directory), f"config: {error}: nothing is predicted for it")]
    return []


def _config_of(recording: Recording) -> Trainer.Config | None:
    tree = recording.manifest.get("config")
    if not isinstance(tree, dict) or "model" not in tree:
        return None
    config = from_dict(tree)
    config.validate()
    return config


def recorded_target(recording: Recording) -> Target | None:
    """The operator table that describes what was measured; None where no step states allocated bytes."""
    for rows in recording.steps.values():
        for row in rows:
            if states_peak(row):
                return TARGET_OF_SOURCE[row["memory_source"]]
    return None


def states_peak(row: dict[str, Any]) -> bool:
    """Whether a step row has a peak that a prediction can be held against."""
    peak = row.get("peak_allocated_bytes")
    return type(peak) is int and peak > 0 and row.get("memory_source") in TARGET_OF_SOURCE


def steady_peaks(recording: Recording, name: str = "peak_allocated_bytes") -> dict[int, int]:
    """Rank -> highest peak in bytes of its steps from the second on (the first has no optimizer states)."""
    peaks: dict[int, int] = {}
    for rank, rows in recording.steps.items():
        found = [row[name] for row in rows if row.get("step", 0) >= 1 and states_peak(row) and row.get(name)]
        if found:
            peaks[rank] = max(found)
    return peaks


def recorded_settings(recording: Recording) -> Settings:
    """The CUDA allocator's, as the environment of the first rank has them, which is the same in all; torch's defaults
    where it says nothing. Raises `UsageError` for one that torch would not take."""
    for document in recording.ranks.values():
        environment = document.get("environment_before") or {}
        for name in CONF_VARIABLES:
            if name in environment:
                return parse_conf(environment[name])
    return Settings()


def put_beside(prediction: Prediction, recording: Recording) -> list[InputError]:
    """Fills measured peaks and errors, 100·(predicted − measured)/measured, into `prediction`; returns what lacks."""
    measured, reserved = steady_peaks(recording), steady_peaks(recording, "peak_reserved_bytes")
    expected = recording.manifest.get("recorded_ranks") or range(prediction.world_size)
    missing = []
    for rank in prediction.ranks:
        rank.measured_peak_allocated_bytes = peak = measured.get(rank.rank)
        rank.measured_peak_reserved_bytes = held = reserved.get(rank.rank)
        if held and rank.peak_reserved_bytes is not None:
            rank.reserved_error_pct = 100 * (rank.peak_reserved_bytes - held) / held
        if peak:
            rank.error_pct = 100 * (rank.peak_allocated_bytes - peak) / peak
        elif rank.rank in expected:
            missing.append(
                InputError(recording.directory, f"rank {rank.rank}: no allocated peak of a step after the first")
            )
    return missing


def require_same(recorded: Any, config: Trainer.Config) -> None:
    """Raises `UsageError` if the recorded configuration differs from `config` in what decides memory.

    A recording of another trainer has no configuration of ours, or only parts: what is not there is not compared.
    """
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


def communication(prediction: Prediction | None, captures: Sequence[Capture]) -> list[Communication]:
    """Per mesh dimension and kind, what a step should send and what the traced steps sent; of a pipeline for each of
    its ranks.

    Measured figures are those that most ranks and steps have. Steps known to be incomplete (`Capture.incomplete`) and
    collectives outside every step are left out.
    """
    predicted: dict[Key, tuple[int, int]] = {
        (c.pipeline_rank, c.dimension, c.kind): (c.count, c.bytes)
        for c in (prediction.communication if prediction else ())
    }
    ranks_of_stage = _ranks_of_stage(prediction)
    seen: dict[Key, list[tuple[int, int | None]]] = {}
    steps_of: dict[int | None, set[tuple[int | None, int]]] = {}
    for capture in complete(captures):
        stage = None if ranks_of_stage is None or capture.rank is None else capture.rank // ranks_of_stage
        for item in collective_counts(capture.records()):
            if item["step"] is not None:
                steps_of.setdefault(stage, set()).add((item["rank"], item["step"]))
                key = (stage, axis_of(item["dimension"]), item["kind"])
                seen.setdefault(key, []).append((item["count"], item["bytes"]))

    rows = []
    for key in sorted(predicted.keys() | seen.keys(), key=lambda k: (k[0] or 0, *k[1:])):
        found, steps = seen.get(key, []), steps_of.get(key[0], set())
        usual = max(set(found), key=found.count) if found else ((0, 0) if steps else (None, None))
        nothing: tuple[int, int] | tuple[None, None] = (0, 0) if prediction else (None, None)
        want = predicted.get(key) or nothing
        agree = None
        if prediction and steps:
            agree = (len(found) == len(steps) if want != (0, 0) else not found) and all(
                count == want[0] and size in (want[1], None) for count, size in found
            )
        rows.append(
            Communication(
                pipeline_rank=key[0],
                dimension=key[1],
                kind=key[2],
                predicted_count=want[0],
                predicted_bytes=want[1],
                measured_count=usual[0],
                measured_bytes=usual[1],
                agree=agree,
            )
        )
    return rows


def _ranks_of_stage(prediction: Prediction | None) -> int | None:
    """How many ranks each pipeline rank has, which are numbered one after the other; None without a pipeline."""
    stages = {c.pipeline_rank for c in prediction.communication} - {None} if prediction else set()
    return prediction.world_size // len(stages) if prediction and stages else None


def ledger_json(prediction: Prediction, rows: Sequence[Communication]) -> dict[str, Any]:
    """`Prediction.to_json` with what was measured of each collective beside it; one that nobody predicted has 0."""
    measured = [
        {
            "dimension": row.dimension,
            "kind": row.kind,
            "count": row.predicted_count,
            "bytes": row.predicted_bytes,
            "measured_count": row.measured_count,
            "measured_bytes": row.measured_bytes,
            "agree": row.agree,
            **({} if row.pipeline_rank is None else {"pipeline_rank": row.pipeline_rank}),
        }
        for row in rows
    ]
    return prediction.to_json() | ({"communication": measured} if measured else {})


def axis_of(dimension: str) -> str:
    """The mesh axis of a process group's description: torch calls the group of axis `tp` `mesh_tp`."""
    return dimension.removeprefix("mesh_")
