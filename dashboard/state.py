"""What is chosen, kept in the URL, so that a view can be sent: `?run=…&rank=…&step=…` and whatever a page adds.

The sidebar chooses the run for every page. A page binds its own choices with `key=` and `bind="query-params"`, and
leads elsewhere with `link`, which hands over what it is given. Pages that share the name of a choice (`rank` and `step`
of the timelines) share its type: what one leaves behind the other begins with.
"""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard import data
from dashboard.discover import Run, root, run_at
from dashboard.store import Extract
from harness.errors import InputError

__all__ = ["PAGES", "choose_run", "current", "extract", "link", "offered", "root", "runs", "unread"]

REFUSED = "refused"
"""Where the session keeps why the run of the URL cannot be shown."""

PAGES: dict[str, Any] = {}
"""Name of a page -> its `st.Page`; filled by `app`."""


def runs() -> list[Run]:
    return data.runs_below(root())[0]


def choose_run() -> bool:
    """The sidebar's choice of a run, kept in `?run=`; False if there is none. A name that is not listed but lies in the
    folder is offered, too; one that cannot be shown is explained by `current`.

    Not bound to the URL as a page's own choices are: a widget on all pages and links that name its value double it.
    """
    names = [run.name for run in runs() if run.kind != "experiment"]
    asked = st.query_params.get("run")
    st.session_state[REFUSED] = None
    if asked is not None and asked not in names:
        try:
            names = [run_at(root(), asked).name, *names]
        except InputError as error:
            st.session_state[REFUSED] = error
    if asked in names:
        st.session_state["run"] = asked
    if names:
        label = "Recording"
        st.selectbox(label, names, key="run", format_func=lambda name: name or ".", on_change=_put_run_in_url)
    return bool(names)


def _put_run_in_url() -> None:
    st.query_params["run"] = st.session_state["run"]


def offered(key: str, names: list[str]) -> list[str]:
    """`names`, and what the URL names under `key` if it lies in the folder; raises `InputError` if it does not."""
    asked = st.query_params.get(key)
    return names if asked is None or asked in names else [run_at(root(), asked).name, *names]


def current() -> Run:
    """The chosen run.

    Raises `InputError` if the URL names one that is not in the folder, or an experiment, or there is none.
    """
    if refused := st.session_state[REFUSED]:
        raise refused
    name = st.session_state.get("run")
    if name is None:
        raise InputError(root(), "holds nothing to show")
    return data.require_run(run_at(root(), name))


def extract(name: str) -> Extract:
    """An extract (`extracts.EXTRACTS`) of the chosen run; raises as `data.extract`."""
    return data.extract(root(), current(), name)


def unread() -> list[dict[str, Any]]:
    """Files of the chosen run that are missing or could not be read; how the run itself stands, Overview says."""
    folder = str(current().path)
    return [error for error in extract("report").values["errors"] if error["file"] != folder]


def link(page: str, label: str, *, icon: str | None = None, **state: str | int | None) -> None:
    """A link to a page with its state: `run` is the chosen one unless given."""
    chosen = {"run": st.session_state.get("run"), **state}
    parameters = {name: str(value) for name, value in chosen.items() if value is not None}
    st.page_link(PAGES[page], label=label, icon=icon, query_params=parameters)
