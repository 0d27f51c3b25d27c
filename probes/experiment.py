"""The plan of an experiment, fixed on disk before its first trial, and the folder it lives in.

<out>/experiment.json                     the plan; the same command again goes on, another plan is refused
<out>/build.json                          what the installed libraries say of the arms' variables
<out>/trials/{index:02d}-{arm}/           a recording each, plus surroundings.json (GPUs seen from outside)
<out>/trials/{index:02d}-{arm}.void{n}/   a trial whose pair was voided and run again
<out>/analysis.json                       what `meshscope probe --json` prints
"""

from __future__ import annotations

import fcntl
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from harness.config import Trainer, Window
from harness.config_json import to_dict, with_overrides
from harness.errors import UsageError
from harness.modes import Start
from harness.recording import RECORDED_VARIABLES, Mode, read_json, write_json
from probes import plan as pairs_plan
from probes import stats
from probes.knobs import Arm, Knob

PLAN, BUILD, ANALYSIS = "experiment.json", "build.json", "analysis.json"
SCHEMA_VERSION = 1
DEFAULT_PAIRS, MOST_PAIRS = 8, 10_000
MAX_RERUNS = 2
"""How often a voided pair runs again."""
TRACE_WARMUP_STEPS = 1  # torch.profiler's own, tagged and left out


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the arm called `arm`: the `index`-th of the experiment, in the `pair`-th pair (with more than two
    arms the round in which each runs once)."""

    index: int
    pair: int
    arm: str


@dataclass(frozen=True, slots=True)
class Known:
    """What an arm does, known before any trial."""

    verdict: Literal["no difference", "ignored by this build", "unavailable in this build"]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """`config` is what every arm runs, but for its own overrides; `thresholds` are the smallest effects that matter
    (percent of times, points of shares, bytes; None: `stats`' rule for bytes). `not_run` maps an arm that no trial is
    spent on to what is known of it, `starts` the others to what the mode needs. `gpus`: how many the ranks use; 0 on
    CPUs."""

    directory: Path
    knob: Knob
    arms: list[Arm]
    not_run: dict[str, Known]
    config: Trainer.Config
    mode: Mode
    gpus: int
    starts: dict[str, Start]
    pairs: int
    seed: int
    warmup: int
    primary: str
    thresholds: dict[str, float | None]
    timeout_s: float

    @property
    def run_arms(self) -> list[Arm]:
        """Those that trials are spent on; the first is the baseline."""
        return [arm for arm in self.arms if arm.name not in self.not_run]

    @property
    def baseline(self) -> Arm:
        return self.arms[0]

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def order(self) -> list[Trial]:
        return order(self.run_arms, self.pairs, self.seed)

    def trial_directory(self, trial: Trial) -> Path:
        return self.directory / "trials" / f"{trial.index:02d}-{self.arm(trial.arm).folder}"

    def config_of(self, arm: Arm) -> Trainer.Config:
        """Raises `UsageError` for an override that cannot be."""
        config = with_overrides(self.config, list(arm.overrides.items()))
        config.validate()
        return config

    def environment_of(self, arm: Arm) -> dict[str, str]:
        """What is set for a trial beside what its mode needs; the arm's variables are recorded whatever they are."""
        settings = {name: value for name, value in arm.environment.items() if value is not None}
        return {RECORDED_VARIABLES: ",".join(sorted(arm.environment)), **settings} if arm.environment else {}

    def is_aa(self) -> bool:
        """Whether all arms that run are one setting."""
        first = self.baseline
        return all(arm.setting == first.setting for arm in self.run_arms)

    def to_json(self) -> dict[str, Any]:
        """The plan: whatever changes a trial, or the verdict on them, and nothing else."""
        return {
            "schema_version": SCHEMA_VERSION,
            **{name: value for name, value in self.knob.to_json().items() if name in ("knob", "hypothesis")},
            "mode": self.mode,
            "primary": self.primary,
            "thresholds": self.thresholds,
            "pairs": self.pairs,
            "seed": self.seed,
            "max_reruns": MAX_RERUNS,
            "warmup_steps": self.warmup,
            "timeout_s": self.timeout_s,
            "arms": [arm.to_json() for arm in self.arms],
            "not_run": {name: asdict(known) for name, known in self.not_run.items()},
            "gpus": self.gpus,
            "rehearsed_ranks": list(self.starts[self.baseline.name].rehearsed),
            "environment": dict(self.starts[self.baseline.name].environment),
            "order": [{"index": t.index, "pair": t.pair, "arm": t.arm} for t in self.order()],
            "config": to_dict(self.config),
        }

    def fix(self) -> bool:
        """Writes the plan, or finds the same one there: then True, and its trials go on.

        Raises `UsageError` for a folder that holds another plan (naming what differs) or something else,
        `InputError` if the plan there is unreadable.
        """
        path, mine = self.directory / PLAN, self.to_json()
        if path.exists():
            theirs = read_json(path)
            changed = [name for name in mine if mine[name] != theirs.get(name)]
            if changed:
                raise UsageError(
                    f"--out {self.directory}: it holds another experiment ({', '.join(changed)} differ): name a new "
                    "folder; a plan is not changed once trials were seen"
                )
            return True
        if any(entry.name != ".lock" for entry in self.directory.iterdir()):
            raise UsageError(f"--out {self.directory}: the folder is not empty and no experiment; name a new one")
        write_json(path, mine)
        return False


def order(arms: list[Arm], pairs: int, seed: int) -> list[Trial]:
    """Two arms: `probes.plan`'s ABBA and BAAB blocks. More: rounds in which each runs once, in an order drawn by the
    seed, every second round the reverse of the one before, so that a drift sides with no arm."""
    names = [arm.name for arm in arms]
    if len(names) == 2:
        of = dict(zip(get_args(pairs_plan.Arm), names, strict=True))
        return [Trial(trial.index, trial.pair, of[trial.arm]) for trial in pairs_plan.order(pairs, seed)]
    draw = random.Random(seed)
    trials: list[Trial] = []
    row: list[str] = []
    for pair in range(pairs):
        row = row[::-1] if pair % 2 else draw.sample(names, len(names))
        trials += [Trial(len(trials) + place, pair, name) for place, name in enumerate(row)]
    return trials


def with_windows(config: Trainer.Config, *, warmup: int, steps: int | None) -> Trainer.Config:
    """The run of one trial: warm-up, measured steps without profiler and memory history, then the windows of the
    run's own lengths: trace, memory. `steps` are the measured ones; None: what the run's steps leave for them.

    Raises `UsageError` if that is none.
    """
    recorder = config.recorder
    traced, tracked = recorder.trace.steps, recorder.memory.steps
    windows = traced + tracked + (TRACE_WARMUP_STEPS if traced else 0)
    if steps is None:
        steps = config.training.steps - warmup - windows
        if steps < 1:
            raise UsageError(
                f"training.steps={config.training.steps} leaves no measured step beside {warmup} of warm-up and "
                f"{windows} of windows: raise it, or lower --warmup, recorder.trace.steps or recorder.memory.steps"
            )
    start = warmup + steps + (TRACE_WARMUP_STEPS if traced else 0)
    return replace(
        config,
        training=replace(config.training, steps=warmup + steps + windows),
        recorder=replace(
            recorder,
            trace=Window(start=start if traced else 0, steps=traced),
            memory=Window(start=start + traced if tracked else 0, steps=tracked),
        ),
    )


def default_thresholds(knob: Knob, primary: str, metrics: list[str]) -> dict[str, float | None]:
    usual = {"ratio": stats.THRESHOLD_PCT, "points": stats.THRESHOLD_POINTS, "bytes": None}
    found = {name: usual[scale_of(name)] for name in metrics}
    if knob.threshold is not None and primary == knob.metric:
        found[primary] = knob.threshold
    return found


def scale_of(metric: str) -> stats.Scale:
    """How trials of a metric are compared, by the unit in its name."""
    return "bytes" if metric.endswith("_bytes") else "points" if metric.endswith("_pct") else "ratio"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """One process at a time works on an experiment. Raises `UsageError` if another one does."""
    with open(directory / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"--out {directory}: another process runs this experiment") from None
        yield
