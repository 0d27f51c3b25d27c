"""One run: what is wrong with it, and where to look."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import streamlit as st

from dashboard import charts, commands, data, places, state, states, summaries, tables
from dashboard.discover import Run
from harness.compare import METRICS
from harness.report.finding import NOT_A_CLUSTER
from harness.report.text import evidence_text
from harness.text import counted, quantity

TITLE, ICON, ORDER, ABOUT = "Overview", ":material/dashboard:", 10, "run"

SEVERITY_LOOKS: dict[str, tuple[str, Any]] = {
    "high": (":material/error:", "red"),
    "medium": (":material/warning:", "orange"),
    "low": (":material/info:", "blue"),
    "info": (":material/check:", "gray"),
}
FINDINGS_OPEN = 4
LIVE_EVERY_S = 3
TILES = {
    "step_wall_ns": "Step",
    "tokens_per_s": "Tokens/s/device",
    "mfu_pct": "MFU",
    "peak_allocated_bytes": "Peak allocated",
    "peak_active_bytes": "Peak active",
    "peak_reserved_bytes": "Peak reserved",
    "exposed_ns": "Exposed communication",
    "overlap_pct": "Communication hidden",
}


def page() -> None:
    run = state.current()
    rows = data.rows(run)
    said = head(run, rows)
    if rows is not None and rows.live:
        running(run)
    report = data.extract(state.root(), run, "report").values
    if rows is not None and rows.live:
        at = f"at step {report['steps'][-1]['step']}" if report["steps"] else "before the first step"
        st.caption(
            f"Findings and figures below are of what was there {at}. Open the page again for newer ones: they are "
            "made anew when a trace was written or the run has doubled in length, and at its end."
        )
    states.partial([error for error in report["errors"] if error["reason"] != said])
    left, right = st.columns([3, 2], gap="medium")
    with left:
        findings(report)
    with right:
        tiles(report)
    timing(report)
    breakdown(report)
    communication(report)
    ranks(report)
    facts(run, rows, report)


def head(run: Run, rows: data.Rows | None) -> str | None:
    """Returns how the run stands if it is said here: it did not end well, or goes on."""
    st.title(run.name or run.path.name)
    line = summaries.summary(state.root(), run)
    with st.container(horizontal=True, gap="small"):
        states.badge(line["state"])
        mode = line.get("mode") or "unknown"
        st.badge(f"mode {mode}", color="orange" if mode in NOT_A_CLUSTER else "blue")
        for name, what in (("layout", ""), ("devices", ""), ("torch", "torch "), ("nccl", "NCCL ")):
            if line.get(name):
                st.badge(f"{what}{line[name]}", color="gray")
    if why := NOT_A_CLUSTER.get(mode):
        st.caption(f"{why[0].upper()}{why[1:]}.")
    if run.experiment is not None:
        label = f"A trial of experiment {run.experiment}: see its verdict"
        state.link("ab", label, icon=":material/science:", experiment=run.experiment)
    if rows is not None and rows.standing.state != "complete":
        words = "; ".join([rows.standing.headline(), *rows.standing.details()])
        (st.info if rows.live else st.warning)(states.escaped(words), icon=":material/flag:")
        return words
    return None


@st.fragment(run_every=LIVE_EVERY_S)
def running(run: Run) -> None:
    """The steps so far of a run that goes on; when it ends the whole page is drawn anew, and this stops."""
    rows = data.rows(run)
    if rows is None or not rows.live:
        st.rerun()
    st.caption(f"Running: {counted(len(rows.steps), 'step')} so far, looked at every {LIVE_EVERY_S} s.")
    chart = charts.step_times({run.name: rows.steps})
    if chart is not None:
        charts.show(chart, f"Time of the {counted(len(rows.steps), 'step')} so far")


def findings(report: dict[str, Any]) -> None:
    st.subheader("Findings")
    found = report["findings"]
    if not found:
        st.caption("Nothing stood out in what was recorded.")
    dimensions = {item["dimension"] for item in report["dimensions"]}
    first = max(FINDINGS_OPEN, sum(finding["severity"] in ("high", "medium") for finding in found))
    for finding in found[:first]:
        card(finding, dimensions)
    if found[first:]:
        with st.expander(f"{counted(len(found) - first, 'finding')} more"):
            for finding in found[first:]:
                card(finding, dimensions)


def card(finding: Mapping[str, Any], dimensions: Collection[str]) -> None:
    icon, colour = SEVERITY_LOOKS[finding["severity"]]
    with st.container(border=True, gap="xxsmall"):
        badge = f":{colour}-badge[{icon} {finding['severity']}]"
        st.markdown(f"{badge} **{states.escaped(finding['title'])}**")
        figures = ", ".join(f"{name} {evidence_text(name, value)}" for name, value in finding["evidence"].items())
        st.caption(states.escaped(finding["where"]), help=states.escaped(figures) if figures else None)
        if finding["severity"] != "info":
            st.markdown(states.escaped(finding["advice"]))
        place = places.place_of(finding, dimensions)
        if place is not None and place[0] in state.PAGES:
            state.link(place[0], places.WORDS[place[0]], icon=":material/arrow_forward:", **place[1])


def tiles(report: dict[str, Any]) -> None:
    st.subheader("Figures")
    known = [name for name in TILES if report["metrics"].get(name) is not None]
    if not known:
        reasons = dict.fromkeys(value["reason"] for value in report["metric_values"].values() if value["reason"])
        st.caption(f"None: {'; '.join(reasons)}.")
    for first in range(0, len(known), 2):
        for name, column in zip(known[first : first + 2], st.columns(2), strict=False):
            source = report["metric_values"][name]["source"]
            words = f"`{name}`: {METRICS[name].what}; from {source}"
            column.metric(TILES[name], quantity(name, report["metrics"][name]), help=words, border=True)


def timing(report: dict[str, Any]) -> None:
    """Steps and peaks, side by side."""
    steps = charts.step_times({"time": report["steps"]})
    peaks = charts.peaks_per_rank(report["ranks"])
    if steps is None and peaks is None:
        return
    left, right = st.columns(2, gap="medium")
    with left:
        st.subheader("Steps")
        if steps is None:
            st.caption("No step states its time.")
        else:
            charts.show(steps, f"Time of {counted(len(report['steps']), 'step')}, ms")
            st.caption(
                "Time of the slowest rank. Filled: plain steps, which the median is of; hollow: the first one and "
                "steps that were traced, tracked or follow an export (hover for why)."
            )
    with right:
        st.subheader("Peak memory per rank")
        if peaks is None:
            st.caption("No step states its memory.")
        else:
            charts.show(peaks, "Peak memory of each rank by phase")
            drawn = charts.RANKS_DRAWN
            cut = f" The first {drawn} of {len(report['ranks'])} are drawn." if len(report["ranks"]) > drawn else ""
            st.caption(f"Bars: allocated peak of each phase. Marks: peaks of the whole run.{cut}")
    with st.expander("Steps as a table"):
        headers = {"step": "step", "wall_ns": "time", "tokens_per_s": "tokens/s/device", "mfu_pct": "MFU"}
        listed = [{**step, "tags": ", ".join(step["tags"])} for step in report["steps"]]
        tables.show(listed, headers | {"loss": "loss", "grad_norm": "gradient norm", "tags": "tags"})


def breakdown(report: dict[str, Any]) -> None:
    if not report["mean_parts"]:
        return
    st.subheader("Where a traced step goes")
    charts.show(charts.step_parts(report["mean_parts"]), "Parts of the mean traced step of each rank")
    table = [{"rank": item["rank"], "span_ns": item["span_ns"], **ns_fields(item)} for item in report["mean_parts"]]
    with st.expander("As a table"):
        fields = dict.fromkeys(name for row in table for name in row)
        tables.show(table, {name: name.removesuffix("_ns") for name in fields})
    st.caption(
        "Compute, and communication that no computation hides, by mesh dimension; the parts add up to the step. "
        "Traced steps carry the profiler's overhead."
    )


def ns_fields(item: Mapping[str, Any]) -> dict[str, int]:
    return {f"{part}_ns": value for part, value in charts.parts_of(item).items()}


def communication(report: dict[str, Any]) -> None:
    """The table of the report's text: means over ranks, complete steps."""
    if not report["dimensions"]:
        return
    st.subheader("Communication by mesh dimension")
    headers = {
        "dimension": "dimension",
        "comm_ns": "communication",
        "overlap_ns": "hidden by compute",
        "exposed_ns": "exposed",
        "lowest_overlap_pct": "hidden share, lowest rank",
        "highest_overlap_pct": "highest rank",
    }
    tables.show(report["dimensions"], headers)
    state.link("overlap", "Streams over time", icon=":material/arrow_forward:") if "overlap" in state.PAGES else None


