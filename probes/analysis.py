"""From the trials of an experiment to its verdict: pairs compared by `stats`, losses held against one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from harness.compare.metrics import Value
from harness.compare.runs import LABELLED_MODES, Verdict
from harness.text import one_line
from probes import stats
from probes.engine import Progress, voided
from probes.experiment import Experiment, Known, Trial, scale_of
from probes.in_effect import uncaptured
from probes.queue_arms import QueueStudy, read_for
from probes.reduce import COMPARED, losses, trial_metrics

Dead = Literal["ignored by this build", "unavailable in this build"]
MetricsOf = Callable[[Path, int], dict[str, Value]]

SCHEMA_VERSION = 1
LOSS_TOLERANCE = 1e-2
"""Relative; beyond it, and beyond what trials of one arm differ by, arms do not train the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairDifference:
    """One metric in one pair: the baseline's trial `a`, the arm's `b`, and b against a in `unit` (percent of a, points
    or bytes)."""

    metric: str
    pair: int
    a: float
    b: float
    difference: float
    unit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmComparison:
    """One arm against the baseline. `pairs` are what `metrics` are made of, `reason` says what decided where it was no
    metric."""

    arm: str
    verdict: Verdict | Dead
    metrics: list[stats.Comparison]
    pairs: list[PairDifference] = field(default_factory=list)
    reason: str | None = None
    needed_pairs: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """What an experiment says. `decided` is False where nothing can be said because its trials failed."""

    experiment: Experiment
    verdict: Verdict | Dead
    comparisons: list[ArmComparison]
    comparable: bool
    notes: list[str]
    progress: Progress = field(default_factory=Progress)
    values: dict[Trial, dict[str, Value]] = field(default_factory=dict)
    sees_pct: dict[str, float] = field(default_factory=dict)
    """Metric -> the smallest effect (percent) that these pairs find four times in five, from an A/A."""
    decided: bool = True
    queues: QueueStudy | None = None
    """The hardware queues of the arms' contexts, where the arms set their number."""

    def recommended(self) -> ArmComparison | None:
        """The arm that is better, by the largest effect on the deciding metric if several are."""
        found = [item for item in self.comparisons if item.verdict == "better"]
        return max(found, key=lambda item: self._gain(item), default=None) if self.comparable else None

    def _gain(self, item: ArmComparison) -> float:
        primary = next((m for m in item.metrics if m.metric == self.experiment.primary), None)
        if primary is None or primary.effect_pct is None:
            return math.inf if primary is None else 0.0
        return -primary.effect_pct if primary.better == "lower" else primary.effect_pct

    def failures(self) -> list[str]:
        """Why arms did not run, where that leaves nothing to say."""
        if self.decided:
            return []
        return [f"arm {arm} {kind}: {reason}" for arm, (kind, reason) in self.progress.outcomes.items()] + [
            f"a pair was given up: {reason}" for reason in self.progress.dropped.values()
        ]

    def to_json(self) -> dict[str, Any]:
        """The object of `meshscope probe --json`, and analysis.json."""
        experiment = self.experiment
        best = self.recommended()
        return {
            "schema_version": SCHEMA_VERSION,
            "mode": experiment.mode,
            "verdict": self.verdict,
            "metrics": [{"arm": item.arm, **metric.to_json()} for item in self.comparisons for metric in item.metrics],
            "arms": [self._arm(arm.name) | arm.to_json() for arm in experiment.arms],
            "comparable": self.comparable,
            "notes": self.notes,
            "errors": [],
            "comparisons": [
                {"arm": i.arm, "baseline": experiment.baseline.name, "verdict": i.verdict, "reason": i.reason}
                for i in self.comparisons
            ],
            "recommended": best and {"arm": best.arm, **_settings(experiment, best.arm)},
            "pairs": [{"arm": item.arm, **asdict(pair)} for item in self.comparisons for pair in item.pairs],
            "sees_pct": self.sees_pct,
            "queues": self.queues and self.queues.to_json(),
            "experiment": {"path": str(experiment.directory), **experiment.to_json()},
            "trials": [self._trial(trial) for trial in self.progress.trials],
            "voided": voided(experiment),
            "unfinished": [
                {"index": trial.index, "pair": trial.pair, "arm": trial.arm, "reason": reason}
                for trial, reason in self.progress.unfinished.items()
            ],
            "dropped": [{"pair": pair, "reason": reason} for pair, reason in self.progress.dropped.items()],
        }

    def _arm(self, name: str) -> dict[str, Any]:
        outcome = self.progress.outcomes.get(name)
        known = self.experiment.not_run.get(name)
        return {
            "runs": len(self.progress.valid(name)),
            "outcome": outcome and {"kind": outcome[0], "reason": outcome[1]},
            "not_run": known and known.reason,
        }

    def _trial(self, trial: Trial) -> dict[str, Any]:
        judged = self.progress.trials[trial]
        return {
            "index": trial.index,
            "pair": trial.pair,
            "arm": trial.arm,
            "path": str(self.experiment.trial_directory(trial)),
            "state": judged.state,
            "reason": judged.reason,
            "values": {name: value.value for name, value in self.values.get(trial, {}).items()},
        }


