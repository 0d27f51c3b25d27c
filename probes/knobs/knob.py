"""What a knob is, and the arms that its values make."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from harness.compare.difference import OF_EACH_RUN
from harness.config import Trainer
from harness.errors import UsageError
from harness.interpreter import Interpreter, find_interpreter
from harness.masking import masked
from harness.recording import Mode
from harness.variables import KNOWN

UNSET = "unset"
"""The value of a variable that is not set at all."""

ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PYTHON = "python="
"""Begins a value that names the interpreter of an arm's ranks."""
OPTION = re.compile(r"[a-z]\w*:")

# torchrun and the launcher set these on every rank, whatever an arm says.
SET_BY_LAUNCHER = OF_EACH_RUN | {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE"}
NEVER_UNSET = frozenset({"OMP_NUM_THREADS", "PYTHONSAFEPATH", "PYTHONUNBUFFERED"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One setting: `environment` maps a variable to its value, None where it is not set; `overrides` are dotted
    fields of the configuration with their values; `python` is another interpreter than this one, with its own torch.
    `name` is unique among the arms of an experiment."""

    name: str
    environment: dict[str, str | None]
    overrides: dict[str, str]
    python: Interpreter | None = None

    @property
    def folder(self) -> str:
        """The name, fit for a folder's."""
        return re.sub(r"[^\w.-]+", "_", self.name)[:60]

    @property
    def setting(self) -> tuple[dict[str, str | None], dict[str, str], Interpreter | None]:
        """All that it sets."""
        return self.environment, self.overrides, self.python

    def names(self) -> list[str]:
        """Its variables and older names that mean the same: an arm leaves none of them to the shell."""
        return [*self.environment, *(known.name for known in KNOWN if known.alias_of in self.environment)]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.name, "environment": self.environment, "overrides": self.overrides}
        return found if self.python is None else found | {"python": asdict(self.python)}


@dataclass(frozen=True, slots=True)
class Inaction:
    """Why a setting changes nothing in a run."""

    verdict: Literal["ignored by this build", "unavailable in this build"]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """Something that can be set before a run: an environment variable, a field of the configuration, or neither (for
    an A/A, whose arms differ in nothing).

    `name` is `knob` or `knob.aspect`. `metric` decides the verdict; `threshold` replaces the metric's usual one.
    `values` are the arms if none are asked for, the first being the baseline. `default` is what an unset variable means
    where that is documented. `known` are facts. `needs_cuda`: what reads it does not run in mode cpu.

    `template` writes a short value out (`64` as `max_split_size_mb:64`); one that names an option itself stays as it
    is. `pattern`: what the values of the variable can be, in words `expects`; libraries drop others without a word.
    `normal` maps values that mean the same to one. `inaction`: why nothing in a run reads what an arm sets.
    `fsdp_methods`: those of torch's FSDPModule, any one of which does it, best first.
    """

    name: str
    hypothesis: str
    acts_on: str
    metric: str
    values: tuple[str, ...]
    variable: str | None = None
    field: str | None = None
    field_values: tuple[str, ...] = ()
    """Those of `values` that are the field's, where the knob has a variable, too."""
    default: str | None = None
    default_under_mps: str | None = None
    """What an unset variable means to ranks that share a GPU, where that is another."""
    threshold: float | None = None
    known: tuple[str, ...] = ()
    needs_cuda: bool = False
    template: str | None = None
    pattern: str | None = None
    expects: str = ""
    normal: Callable[[str], str] = str
    inaction: Callable[[Trainer.Config, Mode, Arm], Inaction | None] = lambda config, mode, arm: None
    fsdp_methods: tuple[str, ...] = ()

    def in_mode(self, mode: Mode) -> Knob:
        """The knob with the default that counts there."""
        if mode != "shared-gpu" or self.default_under_mps is None:
            return self
        return replace(self, default=self.default_under_mps)

    def arms(self, values: Sequence[str] | None = None, at_least: int = 2) -> list[Arm]:
        """The arms that `values` mean, in this order. A value `NAME=VALUE` sets that variable instead of the knob's,
        `python=PATH` is the interpreter that its ranks run under.

        Raises `UsageError` for fewer than `at_least`, and for what no arm can set.
        """
        values = self.values if values is None else values
        if len(values) < at_least:
            raise UsageError(
                f"probe {self.name}: one arm ({', '.join(values)}) compares with nothing: name two or more"
            )
        names: list[str] = []
        arms = []
        for value in values:
            names.append(value)
            count = names.count(value)
            arms.append(self._arm(value, value if count == 1 else f"{value}-{count}"))
        variables = {name for arm in arms for name in arm.environment}
        return [  # what another arm sets is not set in this one
            replace(arm, environment={name: arm.environment.get(name) for name in sorted(variables)}) for arm in arms
        ]

    def _arm(self, value: str, name: str) -> Arm:
        if value.startswith(PYTHON):
            python = find_interpreter(value.removeprefix(PYTHON))
            return Arm(name=name, environment={}, overrides={}, python=python)
        if self.field is not None and value in self.field_values:
            return Arm(name=name, environment={}, overrides={self.field: value})
        assignment = ASSIGNMENT.fullmatch(value)
        if assignment and self.field is None:
            return Arm(name=name, environment={assignment[1]: _checked(assignment[1], assignment[2])}, overrides={})
        if self.variable is not None:
            given = None if value == UNSET else self._written_out(value)
            return Arm(name=name, environment={self.variable: _checked(self.variable, given)}, overrides={})
        if self.field is not None:
            return Arm(name=name, environment={}, overrides={self.field: value})
        return Arm(name=name, environment={}, overrides={})

    def _written_out(self, value: str) -> str:
        if self.template is not None and not OPTION.match(value):
            return self.template.format(value)
        if self.pattern is not None and not re.fullmatch(self.pattern, value, re.IGNORECASE):
            raise UsageError(f"probe {self.name}: {value!r} is not {self.expects}, or {UNSET}")
        return value

    def to_json(self) -> dict[str, Any]:
        return {
            "knob": self.name,
            "hypothesis": self.hypothesis,
            "acts_on": self.acts_on,
            "variable": self.variable,
            "field": self.field,
            "field_values": list(self.field_values),
            "arms": list(self.values),
            "metric": self.metric,
            "known": list(self.known),
        }


def _checked(variable: str, value: str | None) -> str | None:
    if not NAME.fullmatch(variable):
        raise UsageError(f"{variable!r} is no name of an environment variable")
    if variable in SET_BY_LAUNCHER or variable.startswith(("MESHSCOPE_", "TORCHELASTIC_")):
        raise UsageError(f"{variable} is set for each rank by the launcher: no arm can set it")
    if value is None and variable in NEVER_UNSET:
        raise UsageError(f"{variable} cannot be unset: the launcher gives it to every rank; name a value")
    if value is not None:
        if "\0" in value:
            raise UsageError(f"{variable}: a value cannot hold a zero byte")
        if masked(variable, value) != value:
            raise UsageError(
                f"{variable}: its value looks like a secret and is never recorded, so no trial could prove it"
            )
    return value


def split_values(text: str) -> list[str]:
    """`a,b,c` as its values. Raises `UsageError` for an empty one: `unset` is how an absent variable is named."""
    values = text.split(",")
    if "" in values:
        raise UsageError(f"{text!r} holds an empty value; an absent variable is named {UNSET}")
    return values
