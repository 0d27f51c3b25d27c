"""Everything in the folder."""

from __future__ import annotations

import streamlit as st

from dashboard import state, states

TITLE, ICON, ORDER, ABOUT = "Runs", ":material/list:", 0, "folder"


def page() -> None:
    st.title("Runs")
    runs = state.runs()
    if not runs:
        states.empty(
            f"{state.root()} holds no recording, trace or snapshot.", "meshscope run --module debug --config tiny"
        )
        return
    st.dataframe([{"run": run.name or ".", "kind": run.kind} for run in runs], hide_index=True)
