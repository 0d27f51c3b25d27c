"""The tables of the overlap page, as `meshscope overlap` writes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import streamlit as st

from dashboard import tables
from dashboard.lanes import overlap_figures

Row = dict[str, Any]

OF_COMMUNICATION = {
    "comm_ns": "communication",
    "overlap_ns": "hidden by compute",
    "exposed_ns": "exposed",
    "overlap_pct": "hidden share",
}
OF_WINDOW = OF_COMMUNICATION | {
    "compute_ns": "compute",
    "memory_ns": "memory operations",
    "idle_ns": "idle",
    "span_ns": "span",
}


def in_view(rows: Sequence[Row]) -> None:
    headers = {
        "group": "rank",
        "lane": "lane",
        "events": "events",
        "busy_ns": "busy",
        "busy_pct": "busy share",
        "exposed_ns": "exposed",
    }
    tables.show(rows, headers, words="What ran in the view, lane by lane")


def dimensions(entries: Sequence[Row], chosen: Collection[str]) -> None:
    st.caption("Whole files. Dimensions that communicate at the same time need not add up to all.")
    tables.show(
        overlap_figures.whole_rows(entries),
        {"rank": "rank", "device": "device", "source": "source", **OF_WINDOW},
        words="Communication and compute of each rank",
    )
    rows = overlap_figures.dimension_rows(entries, chosen)
    tables.show(rows, {"rank": "rank", "dimension": "dimension", **OF_COMMUNICATION}, words="Each dimension")


def collectives(entries: Sequence[Row], chosen: Collection[str]) -> None:
    st.caption("Whole files. The sum counts collectives that run at the same time twice, communication once.")
    headers = {"rank": "rank", "dimension": "dimension", "kind": "kind", "group": "group", "count": "count"}
    rows = overlap_figures.collective_rows(entries, chosen)
    tables.show(rows, headers | OF_COMMUNICATION | {"sum_ns": "sum"}, words="Each kind of collective")


def units(entries: Sequence[Row]) -> None:
    rows = overlap_figures.unit_rows(entries)
    if not rows:
        st.caption("The traces name no FSDP unit (ranges `FSDP::…` around what it launches).")
        return
    headers = {"rank": "rank", "unit": "layer", "phase": "phase", "kind": "kind"}
    tables.show(rows, headers | OF_COMMUNICATION, words="Each FSDP unit")


def steps(entries: Sequence[Row], rule: str, step: int | None) -> None:
    rows = overlap_figures.step_rows(entries, rule, step)
    if not rows:
        st.caption("The traces have no steps (`ProfilerStep#N` annotations).")
        return
    headers = {"rank": "rank", "step": "step", **OF_WINDOW, "incomplete": "incomplete"}
    tables.show(rows, headers, words=f"Each step by the rule {rule}")
    rows = overlap_figures.breakdown_rows(entries, step)
    names = dict.fromkeys(name for row in rows for name in row)
    st.caption(
        "By the launch rule: compute, exposed communication by dimension, exposed memory operations, idle, "
        "and of idle what the device waited for its host."
    )
    tables.show(rows, {name: overlap_figures.header(name) for name in names}, words="Where each step's span goes")


def waiting(cross_rank: Row, chosen: Collection[str]) -> None:
    rows = overlap_figures.waiting_rows(cross_rank, chosen)
    if not rows:
        st.caption("Waiting is known where two ranks or more recorded the same collectives.")
        return
    st.caption(
        "Transfer: the shortest duration of a collective over its ranks. A rank's wait: its own duration beyond that, "
        "which it spent waiting for the last to come."
        + ("" if cross_rank["aligned"] else " Clocks are not aligned, so who waited for whom is unknown.")
    )
    names = dict.fromkeys(name for row in rows for name in row)
    tables.show(rows, {name: overlap_figures.header(name) for name in names}, words="Waiting for other ranks")


def worst(rows: Sequence[Row], on_select: Callable[[], None]) -> None:
    headers = {
        "rank": "rank",
        "kind": "kind",
        "dimension": "dimension",
        "unit": "layer",
        "step": "step",
        "exposed_ns": "exposed",
        "duration_ns": "duration",
        "at_ns": "begins at",
    }
    tables.show(
        rows,
        headers,
        key="worst",
        words="The collectives with most exposed time",
        on_select=on_select,
        selection_mode="single-row",
    )


def life(rows: Sequence[Row]) -> None:
    headers = {
        "start_ns": "from",
        "dur_ns": "time",
        "phase": "phase",
        "what": "what",
        "bytes": "bytes",
        "source": "source",
        "dtype": "dtype",
        "dimension": "dimension",
        "exposed_ns": "exposed",
        "wait_ns": "waiting",
        "last_rank": "for rank",
    }
    timed = [
        row
        | {"dur_ns": row["end_ns"] - row["start_ns"], "what": "computes" if row["kind"] == "compute" else row["what"]}
        for row in rows
    ]
    tables.show(timed, headers, words="The states of a unit's parameters, with times and bytes")
