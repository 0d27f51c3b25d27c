"""Communication and compute over time, rank by rank, and the figures of `meshscope overlap` beneath."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import charts, commands, data, preparing, state, states
from dashboard.discover import Run
from dashboard.lanes import memory_strips, overlap_figures, overlap_tables, view
from dashboard.lanes.overlap_figures import step_of
from dashboard.lanes.picture import Band, Picture, Shown, View, picture
from dashboard.lanes.source import Moment, head_of, moments_of, shown_of
from dashboard.lanes.view import Axis
from dashboard.preparing import Preparation
from harness.sources import mode_of
from harness.text import counted

TITLE, ICON, ORDER, ABOUT = "Overlap", ":material/view_timeline:", 20, "run"

KEY = "overlap"
RANKS_DRAWN = 8
LOOKED_EVERY_S = 1.0
MARGIN = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What is chosen above the timeline. `ranks` are those drawn; `step` None stands for all."""

    moment: Moment
    ranks: Sequence[int | None]
    step: int | None
    rule: str
    dimensions: Sequence[str]
    layout: Any
    arrange: Any


def page() -> None:
    run = state.current()
    st.title("Overlap")
    states.say_mode(mode_of(run.path / "manifest.json"))
    target, under_way = data.preparation(state.root(), run)
    # There also when it is empty, so that what follows keeps its place on the page.
    slot = st.container()
    if under_way is None:
        data.prepared(state.root(), run)  # raises if nothing could be read
        with slot:
            states.partial(state.unread())
        moments = moments_of([head_of(str(folder)) for folder in preparing.lane_folders(target)])
    else:
        moments = moments_of([head_of(str(folder)) for folder in under_way.lanes()])
        with slot:
            progress(under_way)
    if under_way is None and not moments:
        nothing(run)
        return
    if not moments:
        return
    bar = st.container(horizontal=True, gap="small", vertical_alignment="bottom")
    choice = choose(bar, moments)
    shown = shown_of(choice.moment, choice.ranks)
    axis = axis_of(run, choice, shown, settled=under_way is None)
    jump_to_layer(bar, choice, shown, axis)
    strips = memory_strips.beside(state.extract("timeline"), choice.moment, shown) if under_way is None else []
    lanes(choice, shown, axis, strips)
    if under_way is None:
        figures(run, choice, shown, axis)


def progress(under_way: Preparation) -> None:
    """Says how far the analysis is, and draws the page again when there is more."""
    drawn = len(under_way.lanes())

    @st.fragment(run_every=LOOKED_EVERY_S)
    def look() -> None:
        total, read = len(under_way.traces()), len(under_way.lanes())
        words = f"{read} of {counted(total, 'trace')} read and drawn; this is needed once"
        if read >= total:
            words = "The traces are read; their figures are being made" if read else "Looking for traces"
        st.progress(min(1.0, read / total) if total else 0.0, text=words)
        if under_way.done.is_set() or read > drawn:
            st.rerun()

    look()


def nothing(run: Run) -> None:
    """Why there is no timeline, and what would give one."""
    found = data.rows(run)
    if found is not None and found.recording.mode == "rehearsal":
        states.empty("A rehearsal: nothing was communicated, so there is no overlap to show. See Memory and Ledger.")
        return
    states.empty(
        "No trace with events is in this recording: it holds memory or step rows only. A trace window records one; "
        "any torch.profiler trace beside it is read, too.",
        "meshscope run --module debug --config tiny --recorder.trace.start 4 --recorder.trace.steps 2",
    )


def choose(bar: DeltaGenerator, moments: Sequence[Moment]) -> Choice:
    """The choices, all in the URL."""
    moment = moments[0]
    if len(moments) > 1:
        names = {one.label: one for one in moments}
        moment = names[bar.selectbox("Capture", list(names), key="capture", bind="query-params", width=260)]
    known = list(dict.fromkeys(head.rank for head in moment.heads))
    ranks = bar.multiselect(
        "Ranks",
        known,
        key="rank",
        bind="query-params",
        placeholder="all" if len(known) <= RANKS_DRAWN else f"the first {RANKS_DRAWN} of {len(known)}",
        format_func=lambda rank: "unknown" if rank is None else str(rank),
        width=220,
    )
    step = bar.selectbox(
        "Step", moment.steps, index=None, key="step", bind="query-params", placeholder="all", width=110
    )
    rule = bar.segmented_control(
        "Rule",
        ["launch", "clip"],
        default="launch",
        required=True,
        key="rule",
        bind="query-params",
        help="launch: what a step launched, whenever it ran. clip: what ran in the step's host window.",
    )
    dimensions = bar.multiselect(
        "Dimensions", moment.dimensions, key="dimension", bind="query-params", placeholder="all", width=240
    )
    layout = bar.segmented_control(
        "Lanes", ["kind", "stream"], default="kind", required=True, key="lanes", bind="query-params"
    )
    arrange = bar.segmented_control(
        "Stack",
        ["rank", "lane"],
        default="rank",
        required=True,
        key="stack",
        bind="query-params",
        help="rank: all lanes of a rank together. lane: the same lane of all ranks together, which shows who waits.",
    )
    return Choice(
        moment=moment,
        ranks=ranks or known[:RANKS_DRAWN],
        step=step,
        rule=rule or "launch",
        dimensions=dimensions or moment.dimensions,
        layout=layout,
        arrange=arrange,
    )


