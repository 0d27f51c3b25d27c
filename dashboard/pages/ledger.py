"""What a run should hold and send, beside what it did."""

from __future__ import annotations

import shlex
from typing import Any

import streamlit as st

from dashboard import charts, commands, data, state, states, tables
from harness.text import in_ranges, quantity, signed_percent

TITLE, ICON, ORDER, ABOUT = "Ledger", ":material/receipt_long:", 40, "run"

LONGEST = 12
MEASURED = ("predicted", "measured")
FIGURES = {
    "step_ns": "step",
    "compute_ns": "compute",
    "comm_ns": "communication",
    "exposed_ns": "exposed",
    "overlap_pct": "hidden share",
}
AGREES = {True: "✓ equal", False: "✗ differs", None: "n/a"}


def page() -> None:
    run = state.current()
    st.title(f"Ledger: {run.name or run.path.name}")
    report = data.extract(state.root(), run, "report").values
    prediction = report["ledger"]
    if prediction is None:
        path = shlex.quote(str(run.path))
        why = (
            report["not_predicted"] or "The run states no configuration that the ledger knows, so nothing is predicted."
        )
        states.empty(
            f"{why} For a run of another trainer, say which configuration it is:",
            f"meshscope ledger --module llama3 --config llama3_1b --against {path}",
        )
    else:
        peaks(prediction)
        lines(prediction)
        time_of_step(prediction["time"])
    communication(report)
    commands.show(commands.of_run(run, data.rows(run))[:1])


def peaks(prediction: dict[str, Any]) -> None:
    st.subheader("Peaks, from the second step on")
    headers: dict[str, Any] = {
        "rank": "rank",
        "peak_allocated_bytes": st.column_config.Column("predicted", help="allocated bytes"),
        "measured_peak_allocated_bytes": "measured",
        "error_pct": st.column_config.Column("error", help="100 · (predicted − measured) / measured"),
        "peak_reserved_bytes": st.column_config.Column("reserved", help="predicted, of the CUDA allocator"),
        "measured_peak_reserved_bytes": "measured reserved",
        "reserved_error_pct": "error of reserved",
        "at": "predicted at",
        "resident_bytes": st.column_config.Column("between steps", help="predicted, gradients included"),
        "first_step_peak_allocated_bytes": "first step",
    }
    tables.show(prediction["ranks"], headers, words="Predicted and measured peak of each rank")
    st.caption(f"Predicted for {prediction['target']}.")


def lines(prediction: dict[str, Any]) -> None:
    """The lines of one kind of rank; ranks that hold the same are chosen together."""
    alike: dict[int, list[int]] = {}
    for rank in prediction["ranks"]:
        alike.setdefault(rank["alike_rank"], []).append(rank["rank"])
    of_rank = {rank["rank"]: rank for rank in prediction["ranks"]}
    st.subheader("What it should consist of")
    chosen = st.selectbox("Rank", list(of_rank), key="of_rank", bind="query-params", width=160)
    rank = of_rank[chosen]
    same = alike[rank["alike_rank"]]
    others = f" Predicted alike: ranks {in_ranges(same)}." if len(same) > 1 else ""
    entries = [entry for entry in rank["entries"] if entry["bytes"]]
    left, right = st.columns([2, 3], gap="medium")
    with left:
        at_peak = {entry["category"]: entry["at_peak_bytes"] for entry in entries if entry["at_peak_bytes"]}
        charts.show(charts.shares(at_peak), f"Lines at the predicted peak of rank {rank['rank']}")
    with right:
        formulas = st.toggle("Formulas", key="formulas", bind="query-params")
        headers: dict[str, Any] = {
            "category": "line",
            "at_peak_bytes": "at the peak",
            "measured_bytes": "measured",
            "error_pct": "error",
            "bytes": st.column_config.Column("at most", help="the most it holds at any time of a step"),
        }
        if formulas:
            headers["formula"] = st.column_config.TextColumn("formula of its most", width="large")
        if not any(entry["measured_bytes"] is not None for entry in entries):
            del headers["measured_bytes"], headers["error_pct"]
        tables.show(entries, headers, words="Lines of the ledger")
    st.caption(f"Rank {rank['rank']}, peak at {rank['at']}.{others}")
    if formulas:
        symbols(rank["quantities"], prediction["quantities"])
    sums(rank)