def ranks(report: dict[str, Any]) -> None:
    """Every rank: its steps and peaks, and the whole-file figures of its trace as `meshscope overlap` prints them."""
    overlap = data.extract(state.root(), state.current(), "overlap").values["overlap"]
    if overlap is not None:
        st.subheader("Traces, whole files")
        figures = ("comm_ns", "overlap_ns", "exposed_ns", "compute_ns", "memory_ns", "idle_ns", "span_ns")
        headers = {"rank": "rank", "device": "device", "source": "source", "overlap_pct": "overlap"}
        rows = [{**entry, **entry["window"]} for entry in overlap["ranks"]]
        tables.show(rows, headers | {name: WORDS_OF_WINDOW[name] for name in figures}, words="Figures of each trace")
    if report["ranks"]:
        st.subheader("Ranks")
        headers = {"rank": "rank", "steps": "steps", "median_step_wall_ns": "median step"}
        peaks = [name for name in report["ranks"][0] if name.startswith("peak_") and name.endswith("_bytes")]
        tables.show(report["ranks"], headers | {name: name.removesuffix("_bytes").replace("_", " ") for name in peaks})


WORDS_OF_WINDOW = {
    "comm_ns": "comm",
    "overlap_ns": "overlapped",
    "exposed_ns": "exposed",
    "compute_ns": "compute",
    "memory_ns": "memory ops",
    "idle_ns": "idle",
    "span_ns": "span",
}


def facts(run: Run, rows: data.Rows | None, report: dict[str, Any]) -> None:
    st.subheader("How it was run")
    listed: list[Sequence[str]] = list((report["layout"] or {}).items())
    if rows is not None:
        manifest = rows.recording.manifest
        versions = manifest.get("versions")
        listed += [(name, str(value)) for name, value in (versions if isinstance(versions, dict) else {}).items()]
        git = manifest.get("git")
        if isinstance(git, dict) and git.get("sha"):
            listed.append(("git", f"{git['sha']}{', modified' if git.get('dirty') else ''}"))
        listed.append(("path", str(run.path)))
    if listed:
        with st.expander("Configuration and versions"):
            tables.show([{"what": name, "value": value} for name, value in listed], {"what": "", "value": ""})
    commands.show(commands.of_run(run, rows))
