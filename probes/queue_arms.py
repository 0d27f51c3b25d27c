"""The hardware queues of each arm of `max_connections`: one new process each, kept in the experiment's folder.

<out>/queues/{arm}.json       what `queues_worker` saw, from which everything is computed anew
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from harness.doctor.facts import Question
from harness.errors import InputError
from harness.mps import mps
from harness.recording import Mode, atomic_path, read_json
from harness.text import milliseconds, table
from probes import queue_findings, queues
from probes.experiment import Experiment
from probes.knobs import UNSET, Arm
from probes.knobs.max_connections import KNOB
from probes.queue_findings import ArmQueues
from probes.surroundings import without

SCHEMA_VERSION = 1
WORKER = Path(__file__).with_name("queues_worker.py")
# One stream more than there are queues shows them, some more that it was no chance. A context has 32 at most today;
# more would be counted where as many are asked for.
LEAST_STREAMS, BEYOND, MOST_STREAMS = 48, 16, 128
ROUNDS, MOST_ROUNDS = 5, 50
ONCE_S, ROUND_S = 240.0, 45.0  # the program's own limits add up to less
OUTSIDE = "measured in one process on the first device"
UNDER_MPS = (
    f"{OUTSIDE}, the only client of an MPS daemon of its own; ranks that share a GPU share its connections, so that "
    "each may have fewer"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueStudy:
    """The queues of every arm. `seconds` maps an arm to what measuring it took, `device` names the GPU."""

    arms: list[ArmQueues]
    seconds: dict[str, float | None]
    device: str | None
    under_mps: bool
    directory: Path
    errors: list[InputError]

    @property
    def findings(self) -> list[str]:
        """In words; an unset variable means less to a client of MPS."""
        return queue_findings.findings(self.arms, KNOB.in_mode(self._mode).default)

    @property
    def notes(self) -> list[str]:
        """For the verdict on the trials: the findings, and what they were measured on."""
        lines = [*queue_findings.counts(self.arms), *self.findings, self._how()]
        return [f"hardware queues: {line}" for line in lines]

    @property
    def counted(self) -> bool:
        """Whether any arm has a number."""
        return any(arm.estimate.count is not None for arm in self.arms)

    def to_json(self) -> dict[str, Any]:
        """The object of `--queues --json`, and `queues` of analysis.json. Latencies are in nanoseconds by number of
        streams."""
        return {
            "schema_version": SCHEMA_VERSION,
            "mode": self._mode,
            "variable": KNOB.variable,
            "device": self.device,
            "took_effect": queue_findings.took_effect(self.arms),
            "findings": self.findings,
            "arms": [
                {
                    "arm": arm.arm,
                    "value": arm.value,
                    "asked": arm.asked,
                    "seconds": self.seconds.get(arm.arm),
                    **asdict(arm.estimate),
                }
                for arm in self.arms
            ],
            "path": str(self.directory),
            "notes": [self._how()],
            "errors": [error.to_json() for error in self.errors],
        }

    def text(self) -> str:
        rows = [
            [
                arm.arm,
                _count(arm.estimate),
                _interval(arm.estimate),
                _contradicting(arm.estimate),
                *(_latency(arm.estimate, streams) for streams in (4, 12)),
                "n/a" if (seconds := self.seconds.get(arm.arm)) is None else f"{seconds:.1f} s",
            ]
            for arm in self.arms
        ]
        head = ["arm", "queues", "interval", "contradicting", "4 streams", "12 streams", "took"]
        return "\n".join(
            [
                f"hardware queues of a CUDA context by {KNOB.variable}, {self.device or 'no device'}",
                *table(head, rows),
                "  4 streams, 12 streams: when independent work in the last one ends, ms, while all others wait for a",
                "  kernel in the first; contradicting: numbers of streams that say otherwise than the count",
                "",
                *self.findings,
                f"note: {self._how()}",
                f"observations: {self.directory}",
            ]
        )

    @property
    def _mode(self) -> Mode:
        return "shared-gpu" if self.under_mps else "real"

    def _how(self) -> str:
        return UNDER_MPS if self.under_mps else OUTSIDE


def _count(found: queues.Estimate) -> str:
    if found.count is None:
        return "n/a"
    return f"≥ {found.count}" if found.at_least else str(found.count)


def _interval(found: queues.Estimate) -> str:
    return "n/a" if found.low is None or found.high is None else f"{found.low}–{found.high}"


def _contradicting(found: queues.Estimate) -> str:
    known = sum(item.known for item in found.rounds)
    return f"{sum(item.contradicting for item in found.rounds)} of {known}" if known else "n/a"


def _latency(found: queues.Estimate, streams: int) -> str:
    return milliseconds(found.latency_ns.get(streams))


def of_experiment(experiment: Experiment) -> bool:
    """Whether its arms set what decides the number of queues, on a GPU."""
    return experiment.gpus > 0 and any(KNOB.variable in arm.environment for arm in experiment.arms)


def measure_for(experiment: Experiment, say: Callable[[str], None], rounds: int) -> None:
    """Measures what is not in the experiment's folder yet, of every arm that this machine can run."""
    arms = [arm for arm in experiment.arms if arm.name in _possible(experiment)]
    measure(
        arms,
        experiment.directory,
        rounds=rounds,
        under_mps=experiment.mode == "shared-gpu",
        environment=experiment.starts[experiment.baseline.name].environment,
        say=say,
    )


