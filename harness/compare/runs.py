"""Run against run: what changed from A to B, and what one run of each can decide.

The allocator does what the program asks, so peaks that do not vary over a run's steps are compared exactly. Times vary
from run to run by more than they do within one, so a single run of each decides nothing about them: `inconclusive`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from harness.compare.difference import Difference, differences, incomparable
from harness.compare.gate import GateResult
from harness.compare.measured import Measured
from harness.compare.metrics import METRICS, Metric, Value, run_metrics
from harness.text import in_ranges

SCHEMA_VERSION = 1

Verdict = Literal["better", "worse", "no difference", "inconclusive"]

# A change of an undecided figure that would matter: percent, of a share (`_pct`) points.
MATTERS_PCT = 1.0
MATTERS_POINTS = 2.0

LABELLED_MODES = {
    "shared-gpu": "the ranks share one GPU",
    "rehearsal": "one process rehearses the ranks",
    "cpu": "it ran on CPUs",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricComparison:
    """A metric of both runs; `effect_pct` = 100·(b − a)/a, None where a is 0 or unknown."""

    metric: str
    a: int | float | None
    b: int | float | None
    better: Literal["lower", "higher"]
    effect_pct: float | None
    verdict: Verdict
    source_a: str | None
    source_b: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two runs side by side. `values` are the runs' own metrics, which gates are checked against."""

    verdict: Verdict
    metrics: list[MetricComparison]
    values: tuple[dict[str, Value], dict[str, Value]]
    arms: list[dict[str, Any]]
    comparable: bool
    differences: list[Difference]
    notes: list[str]
    errors: list[dict[str, Any]]

    def to_json(self, gate: list[GateResult]) -> dict[str, Any]:
        """The object of `meshscope compare --json`."""
        modes = {arm["mode"] for arm in self.arms}
        return {
            "schema_version": SCHEMA_VERSION,
            "mode": modes.pop() if len(modes) == 1 else None,
            "verdict": self.verdict,
            "metrics": [asdict(item) | {"ci_low_pct": None, "ci_high_pct": None} for item in self.metrics],
            "arms": self.arms,
            "comparable": self.comparable,
            "differences": [asdict(item) for item in self.differences],
            "gate": [asdict(item) for item in gate],
            "notes": self.notes,
            "errors": self.errors,
        }


def compare_runs(a: Measured, b: Measured) -> Comparison:
    """Compares what was measured; `comparable` is False where the runs state different machines, modes or work."""
    found = differences(a, b)
    reasons = incomparable(found)
    of_a, of_b = run_metrics(a), run_metrics(b)
    items, notes = [], [f"not comparable: {reason}" for reason in reasons]
    undecided: dict[str, list[str]] = {}
    for name, metric in METRICS.items():
        item, why = compare_metric(metric, of_a[name], of_b[name], comparable=not reasons)
        items.append(item)
        if why:
            undecided.setdefault(why, []).append(name)
    notes += [f"{', '.join(names)}: {why}" for why, names in undecided.items()]
    notes += mode_notes(a, b)
    if a.recording is None or b.recording is None:
        notes.append("no manifest in A or B: that they ran on the same machine with the same work is not known")
    return Comparison(
        verdict=overall(items) if not reasons else "inconclusive",
        metrics=items,
        values=(of_a, of_b),
        arms=[arm("A", a), arm("B", b)],
        comparable=not reasons,
        differences=found,
        notes=notes,
        errors=[error.to_json() for error in (*a.errors, *b.errors)],
    )


def arm(name: str, measured: Measured) -> dict[str, Any]:
    status = measured.recording.status if measured.recording else None
    return {
        "name": name,
        "path": str(measured.path),
        "mode": measured.mode,
        "status": status.state if status else None,
        "runs": 1,
        "steps": len(measured.steps),
        "ranks": len(measured.ranks),
        "missing_ranks": measured.recording.missing_ranks if measured.recording else [],
    }


def compare_metric(metric: Metric, a: Value, b: Value, *, comparable: bool) -> tuple[MetricComparison, str | None]:
    """The metric of both runs, and why it is undecided if it is."""
    verdict, why = judge(metric, a, b, comparable=comparable)
    effect = 100 * (b.value - a.value) / a.value if a.value and b.value is not None else None
    item = MetricComparison(
        metric=metric.name,
        a=a.value,
        b=b.value,
        better=metric.better,
        effect_pct=effect,
        verdict=verdict,
        source_a=a.source,
        source_b=b.source,
    )
    return item, why


def judge(metric: Metric, a: Value, b: Value, *, comparable: bool) -> tuple[Verdict, str | None]:
    """The verdict on one metric, with the reason for `inconclusive`."""
    if a.value is None or b.value is None:
        missing = [f"unknown in {name} ({v.reason})" for name, v in (("A", a), ("B", b)) if v.value is None]
        return "inconclusive", " and ".join(missing)
    if a.source != b.source:
        return "inconclusive", f"A's are from {a.source}, B's from {b.source}"
    if a.value == b.value:
        return "no difference", None
    if not comparable:
        return "inconclusive", "the runs are not comparable"
    if not metric.is_bytes:
        return "inconclusive", "one run of each gives no interval: repeat the runs to decide"
    if a.spread is None or b.spread is None:
        return "inconclusive", "one value of each, and what waits for a stream depends on timing: repeat the runs"
    if abs(b.value - a.value) <= max(a.spread, b.spread):
        return "inconclusive", "the runs differ by no more than steps of one run do"
    return ("better" if (b.value < a.value) == (metric.better == "lower") else "worse"), None


def overall(items: list[MetricComparison]) -> Verdict:
    """Better or worse where all decided metrics agree and no undecided one points the other way by what matters."""
    known = [item for item in items if item.a is not None and item.b is not None]
    decided = {item.verdict for item in known} & {"better", "worse"}
    opposites: tuple[tuple[Verdict, Verdict], ...] = (("better", "worse"), ("worse", "better"))
    for verdict, opposite in opposites:
        if decided == {verdict}:
            return "inconclusive" if any(leaning(item) == opposite for item in known) else verdict
    if known and all(item.verdict == "no difference" for item in known):
        return "no difference"
    return "inconclusive"


def leaning(item: MetricComparison) -> Literal["better", "worse"] | None:
    """Which way an undecided metric points, None for less than what matters."""
    if item.verdict != "inconclusive" or item.a is None or item.b is None:
        return None
    points = item.metric.endswith("_pct")
    change = item.b - item.a if points else item.effect_pct
    if change is None or abs(change) < (MATTERS_POINTS if points else MATTERS_PCT):
        return None
    return "better" if (change < 0) == (item.better == "lower") else "worse"


def mode_notes(a: Measured, b: Measured) -> list[str]:
    notes = []
    for name, measured in (("A", a), ("B", b)):
        if why := LABELLED_MODES.get(measured.mode):
            notes.append(f"{name} is {measured.mode} ({why}): its times are not a cluster's")
        recording = measured.recording
        if recording and recording.status and recording.status.state != "complete":
            reason = f": {recording.status.reason}" if recording.status.reason else ""
            notes.append(f"{name} is {recording.status.state}{reason}")
        if recording and recording.missing_ranks:
            notes.append(f"{name} lacks ranks {in_ranges(recording.missing_ranks)}")
    return notes
