"""Memory over time, what its peaks consist of, what stacks up, and the peaks of steps, phases and ranks."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard import charts, commands, data, state, states, tables, whatif
from dashboard.discover import Run
from dashboard.lanes import memory_figures, memory_strips, view
from dashboard.lanes.picture import Band, Picture, Strip, View, picture
from dashboard.lanes.view import Axis
from dashboard.store import Extract
from harness.report.finding import NOT_A_CLUSTER
from harness.sources import mode_of
from harness.text import counted, size

TITLE, ICON, ORDER, ABOUT = "Memory", ":material/memory:", 30, "run"

KEY = "memory"
STRIPS_DRAWN = 6
HEIGHTS = {1: 260, 2: 190}
HEIGHT = 120
RECORD = "meshscope run --module llama3 --config llama3_1b --recorder.memory.start 2 --recorder.memory.steps 2"
RECORD_CPU = "meshscope run --module debug --config tiny"
PEAKS = {"peak_allocated_bytes": "allocated", "peak_active_bytes": "active", "peak_reserved_bytes": "reserved"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What is looked at: `chosen` items of the extract `timeline`, and those of them that are drawn on one axis, which
    begins at `origin_ns`."""

    extract: Extract
    chosen: Sequence[dict[str, Any]]
    items: Sequence[dict[str, Any]]
    ranks: Sequence[int | None]
    origin_ns: int


def page() -> None:
    run = state.current()
    st.title("Memory")
    mode = mode_of(run.path / "manifest.json")
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        st.badge(f"mode {mode}", color="orange" if mode in NOT_A_CLUSTER else "blue")
        if mode == "cpu":
            st.caption("Bytes of live tensors and of processes on a CPU: no device, no allocator.")
    rows = data.rows(run)
    memory = state.extract("memory").values
    timeline = state.extract("timeline")
    states.partial(state.unread())
    known = ranks_of(memory, rows)
    if not known:
        states.empty(
            "Nothing here says what memory was held: no allocator snapshot (torch.cuda.memory._dump_snapshot, or a "
            "memory window of a recording on CUDA) and no step rows. Traces alone show time: see Overlap.",
            RECORD_CPU if mode == "cpu" else RECORD,
        )
        return
    shown = choose(timeline, known)
    if shown.items and memory is not None:
        over_time(run, shown, memory)
        composition(shown)
    else:
        without_history(mode, memory, shown, rows)
    files = {file["file"] for file in memory["files"] if file["rank"] in shown.ranks} if memory is not None else set()
    if memory is not None and files:
        of_snapshots(memory, files)
    if shown.items and memory is not None:
        whatif.section(run, histories(run, shown))
    peaks(memory, timeline, rows, shown.ranks)
    if memory is not None:
        notes(memory, files)
    path = shlex.quote(str(run.path))
    commands.show([f"meshscope memory {path} --by {level}" for level in ("step", "phase", "category", "site")])


def without_history(mode: str, memory: dict[str, Any] | None, shown: Shown, rows: data.Rows | None) -> None:
    """Why there is no curve, and what is known instead."""
    if mode == "cpu":
        states.empty(
            "A CPU has no allocator that keeps a history: no curve over time and no stacking. In the memory window the "
            "recorder counted live tensors; their peaks, and what the highest consisted of, are below."
        )
    elif memory is None or not memory["files"]:
        states.empty(
            "No snapshot of these ranks: no curve over time, no composition and no stacking. The peaks below are those "
            "of the recording's step rows.",
            RECORD,
        )
    else:
        states.empty(
            "The snapshots of these ranks have no history (torch.cuda.memory._record_memory_history was off): their "
            "final levels are below, peaks and stacking are unknown.",
            RECORD,
        )
    for found in memory_figures.recorded_compositions(rows.recording, shown.ranks) if rows is not None else ():
        st.subheader(f"At the allocated peak of rank {found['rank']}, step {found['step']}: {size(found['bytes'])}")
        charts.show(charts.shares(found["parts"]), f"The allocated peak of rank {found['rank']} by category")


