"""Analyses one run or experiment and writes every extract of it to a folder: `python -m dashboard.prepare PATH FOLDER`.

In a process of its own, the server stays responsive and keeps its memory whatever the size of the traces. Large traces
are read by several processes, and the lanes of each are written as soon as it is read.
`dashboard.store` says what the folder holds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from dashboard.discover import files_of, is_experiment
from dashboard.extracts import EXPERIMENT, EXTRACTS, extractor
from dashboard.lanes.index import lane_index
from dashboard.store import FAILED, LANES, TRACES, save
from harness.errors import InputError
from harness.recording import atomic_path
from harness.report import build
from harness.sources import Sources
from harness.trace import Capture, read_captures
from harness.trace.capture import Mapper
from harness.worker import die_with_parent

LARGE_BYTES = 8 * 2**20
"""Of all traces as they are stored: reading less takes about as long as starting processes for it."""


def prepare(path: Path, folder: Path) -> None:
    """Where nothing at `path` can be read, its error is what is written."""
    try:
        if is_experiment(path):
            of_experiment(path, folder)
        else:
            of_run(path, folder)
    except InputError as error:
        (folder / FAILED).write_text(json.dumps(error.to_json()), encoding="utf-8")


def of_experiment(path: Path, folder: Path) -> None:
    """One extract, made of the trials' figures, which are kept beside it: a trial is read once."""
    from dashboard.ab import extract  # scipy, which no run needs, takes a while

    trials = extract.ended_trials(path)
    with mapper([file for trial in trials for file in files_of(trial)]) as each:
        analysis = extract.analysed(path, trials, folder.parent, each)
    save(folder / EXPERIMENT, extract.experiment(analysis))


def of_run(path: Path, folder: Path) -> None:
    """The extracts of `EXTRACTS`, and before them the lanes of each trace."""

    def read(sources: Sources) -> tuple[list[Capture], list[InputError]]:
        with atomic_path(folder / TRACES) as unfinished:  # the server may be reading it already
            unfinished.write_text(json.dumps([str(file.path) for file in sources.traces]), encoding="utf-8")
        (folder / LANES).mkdir()

        def seen(capture: Capture) -> None:
            place = len(list((folder / LANES).iterdir()))
            unfinished = folder / LANES / f"{place}.tmp"
            save(unfinished, lane_index(capture))
            unfinished.rename(unfinished.with_suffix(""))

        with mapper([file.path for file in sources.traces]) as each:
            return read_captures(sources, each=each, seen=seen)

    report = build(path, read)
    for name in EXTRACTS:
        save(folder / name, extractor(name)(report))


@contextmanager
def mapper(files: list[Path]) -> Iterator[Mapper]:
    """`map`, by as many processes as there are cores if reading these files is worth it."""
    workers = min(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1, len(files))
    if workers < 2 or sum(file.stat().st_size for file in files) < LARGE_BYTES:
        yield map
        return
    fork = multiprocessing.get_context("fork")  # this process has no threads
    with ProcessPoolExecutor(workers, fork, initializer=die_with_parent, initargs=(signal.SIGKILL,)) as pool:
        yield pool.map


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    prepare(Path(sys.argv[1]), Path(sys.argv[2]))
