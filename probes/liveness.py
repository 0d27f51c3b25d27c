"""What is known before a trial is spent: whether anything reads a variable, and which arms are one setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.config import Trainer, to_json, with_overrides
from harness.doctor.checks import libraries
from harness.doctor.facts import gather
from harness.doctor.modes import find_torch
from harness.variables import KNOWN, PREFIXES, Library, examine
from probes.experiment import Known
from probes.knobs import Arm, Knob


@dataclass(frozen=True, slots=True)
class Build:
    """The installed libraries, and the torch release they are of."""

    libraries: Sequence[Library]
    torch: tuple[int, int] | None


def this_build() -> Build:
    """Imports torch in a process of its own, which takes seconds."""
    facts = gather(with_torch=find_torch() is not None)
    spec = find_torch()
    return Build(libraries(facts, Path(spec.origin).parent if spec and spec.origin else None), facts.torch.release)


def is_examined(arms: Sequence[Arm]) -> bool:
    """Whether a library of this build can say anything about the variables of these arms."""
    listed = {known.name for known in KNOWN}
    return any(name in listed or name.startswith(PREFIXES) for arm in arms for name in arm.environment)


def dead(arms: Sequence[Arm], build: Build) -> tuple[Known | None, list[str]]:
    """What is known if nothing reads any of the arms' variables, and what the libraries say of each."""
    names = sorted({name for arm in arms for name in arm.environment})
    examined, failures = examine(build.libraries, dict.fromkeys(names, ""), build.torch)
    found = {variable.name: variable for variable in examined if variable.name in names}
    notes = [f"{path}: cannot be read ({reason})" for path, reason in failures]
    for name, variable in found.items():
        replaced = f", set {variable.alias_of}" if variable.alias_of else ""
        notes.append(f"{name}: {variable.state}{replaced}: {variable.evidence}")
    states = {found[name].state if name in found else "unknown" for name in names}
    if names and states == {"ignored"}:
        return Known("ignored by this build", "; ".join(notes)), notes
    if names and states <= {"ignored", "not in this build"}:
        return Known("unavailable in this build", "; ".join(notes)), notes
    return None, notes


def without_device(knob: Knob, gpus: int) -> Known | None:
    """What is known of a knob of GPUs where the ranks use none."""
    if knob.needs_cuda and gpus == 0:
        return Known("unavailable in this build", f"{knob.name} acts on {knob.acts_on}; on CPUs nothing reads it")
    return None


def same_settings(arms: Sequence[Arm], knob: Knob, config: Trainer.Config) -> dict[str, Known]:
    """The arms that are the same setting as an earlier one, written in another way.

    Arms that are written alike are an A/A, which was asked for: they are not in it.
    """
    found: dict[str, Known] = {}
    for place, arm in enumerate(arms):
        for other in arms[:place]:
            if other.name in found:
                continue
            alike = (arm.environment, arm.overrides) == (other.environment, other.overrides)
            if not alike and _meaning(arm, knob, config) == _meaning(other, knob, config):
                why = _why(arm, other, knob)
                found[arm.name] = Known("no difference", f"{arm.name} is the same setting as {other.name}: {why}")
                break
    return found


def _meaning(arm: Arm, knob: Knob, config: Trainer.Config) -> tuple[dict[str, str], str]:
    """The environment under current names without defaults, and the whole configuration."""
    current = {known.name: known.alias_of for known in KNOWN if known.alias_of}
    variables: dict[str, str] = {}
    for name, value in arm.environment.items():
        if value is not None and not (value == knob.default and current.get(name, name) == knob.variable):
            if name in current:  # where both are set, the current name wins
                variables.setdefault(current[name] or name, value)
            else:
                variables[name] = value
    return variables, to_json(with_overrides(config, list(arm.overrides.items())))


def _why(arm: Arm, other: Arm, knob: Knob) -> str:
    if {name for name, value in arm.environment.items() if value} & {n for n, v in other.environment.items() if v}:
        return "the same setting"
    if None in arm.environment.values() and None in other.environment.values() and len(arm.environment) > 1:
        return "the old and the new name of one variable"
    return f"{knob.default} is the default" if knob.default else "the same setting"
