"""An experiment read back from its folder: the plan, and the analysis made anew from the trials on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from harness.compare.metrics import NO_TRACE, Value
from harness.config_json import from_dict
from harness.errors import InputError, MeshscopeError
from harness.modes import Start
from harness.recording import Mode, read_json
from probes.analysis import Analysis, MetricsOf, analyse, refused
from probes.engine import survey
from probes.experiment import ANALYSIS, BUILD, MOST_PAIRS, PLAN, SCHEMA_VERSION, Experiment, Known
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
    started or changed. Trials that have not ended are in `progress.unfinished`; `metrics_of` is as for `analyse`. What
    only traces tell of trials whose traces are gone is what analysis.json, made when they were there, says of them.

    Raises `InputError` for a folder without a readable plan.
    """
    experiment = read_experiment(directory.resolve())
    said = _said_of_trials(experiment.directory)
    used: set[str] = set()

    def metrics(trial: Path, warmup: int) -> dict[str, Value]:
        found = metrics_of(trial, warmup)
        kept = _kept(found, said.get(trial.name, {}))
        used.update(kept)
        return found | kept

    try:
        analysis = analyse(experiment, survey(experiment), _said_of_the_build(directory), metrics)
    except RefusedError as error:
        return refused(experiment, str(error))
    if not used:
        return analysis
    note = f"{', '.join(sorted(used))}: as {ANALYSIS} has them, the trials are kept without their traces"
    return replace(analysis, notes=[*analysis.notes, note])


def _kept(found: Mapping[str, Value], said: Mapping[str, float | None]) -> dict[str, Value]:
    """What was `said` of a trial's traces where they are gone; nothing if it was said of another trial's steps."""
    if said.get("step_wall_ns") != found["step_wall_ns"].value:
        return {}
    return {
        name: Value(value=said[name], source=ANALYSIS)
        for name, value in found.items()
        if value.reason == NO_TRACE and said.get(name) is not None
    }


class _SaidOfTrial(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    values: dict[str, float | None]


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of analysis.json that tell the figures of trials."""

    trials: list[_SaidOfTrial]


def _said_of_trials(directory: Path) -> dict[str, dict[str, float | None]]:
    """Name of a trial's folder -> metric -> figure, as analysis.json has them; empty where there is none of this form,
    since everything else is read from the trials themselves."""
    try:
        said = msgspec.convert(read_json(directory / ANALYSIS), _Said)
    except (InputError, msgspec.ValidationError):
        return {}
    return {Path(trial.path).name: trial.values for trial in said.trials}


def _said_of_the_build(directory: Path) -> list[str]:
    path = directory / BUILD
    notes = read_json(path).get("notes") if path.exists() else None
    return [str(note) for note in notes] if isinstance(notes, list) else []
