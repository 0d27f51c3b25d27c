"""The figures behind every picture of an experiment, apart from drawing: the HTML report and the dashboard share them.

Values come from `Analysis` (one number per trial and metric) and from the recordings of one trial of each arm.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from harness.compare import Measured, measure
from harness.compare.difference import facts
from harness.compare.steps import by_step
from harness.memory import Timeline
from harness.report.lanes import LanePicture, picture, traced_steps
from probes import surroundings
from probes.analysis import Analysis, ArmComparison, PairDifference
from probes.engine import voided
from probes.experiment import Experiment, Trial
from probes.reduce import COMPARED, after_warmup
from probes.stats import Comparison

INTERPRETER = "interpreter"
Key = TypeVar("Key")
TrialState = Literal["valid", "void", "outcome", "given up", "not ended"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A metric's value in one trial; `index` is the trial's place in the order in which they ran."""

    index: int
    pair: int
    arm: str
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """A metric's values in the valid trials of one arm, in the order in which they ran."""

    metric: str
    arm: str
    points: list[Point]

    @property
    def values(self) -> list[float]:
        return [point.value for point in self.points]


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """A metric's difference between an arm and the baseline in every pair, and the comparison made of them (mean,
    interval, threshold, verdict); all in `comparison.unit`."""

    metric: str
    arm: str
    baseline: str
    pairs: list[PairDifference]
    comparison: Comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRow:
    """One run of the experiment, whatever became of it; `number` counts the times that its pair had run before."""

    index: int
    pair: int
    arm: str
    number: int
    state: TrialState
    reason: str | None
    values: dict[str, float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTrace:
    """The time of each step of a trial (its slowest rank's), warm-up and windows included; `plain` marks those that
    the trial's figure is the median of."""

    index: int
    arm: str
    steps: list[int]
    wall_ns: list[int | None]
    plain: list[bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Differing:
    """Something that the arms do not share. `declared`: an arm sets it, so it may be the cause."""

    what: str
    values: dict[str, Any]
    declared: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignedMemory:
    """The memory history of one rank and device in each run, on axes that begin with its first event. `files` are the
    snapshots, `top_bytes` is the highest level of all curves."""

    rank: int | None
    device: int
    timelines: dict[str, Timeline]
    files: dict[str, str]
    top_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignedLanes:
    """One step of one rank in each run, as lanes over time from its first event on; `span_ns` is the longest."""

    rank: int | None
    step: int | None
    pictures: dict[str, LanePicture]
    span_ns: int


def distributions(analysis: Analysis) -> list[Distribution]:
    """Per metric and arm, metrics in the order of `COMPARED`; those without a value are left out."""
    found = []
    for metric in COMPARED:
        for arm in analysis.experiment.run_arms:
            points = [
                Point(index=trial.index, pair=trial.pair, arm=arm.name, value=value)
                for trial, values in sorted(analysis.values.items(), key=lambda item: item[0].index)
                if trial.arm == arm.name and (value := values[metric].value) is not None
            ]
            if points:
                found.append(Distribution(metric=metric, arm=arm.name, points=points))
    return found


def paired_differences(analysis: Analysis) -> list[Paired]:
    """One item per arm and metric that was compared; the metric that decides first."""
    primary, baseline = analysis.experiment.primary, analysis.experiment.baseline.name
    return [
        Paired(
            metric=comparison.metric,
            arm=item.arm,
            baseline=baseline,
            pairs=[pair for pair in item.pairs if pair.metric == comparison.metric],
            comparison=comparison,
        )
        for item in analysis.comparisons
        for comparison in sorted(item.metrics, key=lambda metric: metric.metric != primary)
    ]


def deciding(analysis: Analysis, item: ArmComparison) -> Comparison | None:
    """The comparison of the metric that decides about an arm."""
    return next((metric for metric in item.metrics if metric.metric == analysis.experiment.primary), None)


def run_order(analysis: Analysis) -> list[TrialRow]:
    """Every trial in the order in which it ran, those that were set aside before the one that replaced them."""
    experiment, progress = analysis.experiment, analysis.progress
    again: dict[int, list[TrialRow]] = {}
    for item in voided(experiment):
        trial = next(trial for trial in experiment.order() if trial.index == item["index"])
        reason = item["reason"] or "its pair ran again"
        again.setdefault(trial.index, []).append(_row(trial, "void", reason, number=item["void"] - 1))
    rows = []
    for trial in experiment.order():
        before = sorted(again.get(trial.index, []), key=lambda row: row.number)
        rows += before
        judged = progress.trials.get(trial)
        values = {name: value.value for name, value in analysis.values.get(trial, {}).items()}
        if judged is not None:
            state: TrialState = "outcome" if judged.state == "outcome" else "valid"
            rows.append(_row(trial, state, judged.reason, number=len(before), values=values))
        elif trial.pair in progress.dropped:
            rows.append(_row(trial, "given up", progress.dropped[trial.pair], number=len(before)))
        elif trial in progress.unfinished:
            rows.append(_row(trial, "not ended", progress.unfinished[trial], number=len(before)))
    return rows


def _row(
    trial: Trial, state: TrialState, reason: str | None, *, number: int, values: dict[str, float | None] | None = None
) -> TrialRow:
    return TrialRow(
        index=trial.index,
        pair=trial.pair,
        arm=trial.arm,
        number=number,
        state=state,
        reason=reason,
        values=values or {},
    )


def step_traces(analysis: Analysis) -> list[StepTrace]:
    """Of every valid trial; none in a rehearsal, which has no times."""
    found = []
    for trial, judged in analysis.progress.trials.items():
        if judged.state != "valid" or judged.recording is None:
            continue
        steps = by_step(judged.recording)
        if any(step["wall_ns"] is not None for step in steps):
            found.append(
                StepTrace(
                    index=trial.index,
                    arm=trial.arm,
                    steps=[step["step"] for step in steps],
                    wall_ns=[step["wall_ns"] for step in steps],
                    plain=[step["plain"] and step["step"] >= analysis.experiment.warmup for step in steps],
                )
            )
    return found


def middle_trials(analysis: Analysis) -> dict[str, Trial]:
    """For each arm that ran the valid trial whose value of the deciding metric is the (lower) median; where that is
    not known its first."""
    found = {}
    for arm in analysis.experiment.run_arms:
        trials = sorted(analysis.progress.valid(arm.name), key=lambda trial: trial.index)
        known = [
            (value, trial)
            for trial in trials
            if (value := analysis.values[trial][analysis.experiment.primary].value) is not None
        ]
        if known:
            middle = statistics.median_low([value for value, _ in known])
            found[arm.name] = next(trial for value, trial in known if value == middle)
        elif trials:
            found[arm.name] = trials[0]
    return found


def measure_middle(analysis: Analysis) -> dict[str, Measured]:
    """`middle_trials` read whole: traces and snapshots too."""
    experiment = analysis.experiment
    return {arm: measure(experiment.trial_directory(trial)) for arm, trial in middle_trials(analysis).items()}


def differing(experiment: Experiment, runs: Mapping[str, Measured]) -> list[Differing]:
    """What the arms set, then what else their recordings do not share; a value is None where there is none."""
    arms = experiment.arms
    variables = dict.fromkeys(name for arm in arms for name in arm.environment)
    fields = dict.fromkeys(name for arm in arms for name in arm.overrides)
    found = [
        Differing(what=name, values={arm.name: arm.environment.get(name) for arm in arms}, declared=True)
        for name in variables
    ]
    found += [
        Differing(what=name, values={arm.name: arm.overrides.get(name) for arm in arms}, declared=True)
        for name in fields
    ]
    pythons = {arm.name: arm.python.words() if arm.python else None for arm in arms}
    if any(pythons.values()):
        found.append(Differing(what=INTERPRETER, values=pythons, declared=True))
    stated = {arm: facts(run) for arm, run in runs.items()}
    for what in dict.fromkeys(name for of_arm in stated.values() for name in of_arm):
        values = {arm: of_arm.get(what) for arm, of_arm in stated.items()}
        known = what.rpartition(": ")[2] in variables or what.removeprefix("config.") in fields
        if not known and any(value != next(iter(values.values())) for value in values.values()):
            found.append(Differing(what=what, values=values, declared=False))
    return found


def aligned_memory(runs: Mapping[str, Measured]) -> AlignedMemory | None:
    """Of the rank and device that all runs have a history of, with the highest active peak in any run. None where
    there is no such rank."""
    histories = {name: _histories(run) for name, run in runs.items()}
    shared = shared_keys(list(histories.values()))
    if not shared:
        return None
    rank, device = key = max(shared, key=lambda key: max(of[key][1].peak("active").bytes for of in histories.values()))
    timelines = {name: of_run[key][1] for name, of_run in histories.items()}
    return AlignedMemory(
        rank=rank,
        device=device,
        timelines=timelines,
        files={name: of_run[key][0] for name, of_run in histories.items()},
        top_bytes=max(max(t.peak("active").bytes, t.peak("reserved").bytes) for t in timelines.values()),
    )


def _histories(run: Measured) -> dict[tuple[int | None, int], tuple[str, Timeline]]:
    """Rank and device -> file and timeline; of several snapshots of a rank the last."""
    return {
        (source.rank, device.index): (str(source.path), device.timeline)
        for source, device in (run.snapshots.devices if run.snapshots else [])
        if device.timeline is not None
    }


def peaks_by_step(run: Measured, warmup: int = 0) -> list[dict[str, Any]]:
    """The highest peaks over the ranks (bytes, None where a row does not state one) of each step after warm-up: what
    there is of memory over time without a history."""
    names = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes", "peak_rss_bytes")
    return [
        {"step": step["step"]}
        | {
            name: max((peak for rank in step["ranks"].values() if (peak := rank[name]) is not None), default=None)
            for name in names
        }
        for step in after_warmup(run, warmup).steps
    ]


def aligned_lanes(runs: Mapping[str, Measured]) -> AlignedLanes | None:
    """Of the rank and step that all runs have a complete trace of, with most exposed communication in any run. None
    where there is no such step."""
    traced = {
        name: {(step.capture.rank, step.number): step for step in traced_steps(run.complete_captures)}
        for name, run in runs.items()
    }
    shared = shared_keys(list(traced.values()))
    if not shared:
        return None
    rank, number = key = max(shared, key=lambda key: max(steps[key].exposed_ns for steps in traced.values()))
    pictures = {
        name: picture(steps[key].capture, steps[key].device, steps[key].place) for name, steps in traced.items()
    }
    span = max(one.span_ns for one in pictures.values())
    return AlignedLanes(rank=rank, step=number, pictures=pictures, span_ns=span)


def shared_keys(runs: Sequence[Mapping[Key, Any]]) -> list[Key]:
    """The keys that all have, in the order of the first."""
    return [key for key in runs[0] if all(key in other for other in runs[1:])] if runs else []


def sampled_gpus(trials: Sequence[Trial], experiment: Experiment) -> list[dict[str, Any]]:
    """Per GPU what NVML said while the trials ran: uuid, lowest and highest SM clock (MHz), temperature (°C) and power
    (W), and every reason for which its clock was lowered."""
    samples: dict[str, list[dict[str, Any]]] = {}
    for trial in trials:
        directory = experiment.trial_directory(trial)
        around = surroundings.read(directory) if surroundings.path_of(directory).exists() else {}
        for sample in around.get("samples") or []:
            for gpu in sample["gpus"]:
                samples.setdefault(str(gpu["uuid"]), []).append(gpu)
    return [
        {"uuid": uuid, "index": mine[0]["index"]}
        | {name: _range([gpu[name] for gpu in mine]) for name in ("sm_clock_mhz", "temperature_c", "power_w")}
        | {"clock_reasons": sorted({reason for gpu in mine for reason in gpu["clock_reasons"] or ()})}
        for uuid, mine in sorted(samples.items())
    ]


def _range(values: Sequence[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None