def _settings(experiment: Experiment, arm: str) -> dict[str, Any]:
    found = experiment.arm(arm)
    return {name: value for name, value in found.to_json().items() if name != "name"}


def without_trials(experiment: Experiment, known: Known, notes: list[str]) -> Analysis:
    """For a verdict that is known before any trial."""
    return Analysis(experiment=experiment, verdict=known.verdict, comparisons=[], comparable=True, notes=notes)


def refused(experiment: Experiment, reason: str) -> Analysis:
    """Where trials differ in something that no arm declares."""
    return Analysis(
        experiment=experiment, verdict="inconclusive", comparisons=[], comparable=False, notes=[reason], decided=False
    )


def analyse(
    experiment: Experiment, progress: Progress, notes: Sequence[str] = (), metrics_of: MetricsOf = trial_metrics
) -> Analysis:
    """Compares every arm with the first; `metrics_of` is `trial_metrics`, or that with a memory. Raises `InputError`
    for a recording that cannot be read any more."""
    valid = [trial for trial, judged in progress.trials.items() if judged.state == "valid"]
    values = {trial: metrics_of(experiment.trial_directory(trial), experiment.warmup) for trial in valid}
    queues = read_for(experiment)
    found = [*notes, *(queues.notes if queues else []), *progress.notes]
    comparisons = []
    rest, not_run = [arm.name for arm in experiment.run_arms[1:]], experiment.not_run
    for arm in rest:
        comparison, more = _compare(experiment, progress, values, arm, 1 - 0.05 / len(rest))
        judged = (progress.trials[trial] for trial in valid if trial.arm == arm)
        if left_out := uncaptured(one.recording for one in judged if one.recording is not None):
            none_at_all, reason = left_out
            more.append(f"{arm}: {reason}")
            if none_at_all:
                comparison = replace(comparison, verdict="ignored by this build", reason=reason)
        comparisons.append(comparison)
        found += more
    if len(rest) > 1:
        found.append(
            f"{len(rest)} arms are compared with {experiment.baseline.name}: each interval is for "
            f"{100 * (1 - 0.05 / len(rest)):.3g} %, so that all hold together at 95 % (Bonferroni)"
        )
    decided = any(item.metrics or item.reason for item in comparisons)
    if progress.unfinished:
        comparisons = [_so_far(experiment, progress, item) for item in comparisons]
    verdict = _overall([item.verdict for item in comparisons])
    comparisons += [ArmComparison(arm=n, verdict=k.verdict, metrics=[], reason=k.reason) for n, k in not_run.items()]
    same, more = _same_training(experiment, progress)
    found += more
    if why := LABELLED_MODES.get(experiment.mode):
        found.append(f"mode {experiment.mode} ({why}): times are not a cluster's")
    found += [f"arm {arm} {kind}: {reason}" for arm, (kind, reason) in progress.outcomes.items()]
    found += [f"a pair was given up: {reason}" for reason in progress.dropped.values()]
    if runs_again := {(item["pair"], item["void"]) for item in voided(experiment)}:
        found.append(f"{len(runs_again)} void pair{'s' * (len(runs_again) > 1)} ran again, for reasons set in advance")
    return Analysis(
        experiment=experiment,
        verdict=verdict if same else "inconclusive",
        comparisons=comparisons,
        comparable=same,
        notes=found,
        progress=progress,
        values=values,
        sees_pct=_sees(experiment, values) if experiment.is_aa() else {},
        decided=decided,
        queues=queues,
    )


