"""All that pages read: every function is cached by what the files are, so nothing is parsed twice.

`extract` is the way to anything made of traces and snapshots, `rows` to what the step rows say now (cheap, and new at
every step of a live run), `measured` to both as `harness.compare` takes them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import streamlit as st

from dashboard import preparing, store
from dashboard.discover import Run, files_of, find_runs, fingerprint, is_text, links_out, run_at, trials_going_on
from dashboard.extracts import EXPERIMENT
from dashboard.preparing import Preparation
from dashboard.store import Extract
from harness.compare import Measured, Standing, standing
from harness.compare.steps import by_rank, by_step
from harness.errors import InputError
from harness.recording import Recording, read_recording

ASKED_EVERY_S = 0.2


@st.cache_data(ttl=3, show_spinner=False)
def runs_below(root: Path) -> tuple[list[Run], bool]:
    """`discover.find_runs`, at most every three seconds."""
    return find_runs(root)


def extract(root: Path, run: Run, name: str) -> Extract:
    """An extract of `extracts.EXTRACTS`, or EXPERIMENT's, made now if it is not on disk. All sessions share it, and its
    columns are read-only memory maps: do not change it.

    Raises `InputError` if nothing of the run can be read, or a link within it leads out of `root`.
    """
    if name != EXPERIMENT:
        require_run(run)
    return _loaded(prepared(root, run), name)


def require_run(run: Run) -> Run:
    """Raises `InputError` for an experiment, which has trials and no figures of a run."""
    if run.kind == "experiment":
        raise InputError(run.name, "is an experiment: the page A/B shows it, and its trials are runs of their own")
    return run


def prepared(root: Path, run: Run) -> str:
    """The folder of a run's extracts, as text."""
    target, under_way = preparation(root, run)
    if under_way is not None:
        _wait(run, under_way)
    store.touch(target)
    if (target / store.FAILED).is_file():
        raise InputError(**msgspec.json.decode((target / store.FAILED).read_bytes()))
    return str(target)


def preparation(root: Path, run: Run) -> tuple[Path, Preparation | None]:
    """The folder that a run's extracts are in at the end, and their making, begun now unless it is under way; None
    once they are on disk. Raises as `extract`."""
    escaping = links_out(root, run)
    if escaping:
        raise InputError(
            escaping[0], f"is a link that leads out of {root}: start the dashboard with a folder that holds both"
        )
    nameless = next((path for path in files_of(run.path) if not is_text(str(path))), None)
    if nameless is not None:
        shown = os.fsencode(nameless).decode("utf-8", "backslashreplace")
        raise InputError(shown, "has a name that is not UTF-8, which no page can show: rename it")
    cache, key = store.default_folder(), fingerprint(run, live=is_live(run))
    return cache / key, preparing.start(run, cache, key)


def _wait(run: Run, under_way: Preparation) -> None:
    """Says how far the analysis is until it is done."""
    said = st.empty()
    with st.spinner(f"Analysing {run.name}", show_time=True):
        while not under_way.done.wait(ASKED_EVERY_S):
            total = len(under_way.traces())
            if total > 1:
                read = len(under_way.lanes())
                said.progress(read / total, text=f"{read} of {total} traces read, which is needed once")
    said.empty()
    if under_way.error is not None:
        raise InputError(run.path, f"cannot be analysed: {under_way.error}")


def is_prepared(run: Run, *, live: bool) -> bool:
    """Whether the extracts of a run are on disk, so that asking for one costs nothing."""
    return (store.default_folder() / fingerprint(run, live=live) / "report").is_dir()


@st.cache_resource(max_entries=24, show_spinner=False)
def _loaded(folder: str, name: str) -> Extract:
    return store.load(Path(folder) / name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A recording's manifest, state and step rows put together, without traces and snapshots."""

    recording: Recording
    standing: Standing
    steps: list[dict[str, Any]]
    ranks: list[dict[str, Any]]

    @property
    def live(self) -> bool:
        """Whether somebody is still writing it."""
        return self.standing.state in ("planned", "running") and not self.standing.abandoned


def rows(run: Run) -> Rows | None:
    """What a recording says now, None for a folder of another tool.

    Raises `InputError` for a recording of a later version.
    """
    if run.kind != "recording":
        return None
    read = _read_rows(run.path, stamps(run))
    # Whether its writers live changes without a file changing.
    return Rows(recording=read.recording, standing=standing(read.recording), steps=read.steps, ranks=read.ranks)


def stamps(run: Run) -> str:
    """What changes when a recording's manifest, state or rows do; as text, which Streamlit's caches hash fast."""
    files = [run.path / "manifest.json", run.path / "status.json"]
    files += [path for name in ("steps", "ranks") for path in sorted((run.path / name).glob("rank*"))]
    return "\n".join(f"{path.name} {_stamp(path)}" for path in files)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        about = path.stat()
    except OSError:
        return -1, -1
    return about.st_size, about.st_mtime_ns


@st.cache_resource(max_entries=32, show_spinner=False)
def _read_rows(path: Path, stamps: str) -> Rows:
    recording = read_recording(path)
    steps = by_step(recording)
    return Rows(recording=recording, standing=standing(recording), steps=steps, ranks=by_rank(recording, steps))


def is_live(run: Run) -> bool:
    """Whether somebody is still writing it, or a trial of it; one that cannot be read is not known to be written."""
    if run.kind == "experiment":
        return any(is_live(run_at(run.path, f"trials/{name}")) for name in trials_going_on(run.path))
    try:
        found = rows(run)
    except InputError:
        return False
    return found is not None and found.live


def measured(root: Path, run: Run) -> Measured:
    """What `harness.compare.measure` returns, put together from extracts and rows: without captures and snapshots."""
    report = extract(root, run, "report").values
    traces = extract(root, run, "overlap").values
    found = rows(run)
    complete = traces["complete_overlap"]
    return Measured(
        path=run.path,
        mode=report["mode"],
        recording=found.recording if found else None,
        standing=found.standing if found else None,
        steps=found.steps if found else [],
        ranks=found.ranks if found else [],
        overlap=traces["overlap"],
        complete_overlap=traces["overlap"] if complete is True else complete,
        memory=extract(root, run, "memory").values,
        errors=[InputError(**error) for error in report["errors"]],
    )
