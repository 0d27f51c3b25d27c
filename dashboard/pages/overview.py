"""One run: what is wrong with it, and where to look."""

from __future__ import annotations

import streamlit as st

from dashboard import state, states

TITLE, ICON, ORDER, ABOUT = "Overview", ":material/dashboard:", 10, "run"


def page() -> None:
    report = state.extract("report").values
    st.title(state.current().name or ".")
    states.partial(report["errors"])
    for finding in report["findings"]:
        st.markdown(f"**{finding['severity']}** {states.escaped(finding['title'])}")