def _compare(
    experiment: Experiment,
    progress: Progress,
    values: dict[Trial, dict[str, Value]],
    arm: str,
    confidence: float,
) -> tuple[ArmComparison, list[str]]:
    by_outcome = _by_outcome(experiment, progress, arm)
    if by_outcome is not None:
        return by_outcome, []
    of_a, of_b = ({t.pair: v for t, v in values.items() if t.arm == name} for name in (experiment.baseline.name, arm))
    shared = sorted(of_a.keys() & of_b.keys())
    if len(shared) < 2:
        return ArmComparison(arm=arm, verdict="inconclusive", metrics=[]), [
            f"{arm}: {len(shared)} valid pairs with {experiment.baseline.name}; an interval needs 2"
        ]
    compared, pairs, notes = [], [], []
    for name, metric in COMPARED.items():
        if experiment.mode == "rehearsal" and not metric.is_bytes:  # one process shows no cluster's times
            continue
        a, b = [of_a[pair][name] for pair in shared], [of_b[pair][name] for pair in shared]
        numbers_a = [value.value for value in a if value.value is not None]
        numbers_b = [value.value for value in b if value.value is not None]
        sources = {value.source for value in (*a, *b)}
        if not (numbers_a and numbers_b):
            if name == experiment.primary:
                notes.append(f"{name} is not known: {next(v.reason for v in (*a, *b) if v.value is None)}")
            continue
        if len(numbers_a) + len(numbers_b) < 2 * len(shared) or len(sources) > 1:
            notes.append(f"{arm}: {name} is not known, or not from the same source, in every trial: not compared")
            continue
        try:
            compared.append(
                stats.compare_pairs(
                    name,
                    numbers_a,
                    numbers_b,
                    better=metric.better,
                    scale=scale_of(name),
                    threshold=experiment.thresholds.get(name),
                    confidence=confidence,
                )
            )
        except ValueError as error:
            notes.append(f"{arm}: {one_line(str(error))}")
            continue
        pairs += _pairs(name, shared, numbers_a, numbers_b)
    primary = next((item for item in compared if item.metric == experiment.primary), None)
    if primary is None:
        return ArmComparison(arm=arm, verdict="inconclusive", metrics=compared, pairs=pairs), notes
    compared = stats.correct(compared, experiment.primary)
    return ArmComparison(
        arm=arm,
        verdict=stats.verdict_of(compared, experiment.primary),
        metrics=compared,
        pairs=pairs,
        needed_pairs=primary.needed_pairs,
    ), notes


def _pairs(metric: str, pairs: Sequence[int], a: Sequence[float], b: Sequence[float]) -> list[PairDifference]:
    scale = scale_of(metric)
    return [
        PairDifference(
            metric=metric, pair=k, a=x, b=y, difference=stats.difference(x, y, scale), unit=stats.UNITS[scale]
        )
        for k, x, y in zip(pairs, a, b, strict=True)
    ]


