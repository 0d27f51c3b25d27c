"""A verdict in plain words."""

from __future__ import annotations

from collections.abc import Iterator

from harness.text import counted, quantity
from probes.analysis import Analysis, ArmComparison
from probes.knobs import UNSET
from probes.report.amounts import amount, around_zero
from probes.report.data import INTERPRETER, Differing, deciding
from probes.stats import Comparison

NAMES = {
    "step_wall_ns": "the time of a step",
    "peak_allocated_bytes": "the allocated peak",
    "peak_active_bytes": "the active peak",
    "peak_reserved_bytes": "the reserved peak",
    "peak_rss_bytes": "the highest resident set",
    "exposed_ns": "exposed communication",
    "overlap_pct": "the share of communication that compute hides",
    "wait_pct": "the share of communication spent waiting for the last rank",
}


def setting_of(item: Differing, arm: str) -> str:
    """What an arm has of something that the arms do not share."""
    if arm not in item.values:
        return "no trial"
    value = item.values[arm]
    if value is not None:
        return str(value)
    is_variable = item.what.isupper() or item.what.startswith("environment")
    return UNSET if is_variable else "this one" if item.what == INTERPRETER else "as it is"


def explained(analysis: Analysis, item: ArmComparison) -> Iterator[str]:
    """What the verdict on an arm says and what it rests on, a sentence each."""
    baseline = analysis.experiment.baseline.name
    main = deciding(analysis, item)
    if item.reason is not None:
        yield f"{item.reason}."
    if main is None:
        if item.reason is None:
            yield f"{analysis.experiment.primary}, which decides, is not known in two pairs: nothing can be said."
        return
    name = NAMES[main.metric]
    yield (
        f"In arm {item.arm} {name} is {quantity(main.metric, main.b)}, in arm {baseline} "
        f"{quantity(main.metric, main.a)}: {amount(main.effect, main.unit)}."
    )
    if main.exact:
        yield "Every trial of an arm gave the same value, so the difference is exact and needs no interval."
    else:
        yield from _interval(main)
    if item.reason is None:
        yield _meaning(item, main)


def _interval(main: Comparison) -> Iterator[str]:
    if main.ci_low is None:
        yield f"There is no interval: {'; '.join(main.notes)}."
        return
    low, high = amount(main.ci_low, main.unit), amount(main.ci_high, main.unit)
    yield (
        f"From {counted(main.n_pairs or 0, 'pair')} of trials run next to each other, the difference lies between "
        f"{low} and {high} ({100 * main.confidence:.3g} % interval); what matters is "
        f"{around_zero(main.threshold, main.unit)}."
    )


def _meaning(item: ArmComparison, main: Comparison) -> str:
    band = around_zero(main.threshold, main.unit)
    if item.verdict != main.verdict:
        decisive = ", ".join(metric.metric for metric in item.metrics if metric.verdict == item.verdict)
        if item.verdict == "inconclusive":
            return f"{main.metric} is shown not to differ, but the other metrics disagree."
        return f"{main.metric} is shown not to differ; {decisive} decides: {item.verdict}."
    if item.verdict == "no difference":
        if main.exact:
            return f"It lies within {band}: the setting does not matter here."
        return f"Two one-sided tests show it to lie within {band}: the setting does not matter here."
    if item.verdict == "inconclusive":
        more = f" About {counted(item.needed_pairs, 'pair')} would decide." if item.needed_pairs else ""
        return f"That neither shows an effect nor excludes one of {band}.{more}"
    if main.exact:
        return f"It reaches {band}: the arm is {item.verdict}."
    return (
        f"0 lies outside (p = {main.p_value:.2g}), and the exact test over all signs of the pairs agrees "
        f"(p = {main.sign_flip_p:.2g}): the arm is {item.verdict}."
    )
