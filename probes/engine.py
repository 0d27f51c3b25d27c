"""Running the trials of an experiment in their order, and going on where an interrupted one stopped.

What was done is read off the disk, so an experiment that was killed knows no less than one that was not.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from harness import recording
from harness.compare.standing import is_gone
from harness.launch import WORKER
from harness.modes import launch_in_mode
from harness.text import one_line, quantity
from probes import surroundings
from probes.experiment import MAX_RERUNS, Experiment, Trial
from probes.reduce import step_wall_ns
from probes.validity import Judged, Outcome, judge, require_alike

Say = Callable[[str], None]

# Ranks of a probe that was killed end by themselves; a driver lets go of an ended process a moment later.
LEAVING_S = 30.0
NOT_RUN = "it has not run"
# Pairs given up before nothing more is tried: the machine is not fit for measuring.
DROPPED_PAIRS = 2


@dataclass(kw_only=True, slots=True)
class Progress:
    """`trials` are those that ended, with what became of them; `outcomes` maps an arm to what it does instead of
    running, and the line that says so; `dropped` maps a pair to why it was given up; `unfinished` maps what is still
    to run to how it stands."""

    trials: dict[Trial, Judged] = field(default_factory=dict)
    outcomes: dict[str, tuple[Outcome, str]] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    unfinished: dict[Trial, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def valid(self, arm: str) -> list[Trial]:
        return [trial for trial, judged in self.trials.items() if trial.arm == arm and judged.state == "valid"]


def conduct(experiment: Experiment, say: Say, program: Sequence[str] = WORKER) -> Progress:
    """Runs what is left of the experiment; `program` is what each rank starts.

    Raises KeyboardInterrupt as `launch` does, and `RefusedError` for arms that differ in something undeclared.
    """
    return _Engine(experiment, say, program, Progress()).run()


def survey(experiment: Experiment) -> Progress:
    """What the trials on disk say, by the rules of `conduct`; nothing is started and no file is touched.

    Raises `RefusedError` as `conduct` does.
    """
    return _Engine(experiment, lambda line: None, (), Progress(), starts=False).run()


def voided(experiment: Experiment) -> list[dict[str, Any]]:
    """The runs that were set aside, with the reason where the run itself was the cause."""
    found: list[dict[str, Any]] = []
    for trial in experiment.order():
        for number, directory in _set_aside(experiment, trial):
            reason = recording.read_status(directory).reason
            found.append({"index": trial.index, "arm": trial.arm, "pair": trial.pair, "void": number, "reason": reason})
    return found


@dataclass(slots=True)
class _Engine:
    experiment: Experiment
    say: Say
    program: Sequence[str]
    progress: Progress
    starts: bool = True
    first: tuple[Trial, recording.Recording] | None = None
    """The first valid trial: what all others must be like."""

    def run(self) -> Progress:
        for pair, trials in groupby(self.experiment.order(), key=lambda trial: trial.pair):
            self.run_pair(pair, list(trials))
            if len(self.progress.dropped) >= DROPPED_PAIRS:
                self.say(f"{DROPPED_PAIRS} pairs were given up: no more are tried")
                break
        return self.progress

    def run_pair(self, pair: int, trials: list[Trial]) -> None:
        """One trial of each arm, all of them again while one is void."""
        while True:
            done: dict[Trial, Judged] = {}
            for trial in trials:
                if self.needed(trial):
                    done[trial] = self.run_once(trial)
                    if done[trial].state == "void":
                        break
            culprit = next((trial for trial, judged in done.items() if judged.state == "void"), None)
            if culprit is None:
                self.progress.unfinished |= {t: str(judged.reason) for t, judged in done.items() if not judged.ended}
                self.progress.trials |= {t: judged for t, judged in done.items() if judged.ended}
                return
            judged = done.pop(culprit)
            reason = f"trial {self.experiment.trial_directory(culprit).name}: {one_line(str(judged.reason))}"
            count = max((number for trial in trials for number, _ in _set_aside(self.experiment, trial)), default=0)
            if count < MAX_RERUNS and not self.starts:
                self.progress.unfinished |= dict.fromkeys(trials, f"its pair is void and runs again: {reason}")
                return
            if count < MAX_RERUNS:
                self.say(f"{reason}: its pair is void and runs again")
                self.set_aside(trials, culprit, count + 1, str(judged.reason))
            elif judged.failed:
                self.say(f"{reason}: arm {culprit.arm} fails")
                self.progress.outcomes[culprit.arm] = ("fails", str(judged.reason))
            else:
                self.say(f"{reason}: its pair is given up")
                self.progress.dropped[pair] = reason
                return

    def needed(self, trial: Trial) -> bool:
        """An arm with an outcome runs no more. Where no two arms are left to compare, one trial of each that is left
        shows that it runs at all."""
        arms, outcomes = [arm.name for arm in self.experiment.run_arms], self.progress.outcomes
        if trial.arm in outcomes:
            return False
        contest = arms[0] not in outcomes and any(arm not in outcomes for arm in arms[1:])
        return contest or not self.progress.valid(trial.arm)

    def run_once(self, trial: Trial) -> Judged:
        """What became of the trial, now or before."""
        directory = self.experiment.trial_directory(trial)
        judged = judge(self.experiment, trial, directory) if directory.exists() else None
        if not self.starts and judged is None:
            return Judged(state="broken", reason=NOT_RUN)
        if self.starts and judged is not None and not judged.ended:
            self.say(f"trial {directory.name} was interrupted: it runs again")
            _wait_for_ranks(directory)
            shutil.rmtree(directory)
            judged = None
        if judged is None:
            self.start(trial, directory)
            judged = judge(self.experiment, trial, directory)
        if self.starts and not judged.ended:
            return Judged(state="void", reason=judged.reason)
        if judged.state == "outcome" and judged.outcome:
            self.say(f"trial {directory.name}: arm {trial.arm} {judged.outcome}: {one_line(str(judged.reason))}")
            self.progress.outcomes[trial.arm] = (judged.outcome, str(judged.reason))
        if judged.state == "valid" and judged.recording:
            self.hold_against_first(trial, judged.recording)
            wall = step_wall_ns(judged.recording, self.experiment.warmup)
            alone = self.experiment.mode == "rehearsal"
            self.say(f"trial {directory.name}: {'valid' if alone else quantity('step_wall_ns', wall) + ' a step'}")
        return judged

    def start(self, trial: Trial, directory: Path) -> None:
        """Runs the trial in a process tree of its own, whose environment is the arm's from its first instruction."""
        experiment, arm = self.experiment, self.experiment.arm(trial.arm)
        watch = surroundings.Watch(experiment.gpus)
        try:
            deadline = time.monotonic() + LEAVING_S
            while busy := watch.samples and surroundings.others(watch.samples[-1], allowed=0):
                if time.monotonic() > deadline:
                    recording.write_status(directory, "invalid", f"before the trial began, {busy}")
                    return
                time.sleep(surroundings.PERIOD_S)
            watch.samples.clear()
            with surroundings.without(arm.names()):
                launch_in_mode(
                    experiment.starts[arm.name],
                    experiment.config_of(arm),
                    directory,
                    environment=experiment.environment_of(arm),
                    timeout_s=experiment.timeout_s,
                    program=self.program,
                    python=arm.python.path if arm.python else sys.executable,
                )
        finally:
            watch.end()
        surroundings.write(directory, watch)

    def hold_against_first(self, trial: Trial, found: recording.Recording) -> None:
        if self.first is None:
            self.first = (trial, found)
            return
        notes = require_alike(self.experiment, trial, found, *self.first)
        self.progress.notes += [note for note in notes if note not in self.progress.notes]

    def set_aside(self, trials: list[Trial], culprit: Trial, number: int, reason: str) -> None:
        """Renames the trials of a void pair, the culprit last: as long as it is there, the pair is void."""
        own = self.experiment.trial_directory(culprit)
        if recording.read_status(own).state == "complete":
            recording.write_status(own, "invalid", reason)
        for trial in [*(trial for trial in trials if trial != culprit), culprit]:
            directory = self.experiment.trial_directory(trial)
            if directory.exists():
                directory.rename(directory.with_name(f"{directory.name}.void{number}"))


def _set_aside(experiment: Experiment, trial: Trial) -> list[tuple[int, Path]]:
    directory = experiment.trial_directory(trial)
    found = []
    for path in directory.parent.glob("*.void*"):
        if match := re.fullmatch(re.escape(directory.name) + r"\.void(\d+)", path.name):
            found.append((int(match[1]), path))
    return sorted(found)


def _wait_for_ranks(directory: Path) -> None:
    """Until the ranks of an interrupted trial are gone: they write into its folder and would disturb the next."""
    deadline = time.monotonic() + LEAVING_S
    for rank, document in recording.read_ranks(directory)[0].items():
        pid, written_ns = document.get("pid"), recording.rank_path(directory, rank).stat().st_mtime_ns
        while isinstance(pid, int) and not is_gone(pid, written_ns) and time.monotonic() < deadline:
            time.sleep(0.2)
