"""Does a setting change anything: an experiment of `meshscope probe`, its verdict first, then what it rests on."""

from __future__ import annotations

import shlex
from typing import Any

import streamlit as st

from dashboard import commands, data, state, states, summaries
from dashboard.ab import evidence, sections, side
from dashboard.discover import Run, fingerprint, run_at, trials_going_on
from dashboard.extracts import EXPERIMENT
from harness.errors import InputError
from harness.text import counted

TITLE, ICON, ORDER, ABOUT = "A/B", ":material/science:", 65, "folder"

PROBE = "meshscope probe threads --mode cpu --repeats 6 --out runs/out/threads"
LOOKED_EVERY_S = 5.0


def page() -> None:
    st.title("A/B")
    names = [run.name for run in state.runs() if run.kind == "experiment"]
    if not names and "experiment" not in st.query_params:
        states.empty(
            f"{state.root()} holds no experiment: repeated runs of two settings, with a verdict. This makes one:", PROBE
        )
        return
    bar = st.container(horizontal=True, gap="small", vertical_alignment="bottom")
    run = choose(bar, names)
    values = read(run)
    sections.head(values)
    sections.unfinished(values)
    if values["unfinished"]:
        follow(run)
    sections.verdict(values)
    sections.recommended(values)
    figures(run, values)
    evidence.notes(values)
    path = shlex.quote(str(run.path))
    commands.show([f"meshscope report {path}", f"meshscope report {path} --html report.html"])


def choose(bar: Any, names: list[str]) -> Run:
    """An experiment, bound to `?experiment=`. Raises `InputError` for another folder."""
    offered = state.offered("experiment", names)
    # None is chosen by itself: the first of a folder is another one tomorrow, and the URL leaves out what is.
    name = bar.selectbox(
        "Experiment", offered, None, key="experiment", bind="query-params", placeholder=offered[0], width=420
    )
    run = run_at(state.root(), name or offered[0])
    if run.kind != "experiment":
        raise InputError(run.name, "is no experiment of meshscope probe: it has no experiment.json")
    return run


def read(run: Run) -> dict[str, Any]:
    """What is known of it; what the command said at its end is shown until its trials are read."""
    early = st.empty()
    said = summaries.experiment(run)
    words = f"{said.get('knob')}: {said['verdict']}, mode {said.get('mode')}, as meshscope probe said at its end"
    if "recommended" in said:
        early.info(states.escaped(words), icon=":material/hourglass_top:")
    found: dict[str, Any] = data.extract(state.root(), run, EXPERIMENT).values
    early.empty()
    return found


def follow(run: Run) -> None:
    """How the trials that have not ended stand; the page is drawn again when one does."""
    drawn = fingerprint(run, live=data.is_live(run))

    @st.fragment(run_every=LOOKED_EVERY_S)
    def look() -> None:
        if fingerprint(run, live=data.is_live(run)) != drawn:
            st.rerun()
        for name in sorted(trials_going_on(run.path)):
            trial = side.trial_of(run, name)
            rows = data.rows(trial)
            if rows is not None and rows.live:
                st.info(states.escaped(f"▶ {name} is running: {counted(len(rows.steps), 'step')} so far"))
            elif rows is not None:
                st.caption(
                    states.escaped("; ".join([f"✗ {name}: {rows.standing.headline()}", *rows.standing.details()]))
                )
        st.caption(f"Looked at every {LOOKED_EVERY_S:g} s.")

    look()


def figures(run: Run, values: dict[str, Any]) -> None:
    """The metrics of the chosen arm, both arms side by side, and everything that this was made from."""
    arms = sections.run_arms(values)
    others = [item["arm"] for item in values["analysis"]["comparisons"] if item["arm"] in arms]
    arm = chosen_arm(values, others)
    metrics = sections.metrics_of(values)
    if arm is not None and metrics:
        st.subheader("Metrics")
        sections.comparisons(values, arm)
    if metrics:
        primary = values["analysis"]["experiment"]["primary"]
        metric = st.selectbox(
            "Metric",
            metrics,
            key="metric",
            bind="query-params",
            format_func=lambda name: f"{name}, which decides" if name == primary else name,
            width=320,
        )
        sections.one_metric(values, str(metric))
    sections.sees(values)
    sections.differing(values)
    slot = st.container()  # filled last: the traces of two trials may still have to be read
    evidence.queues(values)
    evidence.steps(values)
    evidence.trials(values)
    if arm is not None:
        with slot:
            side.side_by_side(run, values, [arms[0], arm])


def chosen_arm(values: dict[str, Any], arms: list[str]) -> str | None:
    """The arm that is held against the baseline, bound to `?arm=`; at first the recommended one."""
    if len(arms) < 2:
        return arms[0] if arms else None
    best = values["analysis"]["recommended"]
    first = arms.index(best["arm"]) if best else 0
    baseline = values["analysis"]["comparisons"][0]["baseline"]
    arm: str = st.selectbox(f"Arm, against {baseline}", arms, first, key="arm", bind="query-params", width=320)
    return arm