def symbols(values: dict[str, int], meanings: dict[str, str]) -> None:
    rows = [{"symbol": name, "value": value, "means": meanings.get(name)} for name, value in values.items()]
    tables.show(rows, {"symbol": "symbol", "value": "value", "means": "means"}, words="What the formulas' symbols are")


def sums(rank: dict[str, Any]) -> None:
    """Lines that could be measured only together."""
    if not rank["sums"]:
        return
    st.markdown("**Beside what the peak was measured to consist of**")
    rows = [
        {**one, "lines": ", ".join(one["lines"]), "measured_as": ", ".join(one["measured_as"])} for one in rank["sums"]
    ]
    headers = {"lines": "lines", "predicted_bytes": "predicted", "measured_bytes": "measured", "error_pct": "error"}
    tables.show(rows, headers | {"measured_as": "measured as"}, words="Sums of lines, predicted and measured")


def time_of_step(time: dict[str, Any]) -> None:
    """Predicted and measured, and what takes longest."""
    st.subheader("Time of a step")
    if time["step_ns"] is not None:
        words = "Time of a step, predicted and measured"
        rows = [beside(one) for one in time["compared"]]
        if rows:
            headers = {"figure": "figure", "predicted": "predicted", "measured": "measured", "error": "error"}
            tables.show(rows, headers, words=words)
        else:
            tables.show([time], {"step_ns": "step", "comm_ns": "communication", "exposed_ns": "exposed"}, words=words)
        mode = f", measured in mode {time['measured_mode']}" if rows else ""
        st.caption(f"Predicted with the calibration {time['hardware']}{mode}.")
        with st.expander("What takes longest, predicted"):
            for rank in time["ranks"]:
                of = {"Pipeline rank": rank["pipeline_rank"], "Context-parallel rank": rank["context_rank"]}
                which = ", ".join(f"{what} {number}" for what, number in of.items() if number is not None)
                if which:
                    st.markdown(f"**{which}**")
                found = [{**line, "line_exposed_ns": line["exposed_ns"] or None} for line in rank["lines"][:LONGEST]]
                headers = {"phase": "phase", "part": "part", "what": "what", "count": "count"}
                headers |= {"ns": "time", "line_exposed_ns": "exposed"}
                tables.show(found, headers, words=f"What takes longest {which}".strip())
    for note in time["notes"]:
        st.caption(note)


def beside(one: dict[str, Any]) -> dict[str, str]:
    """A figure as the command line writes it: of a share the difference in points."""
    name, error = one["figure"], signed_percent(one["error_pct"])
    is_share = name.endswith("_pct")
    figures = {key: quantity(name, one[key]) for key in MEASURED}
    return {
        "figure": FIGURES[name],
        **figures,
        "error": error.replace("%", "points") if is_share else error,
    }


def communication(report: dict[str, Any]) -> None:
    st.subheader("Collectives of each rank and step")
    if report["mode"] == "rehearsal":
        st.caption("A rehearsal does not communicate.")
    elif not report["communication"]:
        st.caption("Neither a trace nor a prediction says anything of them.")
    else:
        rows = [
            row
            | {"agree": AGREES[row["agree"]]}
            | {"exact_predicted": row["predicted_bytes"], "exact_measured": row["measured_bytes"]}
            for row in report["communication"]
        ]
        headers = {
            "dimension": "dimension",
            "kind": "kind",
            "predicted_count": "predicted",
            "measured_count": "recorded",
            "exact_predicted": "predicted bytes",
            "exact_measured": "recorded bytes",
            "agree": "",
        }
        tables.show(rows, headers, words="Collectives, predicted and recorded")
        st.caption("Bytes of the full, unsharded side, to the byte. Recorded: what most ranks and traced steps have.")