def read_for(experiment: Experiment) -> QueueStudy | None:
    """What was measured for the experiment; None if nothing was."""
    arms = [arm for arm in experiment.arms if arm.name in _possible(experiment)]
    found = read(arms, experiment.directory) if of_experiment(experiment) else None
    return found if found and (found.arms or found.errors) else None


def _possible(experiment: Experiment) -> set[str]:
    unavailable = {n for n, known in experiment.not_run.items() if known.verdict == "unavailable in this build"}
    return {arm.name for arm in experiment.arms} - unavailable


def measure(
    arms: Sequence[Arm],
    directory: Path,
    *,
    rounds: int,
    under_mps: bool,
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> None:
    """Runs the program once for each arm, whose values are in its environment from the first instruction, and
    `environment` beside them. A whole measurement that is there stays.

    Raises `UnavailableError` where MPS is asked for and does not start.
    """
    (directory / "queues").mkdir(exist_ok=True)
    for arm in arms:
        path = _path(directory, arm)
        if _is_whole(path, arm, rounds, under_mps):
            continue
        began = time.monotonic()
        with without(arm.names()), ExitStack() as stack:
            settings = {name: value for name, value in arm.environment.items() if value is not None}
            ours = {**os.environ, **environment, **settings}
            clients = stack.enter_context(mps(ours)) if under_mps else {}
            limit_s = ONCE_S + ROUND_S * rounds
            facts = Question(WORKER, limit_s, {**ours, **clients}, [str(_streams(arm)), str(rounds)]).answer()
        document = {**facts, "arm": arm.name, "seconds": round(time.monotonic() - began, 3), "under_mps": under_mps}
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps({"schema_version": SCHEMA_VERSION, **document}) + "\n", encoding="utf-8")
        say(f"hardware queues: {arm.name}: {queues.estimate(queues.parse(document)).words()}")


def _streams(arm: Arm) -> int:
    """The largest number of streams to try."""
    asked = queue_findings.asked_for(arm.environment.get(str(KNOB.variable))) or 0
    return min(MOST_STREAMS, max(LEAST_STREAMS, asked + BEYOND))


def _path(directory: Path, arm: Arm) -> Path:
    return directory / "queues" / f"{arm.folder}.json"


def _is_whole(path: Path, arm: Arm, rounds: int, under_mps: bool) -> bool:
    try:
        document = read_json(path)
        found = queues.parse(document)
    except (InputError, msgspec.ValidationError):
        return False
    same = (document.get("arm"), document.get("under_mps")) == (arm.name, under_mps)
    return same and found.phase == "complete" and len(found.rounds) >= rounds and found.streams >= _streams(arm)


def read(arms: Sequence[Arm], directory: Path) -> QueueStudy:
    """What was measured of these arms; a file that cannot be read is among the errors."""
    found: list[ArmQueues] = []
    errors: list[InputError] = []
    seconds: dict[str, float | None] = {}
    device, under_mps = None, False
    for arm in arms:
        path = _path(directory, arm)
        if not path.exists():
            continue
        try:
            document = read_json(path)
            observed = queues.parse(document)
        except InputError as error:
            errors.append(error)
            continue
        except msgspec.ValidationError as error:
            errors.append(InputError(path, f"is no measurement of queues: {error}"))
            continue
        value = arm.environment.get(str(KNOB.variable))
        if document.get("arm") != arm.name or (observed.phase is not None and observed.setting != value):
            given = UNSET if observed.setting is None else observed.setting
            errors.append(InputError(path, f"is not of arm {arm.name}: it was measured with {KNOB.variable} {given}"))
            continue
        found.append(ArmQueues(arm=arm.name, value=value, estimate=queues.estimate(observed)))
        took = document.get("seconds")
        seconds[arm.name] = took if isinstance(took, int | float) else None
        device, under_mps = device or observed.device, under_mps or document.get("under_mps") is True
        if observed.error:
            errors.append(InputError(path, f"{arm.name}: {observed.error}"))
    return QueueStudy(
        arms=found, seconds=seconds, device=device, under_mps=under_mps, directory=directory / "queues", errors=errors
    )
