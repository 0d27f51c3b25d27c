"""Analysing runs in the background, each once and in a process of its own; what it has finished of single traces can
be seen while it is still at work."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dashboard import store
from dashboard.discover import Run
from dashboard.store import LANES, TRACES

PACKAGES = Path(__file__).parents[1]


@dataclass(slots=True)
class Preparation:
    """An analysis under way. `folder` is where it writes until it is `done`; `error` then says why there is no result,
    None if there is one."""

    folder: Path
    done: threading.Event = field(default_factory=threading.Event)
    error: str | None = None

    def traces(self) -> list[str]:
        """The traces that are read, in their order; empty before that is known."""
        try:
            return msgspec.json.decode((self.folder / TRACES).read_bytes(), type=list[str])
        except FileNotFoundError:  # not begun, or finished and moved
            return []

    def lanes(self) -> list[Path]:
        """The lane indexes that can be read already."""
        return lane_folders(self.folder)


_running: dict[str, Preparation] = {}
_lock = threading.Lock()


def lane_folders(folder: Path) -> list[Path]:
    """The finished lane indexes in a folder of extracts, in order of their traces."""
    found = (path for path in (folder / LANES).glob("*") if path.name.isdecimal())
    return sorted(found, key=lambda path: int(path.name))


def start(run: Run, cache: Path, key: str) -> Preparation | None:
    """The analysis of a run, begun now if it is not under way; None where its result is there."""
    with _lock:
        if (cache / key).is_dir():
            return None
        if key not in _running:
            _running[key] = Preparation(store.new_folder(cache))
            threading.Thread(target=_work, args=(run, cache, key, _running[key]), daemon=True).start()
        return _running[key]


def _work(run: Run, cache: Path, key: str, preparation: Preparation) -> None:
    try:
        preparation.error = _analyse(run, preparation.folder)
        if preparation.error is None:
            store.publish(preparation.folder, cache / key)
            store.prune(cache)
    except OSError as error:  # a full disk
        preparation.error = str(error)
    finally:
        with _lock:
            del _running[key]
        preparation.done.set()


def _analyse(run: Run, folder: Path) -> str | None:
    """Why the process failed, None if it did not."""
    done = in_process("dashboard.prepare", str(run.path), str(folder))
    if done.returncode == 0:
        return None
    return last_line(done)


def in_process(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a module of this distribution to its end in a process of its own."""
    path = os.pathsep.join([str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-P", "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        check=False,
    )


def last_line(failed: subprocess.CompletedProcess[str]) -> str:
    """What a process that failed said last."""
    return (failed.stderr.strip().splitlines() or [f"it ended with {failed.returncode}"])[-1]
