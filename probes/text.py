"""An experiment for people: the verdict first, then what it rests on."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from harness.text import counted, in_ranges, printable, quantity, signed_percent, table
from probes.analysis import Analysis, ArmComparison
from probes.engine import NOT_RUN, voided
from probes.experiment import Experiment
from probes.knobs import UNSET, Knob
from probes.stats import Comparison


def render(analysis: Analysis) -> str:
    sections = [
        _verdict(analysis),
        unfinished(analysis),
        *(_metrics(analysis, item) for item in analysis.comparisons),
        _sees(analysis),
        _arms(analysis),
        _recommended(analysis),
        (f"note: {note}" for note in analysis.notes),
        [f"experiment: {analysis.experiment.directory}"] if analysis.progress.trials else [],
    ]
    return "\n\n".join("\n".join(map(printable, lines)) for section in sections if (lines := list(section)))


def _verdict(analysis: Analysis) -> Iterator[str]:
    experiment = analysis.experiment
    state = "" if analysis.comparable else " (the arms are not comparable)"
    yield f"{analysis.verdict}{state}: {experiment.knob.name}, mode {experiment.mode}, {experiment.config.name}"
    for item in analysis.comparisons:
        yield f"  {item.arm} against {experiment.baseline.name}: {item.verdict}{because(analysis, item)}"


def unfinished(analysis: Analysis) -> Iterator[str]:
    """What is still to run, and what was interrupted; nothing once the experiment has come to its end."""
    left = analysis.progress.unfinished
    if not left:
        return
    ended = len(analysis.progress.trials)
    yield (
        f"not finished: {ended} of {counted(len(analysis.experiment.order()), 'trial')} ended; the command that began "
        f"it goes on with --out {analysis.experiment.directory}"
    )
    begun = {trial: reason for trial, reason in left.items() if reason != NOT_RUN}
    for trial, reason in begun.items():
        yield f"trial {analysis.experiment.trial_directory(trial).name}: {reason}"
    if waiting := [trial.index for trial in left if trial not in begun]:
        yield f"{counted(len(waiting), 'trial')} not begun: {in_ranges(waiting)}"


def because(analysis: Analysis, item: ArmComparison) -> str:
    """What an arm's verdict rests on, in brackets."""
    if item.reason:
        return f" ({item.reason})"
    primary = next((m for m in item.metrics if m.metric == analysis.experiment.primary), None)
    if primary is None:
        return ""
    words = f" ({primary.metric} {change(primary)}, {interval(primary)}"
    if item.needed_pairs:
        words += f"; about {counted(item.needed_pairs, 'pair')} would decide"
    return words + ")"


def _metrics(analysis: Analysis, item: ArmComparison) -> Iterator[str]:
    if not item.metrics:
        return
    baseline = analysis.experiment.baseline.name
    pairs = max(metric.n_pairs or 0 for metric in item.metrics)
    yield f"{item.arm} against {baseline}, {counted(pairs, 'pair')}"
    rows = [
        [
            metric.metric + (" (decides)" if metric.metric == analysis.experiment.primary else ""),
            quantity(metric.metric, metric.a),
            quantity(metric.metric, metric.b),
            change(metric),
            interval(metric),
            metric.verdict,
        ]
        for metric in item.metrics
    ]
    yield from table(["metric", baseline, item.arm, "change", "interval", "verdict"], rows, last_left=True)
    for metric in item.metrics:
        yield from (f"  {metric.metric}: {note}" for note in metric.notes)


def change(metric: Comparison) -> str:
    """B against A: percent, of a share points."""
    if metric.unit == "points":
        return signed_percent(metric.effect).replace("%", "points")
    return signed_percent(metric.effect_pct)


def interval(metric: Comparison) -> str:
    """The interval of `change`."""
    if metric.exact:
        return "exact"
    low, high = (metric.ci_low, metric.ci_high) if metric.unit == "points" else (metric.ci_low_pct, metric.ci_high_pct)
    if low is None or high is None:
        return "no interval"
    unit = "points" if metric.unit == "points" else "%"
    return f"{100 * metric.confidence:.3g} %: {low:+.2f} to {high:+.2f} {unit}"


def _sees(analysis: Analysis) -> Iterator[str]:
    if not analysis.sees_pct:
        return
    yield f"what {counted(analysis.experiment.pairs, 'pair')} of this run can see here, four times in five"
    for metric, percent in analysis.sees_pct.items():
        yield f"  {metric}  {'any change' if percent == 0 else f'{percent:.2g} % and above'}"


def _arms(analysis: Analysis) -> Iterator[str]:
    experiment = analysis.experiment
    variables = list(dict.fromkeys(name for arm in experiment.arms for name in arm.environment))
    fields = list(dict.fromkeys(name for arm in experiment.arms for name in arm.overrides))
    pythons = ["python"] if any(arm.python for arm in experiment.arms) else []
    set_aside = voided(experiment)
    rows = []
    for arm in experiment.arms:
        runs = f"{len(analysis.progress.valid(arm.name))} valid"
        if again := sum(item["arm"] == arm.name for item in set_aside):
            runs += f", {again} void"
        if arm.name in experiment.not_run or not analysis.progress.trials:
            runs = "none"
        values = [arm.environment[name] for name in variables]
        rows.append(
            [arm.name]
            + [UNSET if value is None else value for value in values]
            + [arm.overrides.get(name, "as it is") for name in fields]
            + [arm.python.words() if arm.python else "this one" for _ in pythons]
            + [runs]
        )
    yield "arms, and all that they differ in"
    yield from table(
        ["arm", *variables, *fields, *pythons, "trials"],
        rows,
        left=1 + len(variables) + len(fields) + len(pythons),
        last_left=True,
    )
    yield from (f"  void: {item['index']:02d}-{item['arm']}: {item['reason']}" for item in set_aside if item["reason"])


def _recommended(analysis: Analysis) -> Iterator[str]:
    best = analysis.recommended()
    if best is not None:
        yield f"to use it ({best.arm} is better than {analysis.experiment.baseline.name}{because(analysis, best)}):"
        yield from (f"  {line}" for line in setting(analysis.experiment, best.arm))


def setting(experiment: Experiment, name: str) -> Iterator[str]:
    """An arm as lines for a shell, and as options of `meshscope run`."""
    arm = experiment.arm(name)
    for variable, value in arm.environment.items():
        yield f"unset {variable}" if value is None else f"export {variable}={shlex.quote(value)}"
    if arm.python:
        yield f"{shlex.quote(arm.python.path)} -m harness.cli run"
    if arm.overrides:
        yield " ".join(f"--{field} {shlex.quote(value)}" for field, value in arm.overrides.items())


def knob_list(knobs: Iterable[Knob]) -> str:
    """`meshscope probe --list`."""
    lines = []
    for knob in knobs:
        what = " or ".join(filter(None, (knob.variable, knob.field))) or "nothing"
        lines += [
            f"{knob.name}: {what}, arms {', '.join(knob.values)}, decided by {knob.metric}",
            f"  {knob.hypothesis}",
            f"  acts on: {knob.acts_on}",
            *(f"  known: {fact}" for fact in knob.known),
            "",
        ]
    return "\n".join([*lines, "NAME=a,b,c: any environment variable; unset is a value"])