def _by_outcome(experiment: Experiment, progress: Progress, arm: str) -> ArmComparison | None:
    """The verdict where one of both arms runs and the other does not."""
    baseline = experiment.baseline.name
    one, other = progress.outcomes.get(baseline), progress.outcomes.get(arm)
    if other and one is None and progress.valid(baseline):
        return ArmComparison(arm=arm, verdict="worse", metrics=[], reason=f"{arm} {other[0]}: {other[1]}")
    if one and other is None and progress.valid(arm):
        return ArmComparison(arm=arm, verdict="better", metrics=[], reason=f"{baseline} {one[0]}: {one[1]}")
    return None


def _so_far(experiment: Experiment, progress: Progress, item: ArmComparison) -> ArmComparison:
    """Figures before the planned end are shown, a verdict is not drawn from them: whoever may look after every pair
    and stop finds a difference where there is none far more often than the 5 % promised."""
    if item.reason:  # what an arm does instead of running is known
        return item
    ended, planned = len(progress.trials), len(experiment.order())
    reason = f"{ended} of {planned} trials have ended: the verdict comes with the last"
    return replace(item, verdict="inconclusive", reason=reason, needed_pairs=None)


def _overall(verdicts: list[Verdict | Dead]) -> Verdict | Dead:
    """With several arms: better if one is; worse, or no difference, if all are."""
    if "better" in verdicts:
        return "better"
    alike = set(verdicts)
    return alike.pop() if len(alike) == 1 else "inconclusive"


def _same_training(experiment: Experiment, progress: Progress) -> tuple[bool, list[str]]:
    """Whether the arms trained the same: each step's loss, against the baseline's trial of the same pair."""
    if experiment.mode == "rehearsal":
        return True, []
    series = {
        trial: losses(judged.recording)
        for trial, judged in progress.trials.items()
        if judged.state == "valid" and judged.recording
    }
    baseline = experiment.baseline.name
    own = [values for trial, values in series.items() if trial.arm == baseline]
    noise = max((_apart(one, two) for one, two in pairwise(own)), default=0.0)
    notes = []
    same = True
    for arm in experiment.run_arms[1:]:
        pairs = [
            (values, theirs)
            for trial, values in series.items()
            for other, theirs in series.items()
            if trial.arm == arm.name and other.arm == baseline and trial.pair == other.pair
        ]
        if not pairs:
            continue
        apart = max(_apart(one, two) for one, two in pairs)
        if apart == 0:
            continue
        if apart > max(LOSS_TOLERANCE, 2 * noise):
            same = False
            notes.append(
                f"not comparable: {arm.name} does not train the same: its losses are up to {100 * apart:.3g} % off "
                f"{baseline}'s (tolerance {100 * max(LOSS_TOLERANCE, 2 * noise):.3g} %)"
            )
        else:
            notes.append(f"losses of {arm.name} agree with {baseline}'s to {100 * apart:.2g} %")
    if series and not notes and len(experiment.run_arms) > 1:
        notes.append("losses of all arms are equal, step by step")
    return same, notes


def _apart(one: Sequence[float | None], two: Sequence[float | None]) -> float:
    """The largest relative difference of two series."""
    known = [(a, b) for a, b in zip(one, two, strict=False) if a is not None and b is not None]
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in known if a != b), default=0.0)


def _sees(experiment: Experiment, values: dict[Trial, dict[str, Value]]) -> dict[str, float]:
    """From an A/A: what as many pairs can tell apart, for metrics that vary."""
    names = [arm.name for arm in experiment.run_arms[:2]]
    found = {}
    for metric in COMPARED:
        numbers: dict[int, dict[str, float]] = {}
        for trial, of_trial in values.items():
            value = of_trial[metric].value
            if trial.arm in names and value:
                numbers.setdefault(trial.pair, {})[trial.arm] = value
        pairs = [(pair[names[0]], pair[names[1]]) for pair in numbers.values() if len(pair) == 2]
        if len(pairs) >= 2:
            found[metric] = stats.detectable_effect_pct(pairs, len(pairs))
    return found
