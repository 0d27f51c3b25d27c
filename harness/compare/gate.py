"""`--fail-on 'METRIC OP BOUND'`: a bound on a metric of run B, absolute or relative to run A.

peak_active_bytes>+2%      more than 2 % above A's          overlap_pct<80       below 80 %
step_wall_ns>180ms         above 180 ms                     tokens_per_s<-1%     more than 1 % below A's
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.compare.metrics import METRICS, Value
from harness.errors import UsageError
from harness.text import quantity, signed_percent

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
UNITS: dict[str, dict[str, float]] = {
    "_bytes": {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    "_ns": {"ns": 1, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9},
}
BOUND = re.compile(
    r"\s*(?P<metric>\w+)\s*(?P<op>>=|<=|>|<)\s*(?P<sign>[+-]?)(?P<number>\d+(\.\d+)?)\s*(?P<unit>%|\w*)\s*"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The gate fails when `metric op limit` holds; `limit` is in the metric's unit, or percent of A if `relative`."""

    text: str
    metric: str
    op: str
    limit: float
    relative: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult:
    """One bound decided; `passed` is False too where a value is unknown, and `decided` says so."""

    bound: str
    metric: str
    passed: bool
    decided: bool
    reason: str


def parse_bound(text: str) -> Bound:
    """Raises `UsageError`, naming what is wrong and what would be right."""
    match = BOUND.fullmatch(text)
    if match is None:
        raise UsageError(f"--fail-on {text!r} is not METRIC OP BOUND, such as 'peak_active_bytes>+2%' (OP: > < >= <=)")
    metric, sign, unit = match["metric"], match["sign"], match["unit"]
    if metric not in METRICS:
        close = difflib.get_close_matches(metric, METRICS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(f"--fail-on {text!r}: no metric {metric}; {hint}known: {', '.join(METRICS)}")
    limit = float(sign + match["number"])
    if unit == "%" and not sign and not metric.endswith("_pct"):
        raise UsageError(f"--fail-on {text!r}: a bound relative to A has a sign, +{match['number']}% or -…%")
    relative = unit == "%" and bool(sign)
    if not relative:
        if sign:
            raise UsageError(f"--fail-on {text!r}: an absolute bound has no sign, a relative one ends in %")
        limit *= _factor(text, metric, unit)
    return Bound(text=text, metric=metric, op=match["op"], limit=limit, relative=relative)


def _factor(text: str, metric: str, unit: str) -> float:
    if unit == "" or (unit == "%" and metric.endswith("_pct")):
        return 1
    known = next((units for suffix, units in UNITS.items() if metric.endswith(suffix)), {})
    if unit not in known:
        of = f"units of {metric}: {', '.join(known)}" if known else f"{metric} has no unit"
        raise UsageError(f"--fail-on {text!r}: unknown unit {unit}; {of}")
    return known[unit]


def check(bound: Bound, a: Mapping[str, Value], b: Mapping[str, Value]) -> GateResult:
    """Whether B keeps within a bound; what is unknown does not pass."""
    of_a, of_b = a[bound.metric], b[bound.metric]
    unknown = [
        f"unknown in {name} ({value.reason})"
        for name, value, needed in (("A", of_a, bound.relative), ("B", of_b, True))
        if needed and value.value is None
    ]
    if unknown:
        return _result(bound, passed=False, decided=False, reason=f"cannot be decided: {' and '.join(unknown)}")
    assert of_b.value is not None
    figures = quantity(bound.metric, of_b.value)
    if not bound.relative:
        passed = not OPERATORS[bound.op](of_b.value, bound.limit)
        return _result(bound, passed=passed, decided=True, reason=f"B {figures}")
    assert of_a.value is not None
    # In values, not in percent of A, so that A = 0 needs no rule of its own and equal values are within any bound.
    passed = not OPERATORS[bound.op](of_b.value, of_a.value + abs(of_a.value) * bound.limit / 100)
    change = f", {signed_percent(100 * (of_b.value - of_a.value) / of_a.value)}" if of_a.value else ""
    reason = f"A {quantity(bound.metric, of_a.value)}, B {figures}{change}"
    return _result(bound, passed=passed, decided=True, reason=reason)


def _result(bound: Bound, *, passed: bool, decided: bool, reason: str) -> GateResult:
    return GateResult(bound=bound.text, metric=bound.metric, passed=passed, decided=decided, reason=reason)
