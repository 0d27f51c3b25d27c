"""An experiment read back from its folder: the plan, and the analysis made anew from the trials on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from harness.config_json import from_dict
from harness.errors import InputError, MeshscopeError
from harness.modes import Start
from harness.recording import Mode, read_json
from probes.analysis import Analysis, MetricsOf, analyse, refused
from probes.engine import survey
from probes.experiment import BUILD, MOST_PAIRS, PLAN, SCHEMA_VERSION, Experiment, Known
from probes.knobs import KNOBS, Arm, Knob, variable_knob
from probes.reduce import trial_metrics
from probes.validity import RefusedError


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of experiment.json that make an `Experiment`."""

    knob: str
    hypothesis: str
    mode: Mode
    primary: str
    thresholds: dict[str, float | None]
    pairs: int
    seed: int
    warmup_steps: int
    timeout_s: float
    arms: list[Arm]
    not_run: dict[str, Known]
    gpus: int
    rehearsed_ranks: list[int]
    environment: dict[str, str]
    config: dict[str, Any]
    schema_version: int


def is_experiment(path: Path) -> bool:
    return (path / PLAN).is_file()


def read_experiment(directory: Path) -> Experiment:
    """The plan in a folder. Raises `InputError` if it is not one, or of a later version."""
    path = directory / PLAN
    document = read_json(path)
    version = document.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise InputError(path, f"has schema_version {version}; this meshscope reads up to {SCHEMA_VERSION}: update it")
    try:
        plan = msgspec.convert(document, _Plan)
        config = from_dict(plan.config)
    except (msgspec.ValidationError, MeshscopeError) as error:
        raise InputError(path, f"is not the plan of an experiment: {error}") from None
    if not (plan.arms and plan.arms[0].name not in plan.not_run and plan.pairs >= 1):
        raise InputError(path, "is not the plan of an experiment: it has no arm to run")
    if plan.pairs > MOST_PAIRS:
        raise InputError(path, f"is not the plan of an experiment: {plan.pairs} pairs, {MOST_PAIRS:,} at most")
    start = Start(mode=plan.mode, why="as planned", rehearsed=plan.rehearsed_ranks, environment=plan.environment)
    return Experiment(
        directory=directory,
        knob=_knob(plan),
        arms=plan.arms,
        not_run=plan.not_run,
        config=config,
        mode=plan.mode,
        gpus=plan.gpus,
        starts={arm.name: start for arm in plan.arms if arm.name not in plan.not_run},
        pairs=plan.pairs,
        seed=plan.seed,
        warmup=plan.warmup_steps,
        primary=plan.primary,
        thresholds=plan.thresholds,
        timeout_s=plan.timeout_s,
    )


def _knob(plan: _Plan) -> Knob:
    """The knob of that name, with the hypothesis that the experiment was made for."""
    return replace(KNOBS.get(plan.knob) or variable_knob(plan.knob), hypothesis=plan.hypothesis)


def read_analysis(directory: Path, metrics_of: MetricsOf = trial_metrics) -> Analysis:
    """The analysis of the trials that are there, by the functions that `meshscope probe` itself uses; nothing is
    started or changed. Trials that have not ended are in `progress.unfinished`; `metrics_of` is as for `analyse`.

    Raises `InputError` for a folder without a readable plan.
    """
    experiment = read_experiment(directory.resolve())
    try:
        return analyse(experiment, survey(experiment), _said_of_the_build(directory), metrics_of)
    except RefusedError as error:
        return refused(experiment, str(error))


def _said_of_the_build(directory: Path) -> list[str]:
    path = directory / BUILD
    notes = read_json(path).get("notes") if path.exists() else None
    return [str(note) for note in notes] if isinstance(notes, list) else []
