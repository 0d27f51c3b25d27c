"""The files behind the figures: download them, or look at a trace event by event in Perfetto."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import streamlit as st

from dashboard import data, files, state, states
from dashboard.discover import links_out, name_below
from harness.errors import InputError
from harness.sources import SourceFile, Sources, find_sources

TITLE, ICON, ORDER, ABOUT = "Files and Perfetto", ":material/folder_open:", 70, "run"

HEIGHT = 780


def page() -> None:
    run = state.current()
    st.title(f"Files: {run.name or run.path.name}")
    if links_out(state.root(), run):
        data.extract(state.root(), run, "report")  # which explains it
    sources = sources_of(run.path)
    states.partial([error.to_json() for error in sources.errors])
    traces(run.path, sources.traces)
    snapshots(run.path, sources.snapshots)


def sources_of(path: Path) -> Sources:
    try:
        return find_sources(path)
    except InputError:  # a recording without a window that was traced or tracked
        return Sources(root=path, recording=True)


def traces(root: Path, found: list[SourceFile]) -> None:
    st.subheader("Traces")
    if not found:
        states.empty("There is no trace. This records two steps of one:", "meshscope run … --recorder.trace.steps 2")
        return
    file = chosen("trace", root, found)
    st.link_button("Download trace", files.address_of(file.path), icon=":material/download:", shortcut="D")
    if files.perfetto_folder() is None:
        st.caption(
            "Perfetto can open it here without a network once its UI is installed, or drop it on ui.perfetto.dev:"
        )
        st.code("pip install 'meshscope[perfetto]'", language="sh")
    elif st.toggle("Open in Perfetto", key="open", bind="query-params"):
        parts = urlsplit(st.context.url or "")
        address = files.perfetto_address(f"{parts.scheme}://{parts.netloc}", file.path)
        st.iframe(address, height=HEIGHT, alt=f"Perfetto, showing {file.path.name}")
        st.caption("W, S zoom; A, D move; F shows the selected slice; ? lists all keys. Nothing leaves this machine.")


def snapshots(root: Path, found: list[SourceFile]) -> None:
    st.subheader("Memory snapshots")
    if not found:
        states.empty("There is no snapshot. This records one:", "meshscope run … --recorder.memory.steps 1")
        return
    file = chosen("snapshot", root, found)
    st.link_button("Download snapshot", files.address_of(file.path), icon=":material/download:")
    st.caption(
        "A pickle as torch.cuda.memory writes it, which pytorch.org/memory_viz opens, too, unpacked if it is .gz."
    )


def chosen(kind: str, root: Path, found: list[SourceFile]) -> SourceFile:
    """One of the files, by its name below the run, bound to the URL."""
    base = root if root.is_dir() else root.parent
    by_name = {name_below(base, file.path): file for file in found}
    name = st.selectbox(kind.capitalize(), list(by_name), key=f"{kind}_file", bind="query-params")
    return by_name[str(name)]
