"""What the page needs of an experiment, made in a process of its own and kept on disk (`dashboard.prepare`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dashboard import store
from dashboard.discover import Run, fingerprint
from dashboard.store import Extract
from harness.compare import Measured
from harness.compare.metrics import Value
from harness.compare.steps import by_step
from harness.errors import InputError
from harness.recording import read_status
from harness.trace.capture import Mapper
from probes import text
from probes.analysis import Analysis
from probes.reduce import trial_metrics
from probes.report import data
from probes.report.data import Differing
from probes.report.reading import read_analysis, read_experiment
from probes.report.words import explained, setting_of


def ended_trials(directory: Path) -> list[Path]:
    """The folders of the trials that say they are complete. Raises `InputError` for a folder without a plan."""
    experiment = read_experiment(directory)
    folders = [experiment.trial_directory(trial) for trial in experiment.order()]
    return [folder for folder in folders if _is_complete(folder)]


def _is_complete(folder: Path) -> bool:
    try:
        return read_status(folder).state == "complete"
    except InputError:
        return False


def analysed(directory: Path, trials: Sequence[Path], cache: Path, each: Mapper) -> Analysis:
    """`read_analysis`, with the figures of trials kept in the cache: each is read once, however often the page is drawn
    while later ones run. `each` is `map`, or one over processes."""
    warmup = read_experiment(directory).warmup
    list(each(partial(_read_ahead, warmup=warmup, cache=cache), trials))
    return read_analysis(directory, partial(kept_metrics, cache=cache))


def _read_ahead(trial: Path, *, warmup: int, cache: Path) -> None:
    try:
        kept_metrics(trial, warmup, cache=cache)
    except InputError:  # it matters only if the trial counts, and is raised again then
        return


def kept_metrics(trial: Path, warmup: int, *, cache: Path) -> dict[str, Value]:
    """`trial_metrics`, read from the cache where the trial was read before. Raises as that does."""
    run = Run(name=trial.name, path=trial, kind="recording")
    kept = cache / f"{fingerprint(run)}-after-{warmup}"
    if not kept.is_dir():
        new = store.new_folder(cache)
        store.save(new / "metrics", Extract(values=trial_metrics(trial, warmup)))
        store.publish(new, kept)
    return msgspec.convert(store.load(kept / "metrics").values, dict[str, Value])


def experiment(analysis: Analysis) -> Extract:
    """`analysis`: the object of `meshscope report EXPERIMENT --json`, and lines that the command prints.

    `distributions`, `paired`, `order`, `step_traces`, `gpus`: what `probes.report.data` gives. `differing`: what the
    arms do not share, in words. `explained`, `because`: an arm's verdict in sentences, and in brackets. `settings`: an
    arm as lines for a shell. `middle`: the folder of an arm's middle trial, `peaks`: that one's by step (bytes).
    `folders`: trial -> its folder. `known`: facts about the knob."""
    planned = analysis.experiment
    middle = data.middle_trials(analysis)
    runs = {arm: _stated(analysis, arm) for arm in middle}
    arms = [arm.name for arm in planned.arms]
    return Extract(
        values={
            "analysis": analysis.to_json(),
            "name": planned.config.name,
            "decided": analysis.decided,
            "distributions": data.distributions(analysis),
            "paired": data.paired_differences(analysis),
            "order": data.run_order(analysis),
            "step_traces": data.step_traces(analysis),
            "explained": {item.arm: list(explained(analysis, item)) for item in analysis.comparisons},
            "because": {item.arm: text.because(analysis, item) for item in analysis.comparisons},
            "settings": {arm: list(text.setting(planned, arm)) for arm in arms},
            "middle": {arm: planned.trial_directory(trial).name for arm, trial in middle.items()},
            "peaks": {arm: data.peaks_by_step(run, planned.warmup) for arm, run in runs.items()},
            "differing": [_in_words(item, arms) for item in data.differing(planned, runs)],
            "folders": {trial.index: planned.trial_directory(trial).name for trial in planned.order()},
            "gpus": data.sampled_gpus(list(analysis.progress.trials), planned),
            "unfinished": list(text.unfinished(analysis)),
            "failures": analysis.failures(),
            "known": list(planned.knob.known),
        }
    )


def _stated(analysis: Analysis, arm: str) -> Measured:
    """What the middle trial of an arm says of itself and its steps, without traces and snapshots."""
    trial = data.middle_trials(analysis)[arm]
    recording = analysis.progress.trials[trial].recording
    return Measured(
        path=analysis.experiment.trial_directory(trial),
        mode=analysis.experiment.mode,
        recording=recording,
        steps=by_step(recording) if recording is not None else [],
    )


def _in_words(item: Differing, arms: Sequence[str]) -> dict[str, Any]:
    return {
        "what": item.what,
        "values": {arm: setting_of(item, arm) for arm in arms},
        "declared": "set by the arms" if item.declared else "differs as well",
    }
