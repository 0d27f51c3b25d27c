"""One run against another: what they differ in first, then what changed, then both over their steps."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard import charts, commands, data, state, states, tables
from dashboard.discover import Run, run_at
from harness.compare import METRICS, Comparison, check, compare_runs, parse_bound
from harness.compare.difference import Difference
from harness.errors import UsageError
from harness.text import counted, quantity, signed_percent

TITLE, ICON, ORDER, ABOUT = "Compare", ":material/compare_arrows:", 60, "folder"

ONE_SIDED = 8
VERDICTS: dict[str, tuple[str, Any]] = {
    "better": ("▲ better", "green"),
    "worse": ("▼ worse", "red"),
    "no difference": ("= no difference", "blue"),
    "inconclusive": ("? inconclusive", "orange"),
}
PEAKS = {"allocated": "peak_allocated_bytes", "active": "peak_active_bytes", "reserved": "peak_reserved_bytes"}


def page() -> None:
    st.title("Compare")
    names = [run.name for run in state.runs() if run.kind != "experiment"]
    if len(names) < 2:
        states.empty("Two runs are needed: A, and the one that changed, B.", "meshscope compare A B")
        return
    a, b = choose(names)
    if a.name == b.name:
        states.empty("A and B are the same run: choose another.")
        return
    root = state.root()
    measured = data.measured(root, a), data.measured(root, b)
    for side in measured:
        states.partial([error.to_json() for error in side.errors])
    comparison = compare_runs(*measured)
    verdict(comparison)
    differences(comparison)
    metrics(comparison)
    over_steps(a, b, measured)
    commands.show(commands.compare(a, b))


def choose(names: list[str]) -> tuple[Run, Run]:
    """A and B, bound to `?a=` and `?b=`."""
    left, right = st.columns(2, gap="medium")
    first, second = state.offered("a", names), state.offered("b", names)
    a = left.selectbox("A", first, key="a", bind="query-params", format_func=lambda name: name or ".")
    b = right.selectbox(
        "B, the run that changed", second, 1, key="b", bind="query-params", format_func=lambda name: name or "."
    )
    return run_at(state.root(), str(a)), run_at(state.root(), str(b))


def verdict(comparison: Comparison) -> None:
    words, colour = VERDICTS[comparison.verdict]
    with st.container(horizontal=True, gap="small"):
        st.badge(words, color=colour)
        for arm in comparison.arms:
            st.badge(f"{arm['name']}: mode {arm['mode']}, {arm['status'] or 'files'}", color="gray")
        if not comparison.comparable:
            st.badge("not comparable", color="red")
    for note in comparison.notes:
        st.caption(states.escaped(note))


def differences(comparison: Comparison) -> None:
    st.subheader("What they differ in")
    if not comparison.differences:
        st.caption("The runs state nothing they differ in.")
        return
    both = [item for item in comparison.differences if item.a is not None and item.b is not None]
    one = [item for item in comparison.differences if item.a is None or item.b is None]
    if both or len(one) <= ONE_SIDED:
        listed(both or one)
    if one and (both or len(one) > ONE_SIDED):
        with st.expander(f"{counted(len(one), 'thing')} that only one of them states", expanded=len(one) <= ONE_SIDED):
            listed(one)


def listed(items: list[Difference]) -> None:
    rows = [{"what": item.what, "a": said(item.a), "b": said(item.b)} for item in items]
    tables.show(rows, {"what": "", "a": "A", "b": "B"}, words="What the runs differ in")


def said(value: Any) -> str:
    return "not stated" if value is None else str(value)


def metrics(comparison: Comparison) -> None:
    st.subheader("Figures")
    rows = [
        {
            "metric": item.metric,
            "a": quantity(item.metric, item.a),
            "b": quantity(item.metric, item.b),
            "change": change_of(item.metric, item.a, item.b, item.effect_pct),
            "verdict": VERDICTS[item.verdict][0],
            "what": METRICS[item.metric].what,
        }
        for item in comparison.metrics
        if item.a is not None or item.b is not None
    ]
    headers = {"metric": "metric", "a": "A", "b": "B", "change": "change", "verdict": "verdict", "what": "what it is"}
    tables.show(rows, headers, words="Figures of both runs and their change")
    gate(comparison)


def change_of(metric: str, a: float | None, b: float | None, effect_pct: float | None) -> str:
    """As `meshscope compare` says it: of shares the difference in points."""
    if metric.endswith("_pct") and a is not None and b is not None:
        return signed_percent(b - a).replace("%", "points")
    return signed_percent(effect_pct)


def gate(comparison: Comparison) -> None:
    """A bound as of `--fail-on`, kept in the URL."""
    bound = st.text_input(
        "Bound, as of --fail-on", key="bound", bind="query-params", placeholder="peak_allocated_bytes>+2%"
    )
    if not bound:
        return
    try:
        result = check(parse_bound(bound), *comparison.values)
    except UsageError as error:
        states.broken(error)
        return
    words = states.escaped(f"{result.bound}: {'passed' if result.passed else 'FAILED'}, {result.reason}")
    (st.success if result.passed else st.error)(words)


def over_steps(a: Run, b: Run, measured: tuple[Any, Any]) -> None:
    """Step times and peaks of both runs on one axis each."""
    steps = {f"{name}: {run.name}": side.steps for name, run, side in zip("AB", (a, b), measured, strict=True)}
    times = charts.step_times(steps)
    if times is not None:
        st.subheader("Time of each step")
        charts.show(times, "Time of each step of both runs")
    known = {word: chart for word, peak in PEAKS.items() if (chart := charts.peaks_per_step(steps, peak)) is not None}
    if known:
        st.subheader("Peak of each step")
        word = st.segmented_control(
            "Peak", list(known), default=next(iter(known)), key="peak_of_steps", bind="query-params"
        )
        charts.show(known[word or next(iter(known))], f"Peak {word} of each step of both runs")
    parts = [
        item | {"label": f"{name} rank {'?' if item['rank'] is None else item['rank']}"}
        for name, run in (("A", a), ("B", b))
        for item in data.extract(state.root(), run, "report").values["mean_parts"][: charts.RANKS_DRAWN // 2]
    ]
    if parts:
        st.subheader("Where a traced step goes")
        charts.show(charts.step_parts(parts), "Parts of the mean traced step of each rank of both runs")
