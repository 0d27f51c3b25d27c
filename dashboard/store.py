"""Results on disk: each analysed run is a folder named by its fingerprint, each extract of it a folder within.

    <cache>/<fingerprint>/<extract>/values.json        what is not an array
    <cache>/<fingerprint>/<extract>/<column>.npy       arrays, read as memory maps
    <cache>/<fingerprint>/traces.json                  the paths of the traces that are read, in their order
    <cache>/<fingerprint>/lanes/<n>/                   as an extract: `lanes.index.lane_index` of the n-th capture
    <cache>/<fingerprint>-after-<n>/metrics/           as an extract: a trial's figures without its first n steps
    <cache>/<fingerprint>/replays/<hash>/answer/       as an extract: a snapshot replayed (`dashboard.replays`)
    <cache>/<fingerprint>/failed.json                  instead, where nothing could be read: the error's JSON

The cache is the user's own, never beside what is read, which may be anybody's; arrays are read without pickle.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

CACHE_VARIABLE = "MESHSCOPE_DASHBOARD_CACHE"
KEPT_BYTES = 4 * 2**30
FAILED = "failed.json"
TRACES = "traces.json"
LANES = "lanes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Extract:
    """What a page needs of a run: `values` survive JSON (keys become text, NaN null), `columns` are plain arrays,
    memory-mapped and read-only when they come from disk. Column names are file names: letters, digits, `_`, `.`."""

    values: Any = None
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def default_folder() -> Path:
    """The user's cache folder."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshscope" / "dashboard"


def save(folder: Path, extract: Extract) -> None:
    folder.mkdir(parents=True)
    (folder / "values.json").write_bytes(msgspec.json.encode(extract.values))
    for name, column in extract.columns.items():
        np.save(folder / f"{name}.npy", np.ascontiguousarray(column), allow_pickle=False)


def load(folder: Path) -> Extract:
    columns = {path.stem: read_column(path) for path in sorted(folder.glob("*.npy"))}
    return Extract(values=msgspec.json.decode((folder / "values.json").read_bytes()), columns=columns)


def read_column(path: Path) -> NDArray[Any]:
    column: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return column


def new_folder(cache: Path) -> Path:
    """An unfinished folder, which `publish` gives its name."""
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Path(tempfile.mkdtemp(prefix="new-", dir=cache))


def publish(folder: Path, target: Path) -> None:
    """The first to finish wins: the same fingerprint means the same content."""
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(folder)


def touch(folder: Path) -> None:
    os.utime(folder)


def prune(cache: Path, *, kept_bytes: int = KEPT_BYTES) -> None:
    """Removes the results that were used longest ago, beyond `kept_bytes` in all."""
    folders = sorted((path for path in cache.iterdir() if path.is_dir()), key=lambda path: -path.stat().st_mtime)
    total = 0
    for folder in folders:
        total += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if total > kept_bytes:
            shutil.rmtree(folder, ignore_errors=True)
