"""What is known before a trial is spent: whether anything reads a variable, and which arms are one setting."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.config import Trainer
from harness.config_json import to_json, with_overrides
from harness.doctor.checks import libraries
from harness.doctor.facts import gather
from harness.doctor.modes import find_torch
from harness.errors import UsageError
from harness.interpreter import Interpreter
from harness.recording import Mode
from harness.variables import KNOWN, PREFIXES, Library, examine
from probes.experiment import Known
from probes.knobs import Arm, Knob, alloc_conf

# One line of JSON for each value on its standard input: null, or what torch has against it.
ASK_ALLOCATOR = """
import json, sys, torch
for value in json.load(sys.stdin):
    try:
        torch._C._accelerator_setAllocatorSettings(value)
        print("null")
    except (RuntimeError, ValueError) as error:
        print(json.dumps(str(error).splitlines()[0]))
"""
ALLOCATOR_PATIENCE_S = 120
FSDP_SOURCE = "distributed/fsdp/_fully_shard/_fully_shard.py"


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


def inactions(arms: Sequence[Arm], knob: Knob, config: Trainer.Config, mode: Mode) -> dict[str, Known]:
    """The arms after the baseline that set what nothing in this run, or in this torch, acts on."""
    absent = without_fsdp_method(knob)
    found = {}
    for arm in arms[1:]:
        if inaction := knob.inaction(config, mode, arm):
            found[arm.name] = Known(inaction.verdict, inaction.reason)
        elif absent is not None:
            found[arm.name] = absent
    return found


def without_fsdp_method(knob: Knob) -> Known | None:
    """What is known of a knob that needs a method which the FSDPModule of the installed torch does not have."""
    if not knob.fsdp_methods or fsdp_method(knob):
        return None
    names = " or ".join(knob.fsdp_methods)
    return Known("unavailable in this build", f"{knob.name}: this torch's FSDPModule has no {names}")


def fsdp_method(knob: Knob) -> str | None:
    """The method that the trainer will use, None if torch has none of them."""
    spec = find_torch()
    if spec is None or spec.origin is None:
        return None
    source = (Path(spec.origin).parent / FSDP_SOURCE).read_text()
    return next((name for name in knob.fsdp_methods if f"def {name}(" in source), None)


def require_taken(arms: Sequence[Arm]) -> None:
    """Raises `UsageError` for allocator options that the installed torch refuses, with its own words: it would do so
    in every rank, seconds into a trial. An arm with an interpreter of its own has another torch."""
    given = {
        arm.name: value
        for arm in arms
        for name in alloc_conf.NAMES
        if arm.python is None and (value := arm.environment.get(name))
    }
    if not given:
        return
    child = subprocess.run(
        [sys.executable, "-P", "-c", ASK_ALLOCATOR],
        input=json.dumps(list(given.values())),
        capture_output=True,
        text=True,
        timeout=ALLOCATOR_PATIENCE_S,
    )
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no word"])[-1]
        raise UsageError(f"torch cannot be asked about {alloc_conf.VARIABLE}: {last}")
    for (name, value), line in zip(given.items(), child.stdout.splitlines(), strict=True):
        if reason := json.loads(line):
            raise UsageError(f"arm {name}: torch refuses {value!r}: {reason}")


def same_settings(arms: Sequence[Arm], knob: Knob, config: Trainer.Config) -> dict[str, Known]:
    """The arms that are the same setting as an earlier one, written in another way.

    Arms that are written alike are an A/A, which was asked for: they are not in it.
    """
    found: dict[str, Known] = {}
    for place, arm in enumerate(arms):
        for other in arms[:place]:
            if other.name in found:
                continue
            alike = arm.setting == other.setting
            if not alike and _meaning(arm, knob, config) == _meaning(other, knob, config):
                why = _why(arm, other, knob)
                found[arm.name] = Known("no difference", f"{arm.name} is the same setting as {other.name}: {why}")
                break
    return found


def _meaning(arm: Arm, knob: Knob, config: Trainer.Config) -> tuple[dict[str, str], str, Interpreter | None]:
    """The environment under current names without defaults, the whole configuration, and the interpreter."""
    replaced = {known.name: known.alias_of for known in KNOWN if known.alias_of}
    variables: dict[str, str] = {}
    for name in sorted(arm.environment, key=replaced.__contains__):  # where both are set, the current name wins
        if (value := arm.environment[name]) is not None:
            variables.setdefault(replaced.get(name) or name, value)
    own = replaced.get(knob.variable or "") or knob.variable
    if own in variables:
        variables[own] = knob.normal(variables[own])
        if knob.default is not None and variables[own] == knob.normal(knob.default):
            del variables[own]
    return variables, to_json(with_overrides(config, list(arm.overrides.items()))), arm.python


def _why(arm: Arm, other: Arm, knob: Knob) -> str:
    if {name for name, value in arm.environment.items() if value} & {n for n, v in other.environment.items() if v}:
        return "the same setting"
    if None in arm.environment.values() and None in other.environment.values() and len(arm.environment) > 1:
        return "the old and the new name of one variable"
    return f"{knob.default} is the default" if knob.default else "the same setting"
