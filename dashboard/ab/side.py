"""The arms' middle trials beneath one another on one axis: the lanes of one step, or the memory of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard import charts, data, preparing, state, states, tables
from dashboard.ab.sections import Values, mode_words
from dashboard.discover import Run, name_below, run_at
from dashboard.lanes import memory_figures, memory_strips, overlap_tables, view
from dashboard.lanes.picture import Band, Picture, Shown, Strip, View, picture
from dashboard.lanes.source import head_of, moments_of, shown_of
from dashboard.lanes.view import Axis
from harness.text import counted, printable

KEY = "ab"
HEIGHT = 150
VIEWS = ("lanes", "memory")
PEAKS = {
    "peak_rss_bytes": "resident set",
    "peak_allocated_bytes": "allocated",
    "peak_active_bytes": "active",
    "peak_reserved_bytes": "reserved",
}

Place = tuple[int | None, int]
"""Rank and step, or rank and device."""


def side_by_side(run: Run, values: Values, arms: Sequence[str]) -> None:
    """One of both timelines, chosen in the URL: the range of a timeline is there, too."""
    st.subheader("Side by side")
    middle = {arm: values["middle"][arm] for arm in arms if arm in values["middle"]}
    if len(middle) < 2:
        st.caption("Both arms need a valid trial to be put side by side.")
        return
    trials = {arm: trial_of(run, folder) for arm, folder in middle.items()}
    for trial in trials.values():
        data.preparation(state.root(), trial)  # all at once, and then waits for each
    in_bytes = values["analysis"]["experiment"]["primary"].endswith("_bytes")

    def from_the_start() -> None:
        st.query_params.pop(view.PARAMETER, None)

    chosen = st.segmented_control(
        "Show",
        VIEWS,
        default="memory" if in_bytes else "lanes",
        required=True,
        key="side",
        bind="query-params",
        on_change=from_the_start,
    )
    (memory if chosen == "memory" else lanes)(values, trials)
    links(trials)


def trial_of(run: Run, folder: str) -> Run:
    return run_at(state.root(), name_below(state.root(), run.path / "trials" / folder))


def links(trials: Mapping[str, Run]) -> None:
    """To the middle trials themselves."""
    a, b = trials.values()
    with st.container(horizontal=True, gap="small"):
        for arm, trial in trials.items():
            state.link("overview", f"Middle trial of {printable(arm)}", icon=":material/arrow_forward:", run=trial.name)
        label = "Compare these two trials"
        state.link("compare", label, icon=":material/compare_arrows:", run=b.name, a=a.name, b=b.name)


def lanes(values: Values, trials: Mapping[str, Run]) -> None:
    if values["analysis"]["mode"] == "rehearsal":
        states.empty("A rehearsal: nothing was communicated, so there are no lanes and no overlap. See memory.")
        return
    steps = {arm: traced_steps(trial) for arm, trial in trials.items()}
    shared = [place for place in steps[next(iter(steps))] if all(place in other for other in steps.values())]
    if not shared:
        states.empty(
            "No step of one rank is traced whole in both arms. A trace window in the trials records one:",
            "meshscope probe KNOB --recorder.trace.steps 1",
        )
        return
    most = max(shared, key=lambda place: max(of[place]["exposed_ns"] for of in steps.values()))
    names = {step_name(place): place for place in shared}
    name = st.selectbox("Step", list(names), shared.index(most), key="moment", bind="query-params", width=260)
    rank, step = names[str(name)]
    shown, bands, extent = [], [], 1
    for arm, trial in trials.items():
        for one, window in windows(trial, arm, rank, step):
            shown.append(one)
            extent = max(extent, window)
            bands.append(Band(group=one.group, label=f"step {step}", start_ns=0, end_ns=window))
    draw(Axis(id=f"{[trial.name for trial in trials.values()]} {rank} {step}", extent_ns=extent), shown, bands, ())
    st.caption(
        f"{step_name((rank, step)).capitalize()} in the middle trial of each arm, each from the first event that the "
        f"step launched; behind its end there may be events of the next. {mode_words(values)}"
    )
    rows = [{"arm": arm, **steps[arm][rank, step]} for arm in trials]
    headers = {"arm": "arm", **overlap_tables.OF_WINDOW}
    tables.show(rows, headers, words=f"{step_name((rank, step))} of each arm")


def step_name(place: Place) -> str:
    rank, step = place
    return f"step {step} of {'a rank' if rank is None else f'rank {rank}'}"


def traced_steps(trial: Run) -> dict[Place, dict[str, Any]]:
    """Rank and step -> the figures by the launch rule, of steps that the traces hold whole."""
    kept = data.extract(state.root(), trial, "overlap").values
    whole = kept["overlap"] if kept["complete_overlap"] is True else kept["complete_overlap"]
    return {
        (entry["rank"], step["step"]): step
        for entry in (whole or {"ranks": []})["ranks"]
        for step in entry["steps"]
        if step["rule"] == "launch" and step["span_ns"]
    }


def windows(trial: Run, arm: str, rank: int | None, step: int) -> list[tuple[Shown, int]]:
    """The devices of the rank, on an axis that begins with what the step launched, and how long that takes (ns)."""
    folders = preparing.lane_folders(Path(data.prepared(state.root(), trial)))
    for moment in moments_of([head_of(str(folder)) for folder in folders]):
        found = [
            (replace(one, group=group(arm, one, several=len(devices) > 1), offset_ns=-start), end - start)
            for devices in [shown_of(moment, [rank])]
            for one in devices
            for item in one.device["steps"]
            if item["step"] == step and item["launch"] is not None
            for start, end in [item["launch"]]
        ]
        if found:
            return found
    return []


def group(arm: str, one: Shown, *, several: bool) -> str:
    return f"{printable(arm)} device {one.device['device']}" if several else printable(arm)


@st.fragment
def draw(axis: Axis, shown: Sequence[Shown], bands: Sequence[Band], strips: Sequence[Strip]) -> None:
    def make(wanted: View) -> Picture:
        return picture(shown, wanted, bands=bands, strips=strips, mark=view.mark(KEY))

    made = view.draw(make, axis, KEY)
    if made.table:
        with st.expander("Figures of this view"):
            overlap_tables.in_view(made.table)


def memory(values: Values, trials: Mapping[str, Run]) -> None:
    timelines = {arm: data.extract(state.root(), trial, "timeline") for arm, trial in trials.items()}
    items = {
        arm: {(item["rank"], item["device"]): item for item in timeline.values["devices"]}
        for arm, timeline in timelines.items()
    }
    shared = [place for place in items[next(iter(items))] if all(place in other for other in items.values())]
    if not shared:
        peaks_by_step(values)
        return
    most = max(shared, key=lambda place: max(of[place]["peaks"]["active"]["bytes"] for of in items.values()))
    names = {history_name(place): place for place in shared}
    name = st.selectbox("Rank", list(names), shared.index(most), key="history", bind="query-params", width=260)
    place = names[str(name)]
    chosen = {arm: of[place] for arm, of in items.items()}
    curves = {arm: memory_strips.curves(timelines[arm], item) for arm, item in chosen.items()}
    top = max(curve.peak(kind)[0] for curve in curves.values() for kind in ("active", "reserved"))
    strips, bands, extent = [], [], 1
    for arm, item in chosen.items():
        first, last = int(curves[arm].time_ns[0]), int(curves[arm].time_ns[-1])
        extent = max(extent, last - first + 1)
        strips.append(
            Strip(
                label=f"{printable(arm)}: memory",
                group=printable(arm),
                curves=curves[arm],
                offset_ns=-first,
                height=HEIGHT,
                top_bytes=top,
                marks=memory_strips.peak_marks(item, first),
                pending_marks=memory_strips.pending_marks(item),
            )
        )
        bands += memory_strips.bands(item, printable(arm), first, first, last)
    clock = all(item["clock"] for item in chosen.values())
    axis = Axis(
        id=f"{[trial.name for trial in trials.values()]} {place}", extent_ns=extent, unit="time" if clock else "event"
    )
    draw(axis, (), bands, strips)
    st.caption(
        f"{history_name(place).capitalize()} in the middle trial of each arm, each from the first event of its "
        "history, on one scale of bytes. Allocated and active are requested bytes. Hatched: pending, freed but not "
        f"reusable yet. {mode_words(values)}"
    )
    rows = []
    for arm, trial in trials.items():
        of_trial = data.extract(state.root(), trial, "memory").values
        files = {chosen[arm]["file"]}
        for row, stacking in zip(
            memory_figures.device_rows(of_trial, files), memory_figures.stacking_rows(of_trial, files), strict=True
        ):
            if row["device"] == place[1]:
                rows.append({**stacking, **row, "arm": arm})
    headers = {"arm": "arm", **{name: PEAKS[name] for name in memory_figures.PEAKS}}
    stacked = {"blocks": "stacked blocks", "max_pending_bytes": "most pending"}
    tables.show(rows, headers | stacked, words="Peaks of both histories")


def history_name(place: Place) -> str:
    rank, device = place
    return f"{'a rank' if rank is None else f'rank {rank}'}, device {device}"


def peaks_by_step(values: Values) -> None:
    """What there is of memory over time without a history: the middle trials' peaks, step by step."""
    steps = values["peaks"]
    known = [name for name in PEAKS if any(row[name] is not None for rows in steps.values() for row in rows)]
    if not known:
        st.caption("The trials state no memory.")
        return
    words = {PEAKS[name]: name for name in known}
    word = st.segmented_control(
        "Peak", list(words), default=next(iter(words)), required=True, key="kind", bind="query-params"
    )
    name = words[str(word)]
    series = {arm: [{"step": row["step"], "ranks": {None: row}} for row in rows] for arm, rows in steps.items()}
    if chart := charts.peaks_per_step(series, name):
        charts.show(chart, f"Peak {word} of each step of the middle trial of each arm")
    st.caption(
        f"The highest over the ranks in the middle trial of each of {counted(len(steps), 'arm')}; there is no memory "
        f"history of one rank in both to draw a timeline from. {mode_words(values)}"
    )
    numbers = sorted({row["step"] for rows in steps.values() for row in rows})
    at = {arm: {row["step"]: row[name] for row in rows} for arm, rows in steps.items()}
    keys = {f"arm{place}_bytes": arm for place, arm in enumerate(steps)}
    listed = [{"step": step, **{key: at[arm].get(step) for key, arm in keys.items()}} for step in numbers]
    headers = {"step": "step", **{key: printable(arm) for key, arm in keys.items()}}
    tables.show(listed, headers, words=f"Peak {word} of each step")
