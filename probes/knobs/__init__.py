"""The knobs, one file each, and any variable named on the command line."""

from __future__ import annotations

import difflib

from harness.errors import UsageError
from probes.knobs import aa, alloc_conf, max_connections, record_streams, reshard, threads
from probes.knobs.knob import UNSET, Arm, Knob, split_values

__all__ = ["KNOBS", "UNSET", "Arm", "Knob", "find_knob", "split_values", "variable_knob"]

KNOBS: dict[str, Knob] = {
    module.KNOB.name: module.KNOB for module in (aa, threads, max_connections, alloc_conf, record_streams, reshard)
}


def find_knob(text: str) -> tuple[Knob, list[str] | None]:
    """The knob that `text` names, and the values it gives: `max_connections`, or `NAME=a,b,c` for any variable.

    Raises `UsageError` for an unknown knob, with the closest.
    """
    name, given, values = text.partition("=")
    if given:
        known = next((knob for knob in KNOBS.values() if knob.variable == name), None)
        return known or variable_knob(name), split_values(values)
    if name in KNOBS:
        return KNOBS[name], None
    close = difflib.get_close_matches(name, KNOBS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(KNOBS)}"
    raise UsageError(f"no knob {name!r}: {hint} Any variable can be tried as NAME=a,b (unset is a value)")


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
