"""What an experiment's verdict was made from, part by part: steps, trials, GPUs, hardware queues, notes."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from dashboard import states, tables
from dashboard.ab import charts
from dashboard.ab.sections import Values, mode_words, run_arms
from dashboard.charts import show
from harness.text import counted, printable

TRIAL_STATES = {
    "valid": "✓ valid",
    "void": "✕ void, ran again",
    "outcome": "✗ did not run through",
    "given up": "✕ pair given up",
    "not ended": "◐ not ended",
}


def steps(values: Values) -> None:
    """Every step of every trial."""
    traces = values["step_traces"]
    chart = charts.step_traces(run_arms(values), traces)
    if chart is None:
        return
    st.subheader("Every step of every trial")
    show(chart, "Time of every step of every trial, and the median over the trials of each arm")
    st.caption(
        "Faint: each trial; strong: the median over an arm's trials. Hollow: warm-up and the traced and tracked steps, "
        f"which no figure comes from. {mode_words(values)}"
    )
    walls = {f"trial{one['index']}_ns": dict(zip(one["steps"], one["wall_ns"], strict=True)) for one in traces}
    numbers = sorted({step for of_trial in walls.values() for step in of_trial})
    rows = [{"step": step, **{key: of_trial.get(step) for key, of_trial in walls.items()}} for step in numbers]
    headers = {f"trial{one['index']}_ns": f"{one['index']}: {printable(one['arm'])}" for one in traces}
    with st.expander("Steps as a table"):
        tables.show(rows, {"step": "step", **headers}, words="Time of every step of every trial")


def trials(values: Values) -> None:
    """Every run, those that do not count too."""
    rows = values["order"]
    if not rows:
        return
    st.subheader("Trials")
    names = [
        name
        for name in dict.fromkeys(name for row in rows for name in row["values"])
        if any(row["values"].get(name) is not None for row in rows)
    ]
    listed = [
        {
            "trial": f"{row['index']}" + (f", run {row['number'] + 1}" if row["number"] else ""),
            "arm": row["arm"],
            "pair": row["pair"],
            "state": TRIAL_STATES[row["state"]],
            **{name: row["values"].get(name) for name in names},
            "reason": row["reason"],
        }
        for row in rows
    ]
    headers = {"trial": "trial", "arm": "arm", "pair": "pair", "state": "state", **{name: name for name in names}}
    if any(row["reason"] for row in rows):
        headers["reason"] = "why"
    tables.show(listed, headers, words="Every trial in the order in which they ran")
    set_aside = len(values["analysis"]["voided"])
    said = f"{counted(set_aside, 'run')} set aside, for reasons fixed before. " if set_aside else ""
    st.caption(f"In the order in which they ran. {said}{mode_words(values)}")
    gpus(values)


def gpus(values: Values) -> None:
    """What NVML said of the GPUs while the trials ran."""
    if not values["gpus"]:
        return
    rows = [
        {
            "index": gpu["index"],
            "uuid": gpu["uuid"],
            **{name: span(gpu[name]) for name in ("sm_clock_mhz", "temperature_c", "power_w")},
            "reasons": ", ".join(gpu["clock_reasons"]) or "none",
        }
        for gpu in values["gpus"]
    ]
    headers = {
        "index": "GPU",
        "uuid": "UUID",
        "sm_clock_mhz": "SM clock, MHz",
        "temperature_c": "temperature, °C",
        "power_w": "power, W",
        "reasons": "clock lowered by",
    }
    with st.expander("GPUs while the trials ran"):
        tables.show(rows, headers, words="Lowest and highest that NVML said while the trials ran")


def span(value: Sequence[float] | None) -> str:
    return "n/a" if value is None else f"{value[0]:g} to {value[1]:g}"


def queues(values: Values) -> None:
    """The hardware queues of the context of each arm, where the arms set their number."""
    found = values["analysis"]["queues"]
    if found is None:
        return
    st.subheader("Hardware queues of each arm's context")
    states.partial(found["errors"])
    st.markdown("\n".join(f"- {states.escaped(line)}" for line in found["findings"]))
    rows = [
        {
            "arm": one["arm"],
            "value": one["value"],
            "count": None if one["count"] is None else f"{'≥ ' if one['at_least'] else ''}{one['count']}",
            "low": one["low"],
            "high": one["high"],
            "rounds": len(one["rounds"]),
            "reason": one["reason"],
        }
        for one in found["arms"]
    ]
    headers = {
        "arm": "arm",
        "value": found["variable"],
        "count": "queues",
        "low": "from",
        "high": "to",
        "rounds": "rounds",
        "reason": "why none",
    }
    tables.show(rows, headers, words="Hardware queues of each arm's context")
    if chart := charts.queue_latencies(run_arms(values), found["arms"]):
        show(chart, "When independent work in one more stream ends, by the number of busy streams, for each arm")
        listed = [
            {"arm": one["arm"], "streams": int(streams), "latency_ns": ns}
            for one in found["arms"]
            for streams, ns in one["latency_ns"].items()
        ]
        with st.expander("Latencies as a table"):
            headers = {"arm": "arm", "streams": "streams", "latency_ns": "work ended after"}
            tables.show(listed, headers, words="When independent work ends")
    notes = " ".join(f"{note[0].upper()}{note[1:]}." for note in found["notes"])
    st.caption(f"{states.escaped(found['device'] or 'No device')}, mode {found['mode']}. {states.escaped(notes)}")


def notes(values: Values) -> None:
    said = [*values["analysis"]["notes"], *(f"known of this setting: {fact}" for fact in values["known"])]
    if said:
        with st.expander(counted(len(said), "note")):
            st.markdown("\n".join(f"- {states.escaped(note)}" for note in said))