def ranks_of(memory: dict[str, Any] | None, rows: data.Rows | None) -> list[int | None]:
    """The ranks of which anything is known."""
    found: set[int | None] = {file["rank"] for file in memory["files"]} if memory is not None else set()
    if rows is not None:
        found |= {rank["rank"] for rank in rows.ranks if any(rank[peak] is not None for peak in PEAKS)}
    return sorted(found, key=lambda rank: (rank is None, rank or 0))


def choose(timeline: Extract, known: Sequence[int | None]) -> Shown:
    """Ranks and, where a rank has several, the snapshot; all in the URL."""
    bar = st.container(horizontal=True, gap="small", vertical_alignment="bottom")
    asked = bar.multiselect(
        "Ranks",
        known,
        key="rank",
        bind="query-params",
        placeholder="all",
        format_func=lambda rank: "unknown" if rank is None else str(rank),
        width=260,
    )
    ranks = asked or known
    items = [item for item in timeline.values["devices"] if item["rank"] in ranks]
    names = list(dict.fromkeys(snapshot_name(item) for item in items))
    if len(names) > 1:
        chosen = bar.selectbox("Snapshot", names, key="snapshot", bind="query-params", width=320)
        items = [item for item in items if snapshot_name(item) == chosen]
    every = items
    if any(not item["clock"] for item in items):
        items = items[:1]  # numbers of events are an axis of their own
    if len(items) > STRIPS_DRAWN:
        st.caption(f"The first {STRIPS_DRAWN} of {len(items)} histories are drawn: choose ranks for others.")
    items = items[:STRIPS_DRAWN]
    origin = min((memory_strips.curves(timeline, item).time_ns[0] for item in items), default=0)
    return Shown(extract=timeline, chosen=every, items=items, ranks=ranks, origin_ns=int(origin))


def snapshot_name(item: dict[str, Any]) -> str:
    """What the histories of several ranks at one time have in common."""
    if item["iteration"] is not None:
        at_exit = ", at the end by an exception" if Path(item["file"]).parent.name.endswith("_exit") else ""
        return f"after {counted(item['iteration'], 'step')}{at_exit}"
    return Path(item["file"]).name if item["rank"] is None else "snapshots"


def over_time(run: Run, shown: Shown, memory: dict[str, Any]) -> None:
    """The curves on one axis, with steps and phases above each."""
    strips, bands, last = [], [], 0
    for item in shown.items:
        curves = memory_strips.curves(shown.extract, item)
        group = group_of(item, shown)
        last = max(last, int(curves.time_ns[-1]) - shown.origin_ns)
        first = int(curves.time_ns[0])
        strips.append(
            Strip(
                label=f"{group}: GPU memory held by the allocator",
                group=group,
                curves=curves,
                offset_ns=-shown.origin_ns,
                height=HEIGHTS.get(len(shown.items), HEIGHT),
                marks=memory_strips.peak_marks(item, first) + memory_strips.oom_marks(item, memory),
                pending_marks=memory_strips.pending_marks(item),
            )
        )
        bands += memory_strips.bands(item, group, shown.origin_ns, first, int(curves.time_ns[-1]))
    clock = shown.items[0]["clock"]
    axis = Axis(
        id=f"{run.name} {[item['file'] for item in shown.items]}", extent_ns=last + 1, unit="time" if clock else "event"
    )
    draw(strips, bands, axis)


def group_of(item: dict[str, Any], shown: Shown) -> str:
    name = Path(item["file"]).name if item["rank"] is None else f"rank {item['rank']}"
    several = sum(other["file"] == item["file"] for other in shown.items) > 1
    return f"{name} device {item['device']}" if several else name


