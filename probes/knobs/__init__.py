"""The knobs, one file each, and any variable named on the command line.

A knob with several aspects has a name for each, `fsdp.prefetch`; the knob's own name means the first of them.
"""

from __future__ import annotations

import difflib
from dataclasses import replace

from harness.errors import UsageError
from harness.variables import KNOWN
from probes.knobs import (
    aa,
    alloc_conf,
    cuda_graphs,
    fsdp,
    max_connections,
    nccl,
    record_streams,
    threads,
    tp,
)
from probes.knobs.knob import UNSET, Arm, Inaction, Knob, split_values

__all__ = ["KNOBS", "UNSET", "Arm", "Inaction", "Knob", "aspects", "find_knob", "split_values", "variable_knob"]

KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        aa.KNOB,
        threads.KNOB,
        max_connections.KNOB,
        record_streams.KNOB,
        *alloc_conf.KNOBS,
        *nccl.KNOBS,
        *fsdp.KNOBS,
        tp.KNOB,
        cuda_graphs.KNOB,
    )
}


def find_knob(text: str) -> tuple[Knob, list[str] | None]:
    """The knob that `text` names, and the values it gives: `max_connections`, `fsdp.prefetch`, `fsdp` for the first of
    its aspects, an aspect alone where no other knob has one of that name, or `NAME=a,b,c` for any variable.

    Raises `UsageError` for an unknown knob, with the closest.
    """
    name, given, values = text.partition("=")
    if given:
        return _variable(name), split_values(values)
    found = _named()
    if name in found:
        return found[name], None
    known = aspects(name.partition(".")[0]) or list(KNOBS)
    close = difflib.get_close_matches(name, found if len(known) == len(KNOBS) else known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}."
    raise UsageError(f"no knob {name!r}: {hint} Any variable can be tried as NAME=a,b (unset is a value)")


def aspects(name: str) -> list[str]:
    """The aspects of the knob `name`, the first being what its name alone means; none for a knob without."""
    return [full for full in KNOBS if full.startswith(f"{name}.")]


def _named() -> dict[str, Knob]:
    """Every name that means a knob."""
    found: dict[str, Knob] = {}
    every = [full.partition(".")[2] for full in KNOBS]
    for full, knob in KNOBS.items():
        group, _, aspect = full.partition(".")
        found.setdefault(group, knob)
        if aspect and every.count(aspect) == 1:
            found.setdefault(aspect, knob)
    return found | KNOBS


def _variable(name: str) -> Knob:
    """What is known of a variable, by its current or its old name, as a knob whose values are written in full."""
    current = next((known.alias_of for known in KNOWN if known.name == name and known.alias_of), name)
    known = [knob for knob in KNOBS.values() if knob.variable == current]
    if not known:
        return variable_knob(name)
    if len(known) == 1:
        return replace(known[0], variable=name, template=None)
    first = known[0]
    return replace(
        variable_knob(name),
        hypothesis=f"{name} changes {first.metric}",
        acts_on=first.acts_on,
        metric=first.metric,
        default=first.default,
        needs_cuda=first.needs_cuda,
        normal=first.normal,
        inaction=first.inaction,
    )


def variable_knob(variable: str) -> Knob:
    """A variable of which nothing is known here."""
    return Knob(
        name=variable,
        hypothesis=f"{variable} changes the time of a step",
        acts_on="whatever reads it",
        metric="step_wall_ns",
        variable=variable,
        values=(UNSET,),
    )