def axis_of(run: Run, choice: Choice, shown: Sequence[Shown], *, settled: bool) -> Axis:
    """The time of the moment; it begins with the chosen step."""
    windows = [step_window(one, step, choice.rule) for one in shown for step in steps_of(one, choice.step)]
    known = [window for window in windows if window is not None]
    extent = choice.moment.extent_ns
    first = None
    if choice.step is not None and known:
        first = max(0, min(start for start, _ in known)), min(extent, max(end for _, end in known))
    named = f"{run.name} {choice.moment.label} {choice.step} {choice.rule if choice.step is not None else ''}"
    return Axis(id=named, extent_ns=extent, first=first if first and first[1] > first[0] else None, settled=settled)


def steps_of(one: Shown, step: int | None) -> list[dict[str, Any]]:
    return [item for item in one.device["steps"] if step in (None, item["step"])]


def step_window(one: Shown, item: dict[str, Any], rule: str) -> tuple[int, int] | None:
    window = item[rule]
    return None if window is None else (window[0] + one.offset_ns, window[1] + one.offset_ns)


def bands_of(choice: Choice, shown: Sequence[Shown]) -> list[Band]:
    """The windows of steps on each rank; of the first one where ranks are mixed."""
    found = []
    for one in shown if choice.arrange == "rank" else shown[:1]:
        for item in one.device["steps"]:
            window = step_window(one, item, choice.rule)
            if window is not None:
                group = one.group if choice.arrange == "rank" else "all"
                label = f"step {item['step']}" + ("" if choice.arrange == "rank" else f" of {one.group}")
                found.append(Band(group=group, label=label, start_ns=window[0], end_ns=window[1]))
    return found


def jump_to_layer(bar: DeltaGenerator, choice: Choice, shown: Sequence[Shown], axis: Axis) -> None:
    """A choice of an FSDP unit, which the timeline then shows."""
    if not choice.moment.units:
        return

    def jump() -> None:
        unit = st.session_state["layer"]
        spans = [
            (span["start"] + one.offset_ns, span["end"] + one.offset_ns, span["phase"], step_of(one, span["step"]))
            for one in shown
            for span in one.device["spans"]
            if span["unit"] == unit and choice.step in (None, step_of(one, span["step"]))
        ]
        if spans:
            # Its first passage, forward or backward of one step, on all ranks.
            first = min(spans)
            same = [span for span in spans if span[2:] == first[2:]]
            view.go_to(min(span[0] for span in same), max(span[1] for span in same), axis, KEY, margin=MARGIN)

    bar.selectbox(
        "Go to a layer",
        choice.moment.units,
        index=None,
        key="layer",
        bind="query-params",
        on_change=jump,
        placeholder="an FSDP unit",
        width=180,
    )


@st.fragment
def lanes(choice: Choice, shown: Sequence[Shown], axis: Axis, strips: Sequence[Any]) -> None:
    """The timeline, what it shows in words, and the same as a table; runs alone when the view moves."""
    bands = bands_of(choice, shown)
    dimensions = None if list(choice.dimensions) == choice.moment.dimensions else choice.dimensions

    def make(wanted: View) -> Picture:
        return picture(
            shown,
            wanted,
            layout=choice.layout,
            arrange=choice.arrange,
            dimensions=dimensions,
            strips=strips,
            bands=bands,
            mark=view.mark(KEY),
        )

    made = view.draw(make, axis, KEY)
    words = f"{counted(made.events, 'event')} in and beside this view"
    if made.single < made.events:
        words += (
            f"; {made.single:,} drawn one by one, the others as {made.columns:,} columns, as opaque as they are busy "
            "(nothing is left out): zoom in for each"
        )
    st.caption(words + ".")
    if (marked := view.mark(KEY)) and (said := marked.get("words")):
        st.info("  \n".join(states.escaped(str(line)) for line in said), icon=":material/ads_click:")
    table = st.expander("Figures of this view", key="figures", bind="query-params")
    if table.open:
        with table:
            overlap_tables.in_view(made.table)