def histories(run: Run, shown: Shown) -> dict[str, tuple[Path, int]]:
    """What a snapshot is called -> the file, and how many events its histories have in all."""
    events: Counter[Path] = Counter()
    ranks: dict[Path, int | None] = {}
    for item in shown.chosen:
        file = Path(item["file"])
        ranks[file] = item["rank"]
        events[file] += len(memory_strips.curves(shown.extract, item).time_ns)
    of_rank = Counter(ranks.values())
    return {
        f"rank {rank}" if rank is not None and of_rank[rank] == 1 else str(file.relative_to(run.path)): (
            file,
            events[file],
        )
        for file, rank in ranks.items()
    }


@st.fragment
def draw(strips: Sequence[Strip], bands: Sequence[Band], axis: Axis) -> None:
    def make(wanted: View) -> Picture:
        return picture([], wanted, strips=strips, bands=bands)

    view.draw(make, axis, KEY)
    unit = "in events: the history has no times" if axis.unit == "event" else "since the first history begins"
    st.caption(
        f"Time {unit}. Allocated and active are requested bytes. Each column of pixels shows the highest level that it "
        "had, pale down to the lowest: no peak is lost, at any zoom. Hatched: pending, that is freed but not reusable "
        "until another stream is done; it costs memory where an allocation meets it (stacking)."
    )


def composition(shown: Shown) -> None:
    """What the allocated peak and most pending consisted of."""
    names = [group_of(item, shown) for item in shown.items]
    for name, item in zip(names, shown.items, strict=True):
        peak, pending = st.columns(2, gap="medium")
        with peak:
            level = item["peaks"]["allocated"]["bytes"]
            st.subheader(f"At the allocated peak of {name}: {size(level)}")
            parts = {share["name"]: share["bytes"] for share in item["by_category"] if share["bytes"] > 0}
            if parts:
                charts.show(charts.shares(parts), f"The allocated peak of {name} by category")
            with st.expander("By allocation site"):
                tables.show(item["by_site"], {"name": "site", "blocks": "blocks", "bytes": "bytes"}, words="By site")
        with pending:
            most = sum(share["bytes"] for share in item["pending"])
            st.subheader(f"Most pending at an allocation: {size(most)}")
            if not item["pending"]:
                st.caption("What was freed was reusable before the next allocation, so no memory was held back.")
            else:
                st.caption("Freed, but lent to another stream that still ran: that allocation could not have it.")
                tables.show(item["pending"], {"name": "site", "blocks": "blocks", "bytes": "bytes"}, words="Pending")


def of_snapshots(memory: dict[str, Any], files: set[str]) -> None:
    """What `meshscope memory` says of each snapshot."""
    st.subheader("Snapshots")
    headers = {
        "rank": "rank",
        "device": "device",
        "history": "history",
        **{name: f"peak {kind}" for name, kind in PEAKS.items()},
        "final_allocated_bytes": "final allocated",
        "final_active_bytes": "final active",
        "final_reserved_bytes": "final reserved",
    }
    tables.show(memory_figures.device_rows(memory, files), headers, words="Peaks and final levels of each device")
    ooms = memory_figures.oom_rows(memory, files)
    if ooms:
        first = ooms[0]
        asked, free = size(first["size_bytes"]), size(first["device_free_bytes"])
        held, allocated = size(first["reserved_bytes"]), size(first["allocated_bytes"])
        st.error(
            f"Out of memory: {counted(len(ooms), 'allocation')} failed. The first asked for {asked} at "
            f"{states.escaped(first['site'])}, with {free} free on the device and {held} reserved, of which "
            f"{allocated} were allocated.",
            icon=":material/error:",
        )
        names = ("size_bytes", "device_free_bytes", "allocated_bytes", "active_bytes", "reserved_bytes")
        oom_headers = {"rank": "rank", "site": "site"} | {n: n.removesuffix("_bytes").replace("_", " ") for n in names}
        tables.show(ooms, oom_headers, words="Failed allocations")
    st.subheader("Stacking")
    stacking = {
        "rank": "rank",
        "device": "device",
        "blocks": "stacked blocks",
        "max_pending_bytes": "most pending",
        "pending_at_end_bytes": "pending at the end",
        "byte_seconds": "size × time pending",
    }
    tables.show(memory_figures.stacking_rows(memory, files), stacking, words="Stacking of each device")
    sites = memory_figures.site_rows(memory, files)
    if sites:
        headers = {"rank": "rank", "site": "site", "blocks": "stacked blocks", "bytes": "bytes in all"}
        tables.show(sites, headers, words="Where stacked blocks were allocated")
    else:
        st.caption("No block was stacked: every freed block was reusable before the next allocation.")


