"""What a folder holds that a page can show: recordings, experiments, and folders of other tools' traces and snapshots.

Nothing outside the folder is shown: a link that leads out of it is refused, by name or within a recording.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import harness
import probes
from harness.errors import InputError
from harness.recording import is_recording, read_status
from harness.sources import OWN_FILES, OWN_FOLDERS, UNFINISHED, named_like_input, natural_key

ROOT_VARIABLE = "MESHSCOPE_DASHBOARD_ROOT"

Kind = Literal["recording", "experiment", "folder"]

FOLDERS_SEARCHED = 20_000
"""A dashboard started over a whole disk stops looking here, and says so."""
DEPTH = 8
WRITTEN_WHILE_RUNNING = frozenset({"steps", "logs", "ranks"})


def root() -> Path:
    """The folder that is shown, resolved; nothing outside it is."""
    return _resolved(os.environ.get(ROOT_VARIABLE) or ".")


@cache
def _resolved(folder: str) -> Path:
    return Path(folder).resolve()


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Something to show. `name` is its path below the root, as in the URL; `experiment` the name of the experiment
    that it is a trial of."""

    name: str
    path: Path
    kind: Kind
    experiment: str | None = None


def is_experiment(directory: Path) -> bool:
    return (directory / "experiment.json").is_file()


def confined(root: Path, name: str) -> Path:
    """The path that `name` means below `root` (itself resolved).

    Raises `InputError` if it leads out of `root`, by `..`, as an absolute path or over a link, or does not exist.
    """
    try:
        path = (root / name).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):  # ValueError: a null byte; RuntimeError: links in a circle
        raise InputError(name, f"is not in {root}") from None
    if not path.is_relative_to(root):
        raise InputError(name, f"leads out of {root}: only what is in that folder is shown")
    return path


def run_at(root: Path, name: str) -> Run:
    """The run of this name; raises `InputError` as `confined` does."""
    path = confined(root, name)
    if not path.is_dir():
        return Run(name=name, path=path, kind="folder")
    kind: Kind = "experiment" if is_experiment(path) else "recording" if is_recording(path) else "folder"
    parent = path.parent.parent
    trial = path != root and parent.is_relative_to(root) and is_experiment(parent)
    return Run(name=name, path=path, kind=kind, experiment=name_below(root, parent) if trial else None)


def name_below(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def is_text(name: str) -> bool:
    """Whether a name can be in a URL: one whose bytes are not UTF-8 cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def find_runs(root: Path) -> tuple[list[Run], bool]:
    """Everything to show below `root` (resolved), in natural order of the names, and whether all of it was searched:
    neither very many folders nor those whose names are no text are.

    The folder of another tool is the one that holds its files, or `profiling/` (torchtitan's dump folder).
    """
    found: dict[Path, Run] = {}
    whole = True
    for searched, (parent, folders, names) in enumerate(os.walk(root, followlinks=False)):
        if searched >= FOLDERS_SEARCHED:
            return ordered(found), False
        here = Path(parent)
        whole = whole and all(map(is_text, folders))
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n not in OWN_FOLDERS and is_text(n))
        if is_experiment(here):
            found[here] = run_at(root, name_below(root, here))
            folders[:] = [name for name in folders if name == "trials"]  # beside them, queues/ is no run
        elif is_recording(here):
            found[here] = run_at(root, name_below(root, here))
            folders.clear()
        elif here.name == "profiling" or any(is_input(here / name) for name in names):
            owner = here.parent if here.name == "profiling" and here != root else here
            found.setdefault(owner, Run(name=name_below(root, owner), path=owner, kind="folder"))
            if here.name == "profiling":
                folders.clear()
        if len(here.relative_to(root).parts) >= DEPTH:
            folders.clear()
    return ordered(found), whole


def is_input(path: Path) -> bool:
    own = path.name in OWN_FILES or path.name in ("experiment.json", "analysis.json", "surroundings.json")
    return named_like_input(path) and not own and not path.name.startswith(".")


def ordered(found: dict[Path, Run]) -> list[Run]:
    return sorted(found.values(), key=lambda run: natural_key(Path(run.name)))


def files_of(path: Path) -> Iterator[Path]:
    """Every file of a run that an analysis may read, links included, folders that are links as themselves."""
    if not path.is_dir():
        yield path
        return
    for parent, folders, names in os.walk(path, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ("node_modules",)]
        yield from (Path(parent, name) for name in folders if Path(parent, name).is_symlink())
        yield from (Path(parent, name) for name in names if not name.startswith(".") and not name.endswith(UNFINISHED))


def links_out(root: Path, run: Run) -> list[Path]:
    """Links within a run that lead out of `root`."""
    return [path for path in files_of(run.path) if path.is_symlink() and not path.resolve().is_relative_to(root)]


def fingerprint(run: Run, *, live: bool = False) -> str:
    """Changes whenever a file of the run does (name, size, time of change), or the code that reads it.

    Of a `live` run the files that are written at every step count by how often their size has doubled, so that its
    traces are not analysed again for each; those of an experiment's trials that have not ended do not count.
    """
    entries: list[tuple[str, int, int]] = []
    written = 0
    going_on = trials_going_on(run.path) if run.kind == "experiment" else frozenset()
    for path in files_of(run.path):
        below = path.relative_to(run.path).parts if path != run.path else (path.name,)
        if below[0] == "trials" and len(below) > 1 and below[1] in going_on:
            continue
        try:
            about = path.stat()
        except OSError:  # gone since, or a link to nothing
            entries.append(("/".join(below), -1, -1))
            continue
        if live and (below[0] in WRITTEN_WHILE_RUNNING or below[0] == "status.json"):
            written += about.st_size if below[0] == "steps" else 0
        else:
            entries.append(("/".join(below), about.st_size, about.st_mtime_ns))
    text = json.dumps([str(run.path), live, written.bit_length(), code_version(), sorted(going_on), sorted(entries)])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def trials_going_on(experiment: Path) -> frozenset[str]:
    """The folders of an experiment's trials that do not say that they have ended."""
    return frozenset(path.name for path in (experiment / "trials").glob("*") if not _has_ended(path))


def _has_ended(recording: Path) -> bool:
    try:
        return read_status(recording).state not in ("planned", "running")
    except InputError:  # it has just begun
        return False


@cache
def code_version() -> str:
    """The version, and of a checkout that is worked on the last change of a module."""
    folders = (Path(harness.__file__).parent, Path(probes.__file__).parent, Path(__file__).parent)
    changed = max(path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*.py"))
    return f"{harness.__version__} {changed}"
