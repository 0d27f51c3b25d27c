"""Finding traces and allocator snapshots: a file, a recording, or any folder another tool wrote.

What a file is, is decided by its content. A folder is searched recursively, without following links to folders
and without hidden ones (caches). Our own recording, torchtitan's dump folder (the same names), HTA's
`rank-R*.json.gz`, `torch.profiler.tensorboard_trace_handler`'s `*.pt.trace.json[.gz]` and bare files are all read
in place.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness.errors import EXIT_FAILED, EXIT_OK, EXIT_PARTIAL, InputError
from harness.text import one_line

GZIP_MAGIC = b"\x1f\x8b"
UTF8_BOM = b"\xef\xbb\xbf"
SNIFF_BYTES = 4096

TRACE_NAME = re.compile(r"\.json(\.gz)?$", re.IGNORECASE)
SNAPSHOT_NAME = re.compile(r"\.(pickle|pkl)(\.gz)?$", re.IGNORECASE)
# What a recording, a trainer or an experiment keeps beside its traces; these names are never taken for input.
OWN_FILES = frozenset(
    f"{name}.json" for name in ("manifest", "status", "config", "surroundings", "experiment", "analysis", "build")
)
OWN_FOLDERS = frozenset({"__pycache__", "logs", "node_modules"})
RECORDING_FOLDERS = frozenset({"ranks", "steps"})
EXPERIMENT, EXPERIMENT_FOLDERS = "experiment.json", frozenset({"queues"})
UNFINISHED = ".tmp"

RANK_IN_NAME = (
    re.compile(r"(?:^|[^a-z])rank[-_ ]?(\d{1,7})(?!\d)", re.IGNORECASE),
    re.compile(r"^(\d{6})_step_\d+\.", re.IGNORECASE),
    re.compile(r"^worker[-_]?(\d{1,7})(?!\d)", re.IGNORECASE),
)
ITERATION_IN_NAME = re.compile(r"(?:^|_)(?:iteration|step)_(\d{1,15})(?!\d)", re.IGNORECASE)

Kind = Literal["trace", "snapshot"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One input file. `rank` and `iteration` are what its name or its folder's says, None where they say nothing;
    `iteration` counts completed steps. The rank a trace itself states goes before this one."""

    path: Path
    rank: int | None
    iteration: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """What a path holds, in natural order of the names; `errors` are the candidates that are neither.

    `mode` and `mesh` (a mesh axis, named as torch describes its group → rank lists) are the recording's own.
    """

    root: Path
    recording: bool
    mode: str = "imported"
    mesh: dict[str, list[list[int]]] = field(default_factory=dict)
    traces: list[SourceFile] = field(default_factory=list)
    snapshots: list[SourceFile] = field(default_factory=list)
    errors: list[InputError] = field(default_factory=list)


def find_sources(path: Path) -> Sources:
    """The traces and snapshots at `path`, a file or a folder.

    Raises InputError when the path does not exist, cannot be read, is a file of another kind, or is a folder
    without any candidate. A folder whose candidates are all unreadable is returned with its `errors`.
    """
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        raise InputError(path, reason_of(error)) from error
    if not is_folder:
        kind = kind_of(path)
        file = source_file(path)
        return Sources(
            root=path,
            recording=False,
            traces=[file] if kind == "trace" else [],
            snapshots=[file] if kind == "snapshot" else [],
        )
    manifest = path / "manifest.json"
    found = Sources(root=path, recording=manifest.is_file(), mode=mode_of(manifest), mesh=mesh_of(manifest))
    for candidate in candidates(path, found.errors):
        try:
            kind = kind_of(candidate)
        except InputError as error:
            if named_like_input(candidate):
                found.errors.append(error)
            continue
        if kind == "snapshot":
            found.snapshots.append(source_file(candidate))
        else:
            found.traces.append(source_file(candidate))
    if not (found.traces or found.snapshots or found.errors):
        raise InputError(path, "holds no trace (.json, .json.gz) and no memory snapshot (.pickle, .pickle.gz)")
    return found


def report_errors(command: str, errors: Sequence[InputError], *, read: int) -> int:
    """Says each error on one line of stderr and returns the exit code of a command that read `read` files:
    0 without errors, 3 when nothing was readable, else 4 (part of the input is missing)."""
    for error in errors:
        print(f"meshscope {command}: error: {one_line(str(error))}", file=sys.stderr)
    if not read:
        return EXIT_FAILED
    return EXIT_PARTIAL if errors else EXIT_OK


