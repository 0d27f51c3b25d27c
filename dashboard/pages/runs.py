"""Everything in the folder: filter, sort, open one, compare two."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard import data, state, states, summaries, tables
from harness.text import counted

TITLE, ICON, ORDER, ABOUT = "Runs", ":material/list:", 0, "folder"

SORTS = {
    "name": "run",
    "newest first": "started",
    "slowest first": "step_wall_ns",
    "highest peak first": "peak_allocated_bytes",
}
SHOWN = 300
LIVE_EVERY_S = 5


def page() -> None:
    st.title("Runs")
    found, whole = data.runs_below(state.root())
    if not found:
        nothing = f"{state.root()} holds no recording, trace or snapshot. This makes one:"
        states.empty(nothing, "meshscope run --module debug --config tiny")
        return
    if not whole:
        st.warning(
            "Not all of the folder is shown: it is very large (name a folder further down), or holds folders whose "
            "names are not UTF-8 (rename them).",
            icon=":material/warning:",
        )
    experiments = [summaries.experiment(run) for run in found if run.kind == "experiment"]
    if experiments:
        show_experiments(experiments)
    with st.spinner("Reading the runs"):
        going_on = any(summaries.says_it_goes_on(run) for run in found)
    st.fragment(listing, run_every=LIVE_EVERY_S if going_on else None)()


def listing() -> None:
    root = state.root()
    rows = [summaries.summary(root, run) for run in state.runs() if run.kind != "experiment"]
    chosen = filtered(rows)
    shown = [row | {"state": states.marked(row["state"])} for row in chosen[:SHOWN]]
    more = f", the first {SHOWN} shown" if len(chosen) > SHOWN else ""
    st.caption(f"{counted(len(chosen), 'run')} of {len(rows)}{more}. Select one to open it, two to compare them.")
    open_or_compare(tables.picked(shown, columns(shown), "run", parameter="picked", several=True))


def filtered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices above the table, kept in the URL."""
    words, modes, sort = st.columns([3, 3, 2])
    text = words.text_input(
        "Filter", key="q", bind="query-params", placeholder="part of any column, e.g. tp 4 or failed"
    )
    known = sorted({str(row["mode"]) for row in rows if row.get("mode")})
    wanted = modes.multiselect("Mode", known, key="mode", bind="query-params", placeholder="any")
    order = SORTS[sort.selectbox("Sort", list(SORTS), key="sort", bind="query-params")]
    kept = [row for row in rows if matches(row, text or "") and (not wanted or row.get("mode") in wanted)]
    if order == "run":
        return kept
    return sorted(kept, key=lambda row: (row.get(order) is None, -(row.get(order) or 0)))


def matches(row: dict[str, Any], text: str) -> bool:
    """Every word is somewhere in the row."""
    everything = " ".join(str(value) for value in row.values() if value is not None).lower()
    return all(word in everything for word in text.lower().split())


def columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Those that any row has something in."""
    headers = {
        "run": st.column_config.TextColumn("run", pinned=True),
        "state": "state",
        "findings": st.column_config.TextColumn("findings", help="of runs that were opened before"),
        "mode": "mode",
        "layout": "layout",
        "step_wall_ns": "median step",
        "tokens_per_s": "tokens/s/device",
        "peak_allocated_bytes": "peak allocated",
        "steps": "steps",
        "devices": "devices",
        "torch": "torch",
        "nccl": "NCCL",
        "note": "note",
    }
    return {name: header for name, header in headers.items() if any(row.get(name) is not None for row in rows)}


def open_or_compare(names: list[str]) -> None:
    if len(names) == 1:
        state.link("overview", f"Open {names[0]}", icon=":material/arrow_forward:", run=names[0])
    elif len(names) == 2:
        label = f"Compare {names[0]} with {names[1]}"
        state.link("compare", label, icon=":material/compare_arrows:", run=names[0], a=names[0], b=names[1])
    elif names:
        st.caption("Two runs can be compared.")


def show_experiments(experiments: list[dict[str, Any]]) -> None:
    st.subheader("Experiments")
    headers = {"run": "experiment", "knob": "knob", "verdict": "verdict", "primary": "decided by", "pairs": "pairs"}
    headers |= {"mode": "mode", "recommended": "recommended"}
    words = "Experiments and their verdicts"
    picked = tables.picked(experiments, headers, "run", parameter="experiment", several=False, words=words)
    name = picked[0] if picked else experiments[0]["run"]
    state.link("ab", f"Open experiment {name} in A/B", icon=":material/science:", experiment=name)