def figures(run: Run, choice: Choice, shown: Sequence[Shown], axis: Axis) -> None:
    """What `meshscope overlap` says, of the chosen ranks, step and dimensions."""
    overlap = state.extract("overlap").values["overlap"]
    files = {one.index.values["file"] for one in shown}
    entries = overlap_figures.entries_of(overlap, files, choice.ranks)
    notes(choice, entries, overlap)
    contents: dict[str, Callable[[], None]] = {
        "Dimensions": lambda: overlap_tables.dimensions(entries, choice.dimensions),
        "Collectives": lambda: overlap_tables.collectives(entries, choice.dimensions),
        "Layers": lambda: overlap_tables.units(entries),
        "Steps": lambda: steps(choice, entries),
        "Waiting": lambda: overlap_tables.waiting(overlap["cross_rank"], choice.dimensions),
        "Most exposed": lambda: most_exposed(choice, shown, axis),
        "Life of a unit": life,
    }
    for tab, draw in zip(st.tabs(list(contents), key="tab", bind="query-params"), contents.values(), strict=True):
        if tab.open:
            with tab:
                draw()
    path = shlex.quote(str(run.path))
    levels = [f"meshscope overlap {path} --by {level}" for level in ("dimension", "collective", "step", "unit")]
    commands.show([*levels, f"meshscope report {path} --unit NAME --html report.html"])


def notes(choice: Choice, entries: Sequence[dict[str, Any]], overlap: dict[str, Any]) -> None:
    """What a reader has to know, each once, with the ranks that it is about where not all."""
    said: dict[str, list[Any]] = {}
    for entry in entries:
        for note in entry["notes"]:
            said.setdefault(note, []).append(entry["rank"])
    lines = [
        note if len(ranks) == len(entries) else f"{note} (ranks {', '.join(map(str, ranks))})"
        for note, ranks in said.items()
    ]
    lines += overlap["cross_rank"]["notes"]
    if not choice.moment.common_clock:
        lines.insert(0, "the times of these traces do not meet: each rank is drawn from its own first event")
    with st.expander(f"Notes ({len(lines)})", expanded=any(entry["source"] == "host" for entry in entries)):
        st.markdown("\n".join(f"- {states.escaped(line)}" for line in lines) or "None.")


def steps(choice: Choice, entries: Sequence[dict[str, Any]]) -> None:
    """Where the time of each step goes: as a picture by the launch rule, as a table by the chosen one."""
    ranks = {entry["rank"] for entry in entries}
    parts = [
        {**item, "label": f"{charts.rank_name(item)}, step {item['step']}"}
        for item in state.extract("report").values["step_parts"]
        if item["rank"] in ranks and choice.step in (None, item["step"]) and item["span_ns"]
    ]
    if parts:
        st.caption("By the launch rule; the parts of a bar add up to the step's span.")
        charts.show(charts.step_parts(parts), "Where the time of each step of each rank goes")
    overlap_tables.steps(entries, choice.rule, choice.step)


def most_exposed(choice: Choice, shown: Sequence[Shown], axis: Axis) -> None:
    """The collectives that were exposed longest; choosing one goes to it."""
    rows = overlap_figures.worst_rows(shown, choice.dimensions, choice.step)
    if not rows:
        st.caption("No collective is exposed: compute ran during all of them.")
        return

    def jump() -> None:
        chosen = st.session_state["worst"].selection.rows
        if chosen:
            row = rows[chosen[0]]
            end = row["at_ns"] + row["duration_ns"]
            view.go_to(row["at_ns"], end, axis, KEY, margin=MARGIN)
            view.set_mark(KEY, row["row"], row["at_ns"], end)

    st.caption("Select a row to see it in the timeline; it begins at the time of the timeline's axis.")
    overlap_tables.worst(rows, on_select=jump)


def life() -> None:
    """The states of one FSDP unit in the last traced step, as `meshscope report` has them."""
    found = state.extract("report").values["lifetime"]
    if found is None:
        st.caption("No whole traced step has FSDP:: ranges.")
        return
    whose = f"{found['unit']}, step {found['step']}, {charts.rank_name(found)}, {found['source']} time"
    st.caption(f"{states.escaped(whose)}, from the step's first event; meshscope report draws it, and any other unit.")
    overlap_tables.life(found["rows"])
    if found["notes"]:
        st.markdown("\n".join(f"- {states.escaped(note)}" for note in found["notes"]))