def kind_of(path: Path) -> Kind:
    """What a file holds, by its first bytes; only a name like a snapshot's settles it before them.

    Raises InputError with one reason: empty, unreadable, no regular file, an HTML page, a git-lfs pointer, …
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(path, "is not a regular file")
        with path.open("rb") as file:
            start = file.read(SNIFF_BYTES)
    except OSError as error:
        raise InputError(path, reason_of(error)) from error
    if not start:
        raise InputError(path, "is empty (0 bytes)")
    if start.startswith(b"version https://git-lfs"):
        raise InputError(path, "is a git-lfs pointer, not the file itself (git lfs pull fetches it)")
    if SNAPSHOT_NAME.search(path.name):
        return "snapshot"
    if start.startswith(GZIP_MAGIC):
        try:
            start = zlib.decompressobj(wbits=31).decompress(start, SNIFF_BYTES)
        except zlib.error as error:
            raise InputError(path, f"is damaged gzip ({error})", 0) from error
    if re.match(rb"\x80[\x02-\x05]", start):
        return "snapshot"
    text = start.removeprefix(UTF8_BOM).lstrip()
    # A gzip cut within its first block says nothing yet; the reader names the place where it ends.
    if text.startswith((b"{", b"[")) or not start:
        return "trace"
    if re.match(rb"<(!doctype|html|\?xml)", text, re.IGNORECASE):
        raise InputError(path, "is an HTML or XML page, not a trace")
    raise InputError(path, "is neither JSON nor a pickle")


def candidates(folder: Path, errors: list[InputError]) -> Iterator[Path]:
    """Files that may be input, by name or content, in natural order; folders that cannot be listed go to `errors`."""

    def cannot_list(error: OSError) -> None:
        errors.append(InputError(error.filename or folder, reason_of(error)))

    found: list[Path] = []
    try:
        for parent, folders, names in os.walk(folder, onerror=cannot_list, followlinks=False):
            own = OWN_FOLDERS | (RECORDING_FOLDERS if "manifest.json" in names else frozenset())
            own |= EXPERIMENT_FOLDERS if EXPERIMENT in names else frozenset()
            folders[:] = [name for name in folders if not name.startswith(".") and name not in own]
            names = [name for name in names if not name.startswith(".") and name not in OWN_FILES]
            paths = (Path(parent, name) for name in names if not name.endswith(UNFINISHED))
            found += [path for path in paths if named_like_input(path) or looks_like_input(path)]
    except RecursionError:  # os.walk recurses before Python 3.12
        errors.append(InputError(folder, "holds folders nested too deeply: the rest of it is left out"))
    return iter(sorted(found, key=lambda path: natural_key(path.relative_to(folder))))


def named_like_input(path: Path) -> bool:
    return bool(TRACE_NAME.search(path.name) or SNAPSHOT_NAME.search(path.name))


def looks_like_input(path: Path) -> bool:
    """Whether a file with another extension is a trace or a snapshot beyond doubt."""
    try:
        kind = kind_of(path)
        with path.open("rb") as file:
            start = file.read(SNIFF_BYTES)
    except (InputError, OSError):
        return False
    if kind == "snapshot":
        return any(key in start for key in (b"segments", b"device_traces", b"total_size"))
    if start.startswith(GZIP_MAGIC):
        start = zlib.decompressobj(wbits=31).decompress(start, SNIFF_BYTES)
    return any(key in start for key in (b'"traceEvents"', b'"schemaVersion"', b'"ph"'))


def source_file(path: Path) -> SourceFile:
    return SourceFile(path=path, rank=rank_of(path), iteration=iteration_of(path))


def rank_of(path: Path) -> int | None:
    """The rank in a file's name (`rank3_trace.json.gz`, `rank-3.json.gz`, `000003_step_10.pickle`,
    `worker3.<time>.pt.trace.json`) or in its folder's, else None."""
    for name in (path.name, path.parent.name):
        for pattern in RANK_IN_NAME:
            if match := pattern.search(name):
                return int(match[1])
    return None


def iteration_of(path: Path) -> int | None:
    """N of `iteration_N` or `step_N` in a file's name or its folder's, else None."""
    for name in (path.name, path.parent.name):
        if match := ITERATION_IN_NAME.search(name):
            return int(match[1])
    return None


def mode_of(manifest: Path) -> str:
    """The mode a recording's manifest states; "imported" where there is none."""
    mode = stated_by(manifest).get("mode")
    return mode if isinstance(mode, str) else "imported"


def mesh_of(manifest: Path) -> dict[str, list[list[int]]]:
    """Mesh axes of a recording's manifest with their rank lists, named `mesh_<axis>` as torch's groups are."""
    mesh = stated_by(manifest).get("mesh")
    found = {}
    for axis, ranks in mesh.items() if isinstance(mesh, dict) else ():
        lists = ranks if isinstance(ranks, list) and all(isinstance(one, list) for one in ranks) else [ranks]
        try:
            found[f"mesh_{axis.removeprefix('mesh_')}"] = msgspec.convert(lists, list[list[int]])
        except msgspec.ValidationError:
            continue
    return found


def stated_by(manifest: Path) -> dict[str, Any]:
    """What a manifest says; nothing where there is none to read (reading the recording itself reports that)."""
    try:
        # A pipe of that name would have no end.
        stated = msgspec.json.decode(manifest.read_bytes()) if manifest.is_file() else None
    except (OSError, msgspec.DecodeError, RecursionError):
        return {}
    return stated if isinstance(stated, dict) else {}


def natural_key(path: Path) -> list[tuple[int, str]]:
    """Sort key that puts rank 2 before rank 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def reason_of(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()
