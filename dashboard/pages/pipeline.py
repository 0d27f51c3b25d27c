"""The schedule of a pipeline, as planned and as its traced steps carried it out, and what idles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import charts, commands, data, schedule, state, states, tables
from dashboard.lanes import overlap_figures
from dashboard.pages.ledger import AGREES
from harness.sources import mode_of
from harness.text import counted, percent

TITLE, ICON, ORDER, ABOUT = "Pipeline", ":material/view_week:", 35, "run"

Row = dict[str, Any]

RANKS_DRAWN = 16
SPANS_DRAWN = 4000
RECORD = (
    "meshscope run --module debug --config tiny --nproc 2 --parallelism.pp 2 --parallelism.tp 1 "
    "--recorder.trace.start 4 --recorder.trace.steps 2"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """`measured`: the traced step, an entry for each pipeline, none without a trace; `ranks`: those shown, none for
    all; `at_measured_costs`: what the plan is drawn at, instead of units of a forward."""

    measured: Sequence[Row]
    ranks: Sequence[int]
    at_measured_costs: bool

    def shows(self, rank: Row) -> bool:
        return not self.ranks or rank["rank"] in self.ranks


def page() -> None:
    run = state.current()
    st.title("Pipeline")
    states.say_mode(mode_of(run.path / "manifest.json"))
    pipeline = state.extract("pipeline").values
    if pipeline is None:
        states.empty("No pipeline: the run has no parallelism.pp above 1, and no trace names actions of one.", RECORD)
        return
    st.markdown(states.escaped(pipeline["words"] or "As traced: the run states no configuration to plan from"))
    bar = st.container(horizontal=True, gap="small", vertical_alignment="bottom")
    choice = choose(bar, pipeline)
    # A container each: what follows keeps its place when a choice leaves something out.
    with st.container():
        bubbles(pipeline, choice)
    with st.container():
        planned_grid(pipeline, choice)
    with st.container():
        measured_grid(pipeline, choice)
    with st.container():
        communication(data.extract(state.root(), run, "report").values, choice)
    with st.expander("As text"):
        st.caption("All ranks, and the last traced step.")
        st.code("\n".join(pipeline["text"]), language=None)
    commands.show(commands.of_run(run, data.rows(run)))


def choose(bar: DeltaGenerator, pipeline: Row) -> Choice:
    """The choices, all in the URL; there are none without a trace."""
    steps = list(dict.fromkeys(one["step"] for one in pipeline["measured"]))
    if not steps:
        return Choice(measured=[], ranks=[], at_measured_costs=False)
    known = sorted({rank["rank"] for one in pipeline["measured"] for rank in one["ranks"]})
    ranks = bar.multiselect(
        "Ranks", known, key="rank", bind="query-params", placeholder="all", format_func=str, width=220
    )
    step = bar.selectbox(
        "Step", steps, index=None, key="step", bind="query-params", placeholder=f"{steps[-1]}, the last", width=140
    )
    costs = "units"
    if pipeline["expected"]["ranks"]:
        costs = bar.segmented_control(
            "Costs of the plan",
            ["units", "measured"],
            default="units",
            required=True,
            key="costs",
            bind="query-params",
            help="units: a backward as long as two forwards; measured: the median of its kind over the traced steps",
        )
    measured = [one for one in pipeline["measured"] if one["step"] == (steps[-1] if step is None else step)]
    return Choice(measured=measured, ranks=ranks, at_measured_costs=costs == "measured")


def bubbles(pipeline: Row, choice: Choice) -> None:
    """Planned beside measured, a row for each rank, or for each pipeline rank that no trace is of."""
    planned = {rank["pipeline_rank"]: rank["bubble_pct"] for rank in pipeline["planned"]["ranks"]}
    even, expected = (
        {rank["pipeline_rank"]: rank["bubble_pct"] for rank in pipeline[name]["ranks"]} for name in ("even", "expected")
    )
    measured = [rank for one in choice.measured for rank in one["ranks"]]
    traced = {rank["pipeline_rank"] for rank in measured}
    shown = sorted((rank for rank in measured if choice.shows(rank)), key=lambda rank: rank["rank"])
    if not choice.ranks:
        shown += [{"rank": None, "pipeline_rank": rank} for rank in planned if rank not in traced]
    rows = [
        rank
        | {
            "planned_bubble_pct": planned.get(rank["pipeline_rank"]),
            "even_bubble_pct": even.get(rank["pipeline_rank"]),
            "expected_bubble_pct": expected.get(rank["pipeline_rank"]),
            "stages": pipeline["modules"][rank["pipeline_rank"]] if pipeline["modules"] else None,
        }
        for rank in shown
    ]
    headers: dict[str, Any] = {
        "rank": "rank",
        "pipeline_rank": "pp rank",
        "planned_bubble_pct": st.column_config.Column("planned", help="a backward takes as long as two forwards"),
        "even_bubble_pct": st.column_config.Column(
            "at measured costs", help="planned, every action taking the median measured of its kind"
        ),
        "expected_bubble_pct": st.column_config.Column(
            "of each stage", help="planned, every action taking the median of its kind in its own stage"
        ),
        "bubble_pct": "measured",
        "busy_ns": "busy",
        "span_ns": "span",
        "stages": "stages",
    }
    if not choice.measured:
        headers = {name: headers[name] for name in ("pipeline_rank", "planned_bubble_pct", "stages")}
    st.subheader("Bubble of each rank")
    tables.show(rows, headers, words="Planned and measured bubble of each rank")
    st.caption("100 · (span − busy) / span, from the first start to the last end over all ranks of a pipeline.")


def planned_grid(pipeline: Row, choice: Choice) -> None:
    """In units of a forward, or at the measured costs and then on the axis of the measured grid."""
    st.subheader("Planned")
    if not pipeline["planned"]["ranks"]:
        st.caption("The run states no configuration that plans a schedule.")
        return
    kind, unit = ("expected", "_ns") if choice.at_measured_costs else ("planned", "")
    timeline = pipeline[kind]["ranks"]
    places = {rank["pipeline_rank"] for one in choice.measured for rank in one["ranks"] if choice.shows(rank)}
    shown = [rank for rank in timeline if not choice.ranks or rank["pipeline_rank"] in places]
    rows = schedule.rows(timeline, unit, pipeline["stages"])
    drawn = {rank["pipeline_rank"] for rank in shown}
    length = common_length(pipeline, choice) if unit else timeline[0]["span"]
    takes = "each takes the median of its kind in its stage." if unit else "a backward takes as long as two forwards."
    st.caption(f"Every action as early as its inputs allow; {takes}")
    words = f"Planned schedule: {said(shown)}"
    grid([row for row in rows if row["pipeline_rank"] in drawn], unit, length, words)


def common_length(pipeline: Row, choice: Choice) -> int:
    """In ns, of an axis that holds the measured step and, where it is drawn beside it, the plan."""
    timelines = [one["ranks"] for one in choice.measured]
    timelines += [pipeline["expected"]["ranks"]] if choice.at_measured_costs else []
    spans: list[int] = [rank["span_ns"] for ranks in timelines for rank in ranks]
    return max(1, *spans)


def measured_grid(pipeline: Row, choice: Choice) -> None:
    if not choice.measured:
        st.subheader("Measured")
        states.empty(
            "No trace holds a whole step of this pipeline, so its plan is all there is. To record one:", RECORD
        )
        return
    step, source = choice.measured[0]["step"], choice.measured[0]["source"]
    st.subheader(f"Measured, step {step}")
    st.caption(
        ("Host times of a CPU's trace, no device's. " if source == "host" else "Device times. ")
        + "Each action is its computation alone; idle time is waiting for a receive or a send, gathering or reducing, "
        "and work between actions. Each pipeline begins at its own first start."
    )
    rows = [row for one in choice.measured for row in schedule.rows(one["ranks"], "_ns", pipeline["stages"])]
    ranks = [rank for one in choice.measured for rank in one["ranks"] if choice.shows(rank)]
    words = f"Measured schedule of step {step}, {source} times: {said(ranks)}"
    grid([row for row in rows if choice.shows(row)], "_ns", common_length(pipeline, choice), words)


def said(ranks: Sequence[Row]) -> str:
    """What a grid shows in words: the bubble of each rank."""
    named = [f"{schedule.label(rank)} idle {percent(rank['bubble_pct'])}" for rank in ranks[:RANKS_DRAWN]]
    more = len(ranks) - len(named)
    return ", ".join([*named, *([f"and {counted(more, 'rank')} more"] if more else [])])


def grid(spans: Sequence[Row], unit: str, length: int, words: str) -> None:
    """A chart of the first ranks, and all actions in a table."""
    if not spans:
        st.caption("None of the ranks chosen was traced in this step.")
        return
    names = list(dict.fromkeys(schedule.label(row) for row in spans))
    each = -(-len(spans) // len(names))
    drawn = names[: max(1, min(RANKS_DRAWN, SPANS_DRAWN // each))]
    charts.show(
        schedule.chart([row for row in spans if schedule.label(row) in drawn], unit, length=length),
        words,
    )
    if len(drawn) < len(names):
        st.caption(f"Drawn: {len(drawn)} of {counted(len(names), 'rank')}; choose ranks above, or see the table.")
    headers: dict[str, Any] = {
        "rank": "rank",
        "pipeline_rank": "pp rank",
        "what": "what",
        "action": st.column_config.Column("action", help="stage, kind and micro-batch, as torch writes them"),
        "stage": "stage",
        "micro_batch": "micro-batch",
        f"start{unit}": "start",
        f"duration{unit}": "duration",
        "needs": st.column_config.Column(
            "receives from", help="where the input of this or the next action is sent from"
        ),
    }
    if spans[0]["rank"] is None:
        del headers["rank"]
    with st.expander(f"{counted(len(spans), 'row')}: actions and idle times"):
        tables.show(spans, headers, words=words)


def communication(report: Row, choice: Choice) -> None:
    """Counts and bytes by pipeline rank, as predicted and recorded, and the times of sending and receiving."""
    st.subheader("Communication by pipeline rank")
    rows = [row | {"agree": AGREES[row["agree"]]} for row in report["communication"] if "pipeline_rank" in row]
    if rows:
        headers = {
            "pipeline_rank": "pp rank",
            "dimension": "dimension",
            "kind": "kind",
            "predicted_count": "predicted",
            "measured_count": "recorded",
            "predicted_bytes": "predicted bytes",
            "measured_bytes": "recorded bytes",
            "agree": "",
        }
        tables.show(rows, headers, words="Collectives of each pipeline rank, predicted and recorded")
        st.caption("Of each rank and step.")
    else:
        st.caption("Neither a trace nor a prediction says what each pipeline rank sends.")
    overlap = state.extract("overlap").values["overlap"]
    entries = [one for one in overlap["ranks"] if choice.shows(one)] if overlap else []
    dimensions = {item["dimension"] for entry in entries for item in entry["collectives"]}
    waits = [row for row in overlap_figures.collective_rows(entries, dimensions) if row["kind"] in ("send", "recv")]
    if waits:
        headers = {"rank": "rank", "dimension": "dimension", "kind": "kind", "count": "count"}
        headers |= {"comm_ns": "time", "exposed_ns": "exposed"}
        tables.show(waits, headers, words="Sends and receives of each rank, and how long nothing computed meanwhile")
        st.caption(
            "Sends and receives of whole traces, waiting for the other side included; exposed: nothing computed."
        )
