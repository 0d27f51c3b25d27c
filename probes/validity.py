"""Which trials count. The rules were set before any trial: none is ever left out for its figures.

A trial is `valid`; `void`, when something disturbed it: its whole pair runs again; an `outcome`, when its arm ran out
of memory or hung: that is what the arm does; or `broken`, when the experiment was interrupted in it. What differs
between arms without being declared cannot be repaired by running again: `RefusedError`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.compare.difference import OF_EACH_RUN, flat
from harness.compare.difference import devices as device_names
from harness.compare.standing import standing
from harness.config_json import to_dict
from harness.errors import InputError, MeshscopeError
from harness.recording import Recording, read_recording, read_status
from harness.text import in_ranges
from probes import surroundings
from probes.experiment import Experiment, Trial

State = Literal["valid", "void", "outcome", "broken"]
Outcome = Literal["does not fit in memory", "hangs", "fails"]

OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory(?!, unless)|can't allocate memory", re.IGNORECASE)
INTERRUPTED = ("interrupted by ", "the launcher itself failed")
SAME_VERSIONS = ("torch", "cuda", "nccl", "driver", "python")
OF_AN_INTERPRETER = ("torch", "cuda", "nccl", "python")


class RefusedError(MeshscopeError):
    """The arms differ in something that was not declared; the experiment can say nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """`failed` marks a void trial whose ranks failed by themselves: an arm that always does fails as an outcome."""

    state: State
    reason: str | None = None
    outcome: Outcome | None = None
    failed: bool = False
    recording: Recording | None = None

    @property
    def ended(self) -> bool:
        return self.state != "broken"


def judge(experiment: Experiment, trial: Trial, directory: Path) -> Judged:
    """What became of a trial, from its files alone. Raises `RefusedError` if its ranks lacked the arm's setting."""
    try:
        status = read_status(directory)
        if status.state == "invalid":
            return Judged(state="void", reason=status.reason)
        if status.state == "failed":
            return _failed(str(status.reason))
        if status.state != "complete":
            return Judged(state="broken", reason=f"it is {standing(read_recording(directory)).headline()}")
        around = surroundings.read(directory)
        recording = read_recording(directory)
    except InputError as error:
        return Judged(state="broken", reason=str(error))
    require_declared(experiment, trial, recording)
    reason = disturbance(experiment, trial, recording, around)
    return Judged(state="void" if reason else "valid", reason=reason, recording=recording)


def _failed(reason: str) -> Judged:
    if reason.startswith(INTERRUPTED):
        return Judged(state="broken", reason=reason)
    if reason.startswith("hung:"):
        return Judged(state="outcome", outcome="hangs", reason=reason)
    if OUT_OF_MEMORY.search(reason):
        return Judged(state="outcome", outcome="does not fit in memory", reason=reason)
    return Judged(state="void", reason=reason, failed=True)


def disturbance(experiment: Experiment, trial: Trial, recording: Recording, around: Mapping[str, Any]) -> str | None:
    """Why a complete trial does not count, in words."""
    if recording.missing_ranks:
        return f"no step of rank {in_ranges(recording.missing_ranks)}"
    if not recording.ranks:
        return "no rank says what its environment was"
    steps = experiment.config_of(experiment.arm(trial.arm)).training.steps
    for rank, rows in recording.steps.items():
        if len(rows) < steps:
            return f"rank {rank} recorded {len(rows)} of {steps} steps"
        lost = [row["step"] for row in rows if row.get("loss") is None]
        if lost and experiment.mode != "rehearsal":  # a rank without the others has no loss that means anything
            return f"the loss of rank {rank} is not finite at step {in_ranges(lost)}"
    samples = around.get("samples") or []
    processes = 1
    if experiment.mode == "shared-gpu":  # and the MPS server
        processes = -(-experiment.config.world_size // experiment.gpus) + 1
    for sample in samples:
        if reason := surroundings.others(sample, allowed=processes):
            return reason
    measured = [row for rows in recording.steps.values() for row in rows if row["step"] >= experiment.warmup]
    starts = [row["started_unix_ns"] for row in measured if row.get("started_unix_ns") is not None]
    return surroundings.throttled(samples, min(starts), max(starts)) if starts else None


def require_declared(experiment: Experiment, trial: Trial, recording: Recording) -> None:
    """Raises `RefusedError` unless every rank started with exactly its arm's values of the declared variables, and ran
    under its arm's interpreter as that was when it was asked."""
    arm = experiment.arm(trial.arm)
    versions = recording.manifest.get("versions") or {}
    if arm.python:
        for name, wanted in arm.python.versions().items():
            if versions.get(name) != wanted:
                raise RefusedError(
                    f"{recording.directory}: ran with {name} {versions.get(name)}, but {arm.python.path} had {wanted} "
                    "when the experiment was planned: refused"
                )
    for rank, document in sorted(recording.ranks.items()):
        found = document.get("environment_before")
        if not isinstance(found, Mapping):
            raise RefusedError(f"{recording.directory}: rank {rank} does not say what its environment was: refused")
        for name, wanted in arm.environment.items():
            if found.get(name) != wanted:
                raise RefusedError(
                    f"{recording.directory}: rank {rank} started with {name} {_shown(found.get(name))}, arm {arm.name} "
                    f"declares {_shown(wanted)}: refused"
                )


def require_alike(experiment: Experiment, trial: Trial, mine: Recording, first: Trial, theirs: Recording) -> list[str]:
    """Raises `RefusedError` if two trials differ in anything but what their arms declare; returns what is only worth a
    note: the commit of the working tree."""
    a, b = conditions(theirs), conditions(mine)
    declared = {f"environment {name}" for name in experiment.baseline.environment}
    declared |= _config_difference(experiment, trial, first)
    if experiment.arm(trial.arm).python != experiment.arm(first.arm).python:
        declared |= {f"versions.{name}" for name in OF_AN_INTERPRETER}
    names = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
    for name in names:
        if name.split(" of rank ")[0] not in declared:
            raise RefusedError(
                f"{mine.directory}: {name} is {_shown(b.get(name))}, in {theirs.directory.name} "
                f"{_shown(a.get(name))}, which no arm declares: refused"
            )
    git_a, git_b = theirs.manifest.get("git"), mine.manifest.get("git")
    return [] if git_a == git_b else ["the commit of the working tree changed while the trials ran"]


def conditions(recording: Recording) -> dict[str, Any]:
    """What trials must share, flat: mode, ranks, devices, versions, configuration, each rank's environment."""
    manifest = recording.manifest
    versions = manifest.get("versions") or {}
    found: dict[str, Any] = {"mode": manifest.get("mode"), "world_size": manifest.get("world_size")}
    found["devices"] = device_names(recording.ranks.values())
    found |= {f"versions.{name}": versions.get(name) for name in SAME_VERSIONS}
    found |= dict(flat("config", manifest.get("config")))
    for rank, document in sorted(recording.ranks.items()):
        for name, value in (document.get("environment_before") or {}).items():
            if name not in OF_EACH_RUN:
                found[f"environment {name} of rank {rank}"] = value
    return found


def _config_difference(experiment: Experiment, trial: Trial, first: Trial) -> set[str]:
    """The fields in which the arms' own configurations differ."""
    one, two = (
        dict(flat("config", to_dict(experiment.config_of(experiment.arm(which.arm))))) for which in (trial, first)
    )
    return {name for name in {*one, *two} if one.get(name) != two.get(name)}


def _shown(value: object) -> str:
    return "unset" if value is None else f"{value!r}"
