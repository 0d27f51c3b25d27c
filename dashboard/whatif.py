"""The part of the Memory page about other allocator settings: what is asked, and what the model of them says."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard import commands, replays, state, states, tables
from dashboard.discover import Run
from dashboard.replays import Asked
from harness.errors import InputError, UsageError
from harness.text import counted, signed_percent
from harness.whatif.text import case_name

USUAL = [
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.8",
]
LONG_EVENTS = 100_000
EVENT_US, CASE_US = 25, 10
"""What an event takes once (reading it, and the recorded settings replayed), and for each case more."""

HEADERS: dict[str, Any] = {
    "case": "case",
    "peak_reserved_bytes": "peak reserved",
    "change": "change",
    "outcome": "within the limit",
    "allocated_bytes": "allocated then",
    "unused_bytes": "unused then",
    "pending_bytes": "of it pending",
    "device_allocations": "cudaMalloc",
    "retries": "retries",
}
FAILED = {
    "case": "case",
    "requested_bytes": "asked",
    "reserved_bytes": "reserved",
    "allocated_bytes": "allocated",
    "largest_free_bytes": "largest free block",
    "site": "at",
}
POOLS = {
    "case": "case",
    "pool": "pool",
    "stream": "stream",
    "reserved_bytes": "reserved",
    "allocated_bytes": "allocated",
    "pending_bytes": "pending",
    "unused_bytes": "unused",
}


@st.fragment
def section(run: Run, events: Mapping[str, tuple[Path, int]]) -> None:
    """`events`: what to call a history -> its snapshot, and how many events it has."""
    st.subheader("Under other allocator settings")
    st.caption(
        "What this run would have reserved: its allocations and frees, made again on a model of torch's caching "
        "allocator. Nothing runs, and no GPU is needed."
    )
    try:
        asked, length = ask(events)
    except UsageError as error:
        states.broken(error)
        return
    found = replays.kept(state.root(), run, asked)
    if found is None:
        if length > LONG_EVENTS:
            seconds = length * (EVENT_US + CASE_US * (1 + len(asked.confs))) / 1e6
            st.caption(f"The history has {counted(length, 'event')}: this takes a while, about {seconds:.0f} s.")
        place = st.empty()
        if not place.button("Replay", icon=":material/play_arrow:", type="primary"):
            commands.show([shlex.join(["meshscope", *asked.command])])
            return
        try:
            with place, st.spinner("Replaying", show_time=True):
                found = replays.replay(state.root(), run, asked)
        except InputError as error:
            states.broken(error)
            return
        place.empty()
    for device in found["files"][0]["devices"]:
        answer(device, several=len(found["files"][0]["devices"]) > 1)
    commands.show([shlex.join(["meshscope", *asked.command])])


def ask(events: Mapping[str, tuple[Path, int]]) -> tuple[Asked, int]:
    """The choices, all in the URL. Raises `UsageError`."""
    bar = st.container(horizontal=True, gap="small", vertical_alignment="bottom")
    name = next(iter(events))
    if len(events) > 1:
        name = bar.selectbox("Snapshot of", list(events), key="replayed", bind="query-params", width=200)
    confs = bar.multiselect(
        "Settings", USUAL, default=USUAL[:1], key="conf", bind="query-params", placeholder="as recorded", width=380
    )
    own = bar.text_input(
        "Another setting, as PYTORCH_ALLOC_CONF has it",
        key="own_conf",
        bind="query-params",
        placeholder="max_split_size_mb:256,expandable_segments:False",
        width=320,
    )
    limit_gib = bar.number_input(
        "Memory limit, GiB",
        min_value=0.01,
        max_value=1e6,
        value=None,
        step=1.0,
        key="limit_gib",
        bind="query-params",
        placeholder="none",
        help="what the process may reserve: short of it cached memory is given back, then the run ends",
        width=150,
    )
    without_pending = bar.toggle(
        "Without pending",
        key="without_pending",
        bind="query-params",
        help="as if blocks could be reused when they are freed: what record_stream costs in reserved bytes",
    )
    file, length = events[name]
    own = own.strip()
    asked = Asked(
        file=file,
        confs=[*confs, *([own] if own and own not in confs else [])],
        limit_gib=limit_gib,
        without_pending=without_pending,
    )
    return asked, length


def answer(device: Mapping[str, Any], *, several: bool) -> None:
    """One device of the command's JSON."""
    if several:
        st.markdown(f"Device {device['device']}")
    cases = [{"case": f"{number}  {name_of(case)}", **case} for number, case in enumerate(device["cases"])]
    rows = [
        case
        | case["at_peak"]
        | {
            "change": "" if case["against"] is None else f"{signed_percent(case['change_pct'])} vs {case['against']}",
            "pending_bytes": sum(pool["pending_bytes"] for pool in case["at_peak"]["pools"]),
            "outcome": outcome(case),
        }
        for case in cases
    ]
    limited = any(row["outcome"] for row in rows)
    headers = {field: header for field, header in HEADERS.items() if limited or field != "outcome"}
    tables.show(rows, headers, words="What each setting would have reserved")
    failed = [case["out_of_memory"] | {"case": case["case"]} for case in cases if case["out_of_memory"] is not None]
    if failed:
        st.caption("Where memory would have run out, and the run ended.")
        tables.show(failed, FAILED, words="The request that did not fit, of each setting")
    for note in said(device):
        st.caption(states.escaped(note))
    pools = [
        pool | {"case": case["case"], "unused_bytes": pool["reserved_bytes"] - pool["allocated_bytes"]}
        for case in cases
        for pool in case["at_peak"]["pools"]
    ]
    with st.expander("At the peak, by pool and stream"):
        tables.show(pools, POOLS, words="Pools at the reserved peak of each setting")


def name_of(case: Mapping[str, Any]) -> str:
    return case_name(
        case["alloc_conf"],
        case["start"],
        without_pending=case["without_pending"],
        limit_bytes=case["limit_bytes"],
    )


def outcome(case: Mapping[str, Any]) -> str:
    if case["out_of_memory"] is not None:
        return "OUT OF MEMORY"
    return "" if case["limit_bytes"] is None else "fits"


def said(device: Mapping[str, Any]) -> Iterator[str]:
    """How far the figures can be trusted."""
    true = device["fidelity"]
    if true["exact"]:
        calls = f", {counted(true['driver_calls'], 'call')} to the driver" if true["driver_calls"] else ""
        yield (
            f"The model reproduces the recording ({device['recorded_alloc_conf']}): the address of each of "
            f"{counted(true['allocations'], 'allocation')}{calls}, reserved to the byte."
        )
    yield from device["notes"]