def peaks(
    memory: dict[str, Any] | None, timeline: Extract, rows: data.Rows | None, ranks: Sequence[int | None]
) -> None:
    """Per step, per phase and per rank; what the driver counts beyond them."""
    of_run = [rank for rank in rows.ranks if rank["rank"] in ranks] if rows is not None else []
    contents: dict[str, Callable[[], None]] = {
        "Steps": lambda: steps(memory_figures.step_rows(memory, rows.steps if rows is not None else [], ranks)),
        "Phases": lambda: phases(memory_figures.phase_rows(timeline.values["phases"], of_run, ranks)),
        "Ranks": lambda: whole_ranks(of_run),
        "Driver": lambda: residual(rows, ranks),
    }
    for tab, draw_tab in zip(st.tabs(list(contents), key="tab", bind="query-params"), contents.values(), strict=True):
        if tab.open:
            with tab:
                draw_tab()


def phases(rows: Sequence[dict[str, Any]]) -> None:
    if rows:
        tables.show(rows, {"rank": "rank", "phase": "phase", **PEAKS}, words="Peaks of each phase")
    else:
        st.caption("No phases: neither named ranges (forward, backward, optimizer) nor recorder.phase().")


def whole_ranks(ranks: Sequence[dict[str, Any]]) -> None:
    if chart := charts.peaks_per_rank(ranks):
        charts.show(chart, "Peaks of each rank, allocated ones by phase")
        tables.show(ranks, {"rank": "rank", "steps": "steps", **PEAKS}, words="Peaks of each rank")
    else:
        st.caption("Only a recording's step rows have the peaks of whole ranks; those of snapshots are above.")


def steps(rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        st.caption("No steps: neither step rows nor `ProfilerStep#N` ranges in a snapshot.")
        return
    series = {f"{kind}": memory_figures.as_series(rows) for kind in ("allocated", "active", "reserved")}
    kind = st.segmented_control("Peak", list(series), default="active", required=True, key="peak", bind="query-params")
    if chart := charts.peaks_per_step({str(kind): series[str(kind)]}, f"peak_{kind}_bytes"):
        charts.show(chart, f"The highest {kind} peak of the ranks at each step")
    else:
        st.caption(f"The steps state no {kind} peak.")
    tables.show(rows, {"rank": "rank", "step": "step", **PEAKS}, words="Peaks of each step")


def residual(rows: data.Rows | None, ranks: Sequence[int | None]) -> None:
    found = memory_figures.residual_rows(rows.recording, ranks) if rows is not None else []
    if not found:
        st.caption(
            "Known only where NVML, once a second, said what a process holds during a step in which its reserved bytes "
            "stayed the same: not on a CPU, nor of runs that are short or grow in every step."
        )
        return
    st.caption(
        "NVML's bytes of the process less what its allocator reserves: CUDA context, NCCL buffers, libraries. "
        "The step where that is most, of those in which reserved bytes stayed the same."
    )
    headers = {
        "rank": "rank",
        "step": "step",
        "nvml_process_bytes": "process (NVML)",
        "reserved_bytes": "reserved",
        "residual_bytes": "driver residual",
    }
    tables.show(found, headers, words="Driver residual of each rank")


def notes(memory: dict[str, Any], files: set[str]) -> None:
    said = memory_figures.notes_of(memory, files)
    if said:
        with st.expander(f"Notes ({len(said)})", expanded=any("history begins" in note for note in said)):
            st.markdown(
                "\n".join(
                    f"- {states.escaped(note)} (rank {', '.join('unknown' if r is None else str(r) for r in ranks)})"
                    for note, ranks in said.items()
                )
            )
