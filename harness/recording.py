"""A recording on disk: its layout, its schema, reading and writing it. Free of torch.

    <dir>/manifest.json                 what ran: schema_version, mode, config, world_size, recorded_ranks, mesh, …
    <dir>/status.json                   state (see `STATES`) and the reason
    <dir>/ranks/rank{r}.json            one rank's host, pid, device, environment, warnings and end state
    <dir>/steps/rank{r}.jsonl           one line per step
    <dir>/profiling/traces/iteration_{n}/rank{r}_trace.json.gz               n = completed steps
    <dir>/profiling/memory_snapshot/step_{n:012d}[_exit]/{r:06d}_step_{n}.pickle
    <dir>/logs/rank{r}.log              stdout and stderr, where a launcher captured them

A recording can be read while it is written, after a crash, and with ranks missing: what is not there is stated in
`Recording.errors` and `Recording.missing_ranks`. Every file but the step rows is replaced in one piece; files that
end in `.tmp` are unfinished and belong to nobody who reads.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from harness.errors import InputError
from harness.schema import checked_manifest, checked_rank, checked_rows, missing_rank_errors

SCHEMA_VERSION = 1

State = Literal["planned", "running", "complete", "failed", "invalid"]
STATES: tuple[State, ...] = get_args(State)

Mode = Literal["real", "cpu", "shared-gpu", "rehearsal", "imported"]
MODES: tuple[Mode, ...] = get_args(Mode)

# Set by a launcher: it owns status.json, since it alone sees ranks that are killed.
LAUNCHED_VARIABLE = "MESHSCOPE_LAUNCHED"
# Names, separated by commas, of variables that are recorded besides those that always are.
RECORDED_VARIABLES = "MESHSCOPE_RECORDED_VARIABLES"
# Set by a launcher: the mode that the ranks run in, for a trainer that can rehearse (see `Mode`).
MODE_VARIABLE = "MESHSCOPE_MODE"
# Of a range in traces, with the unit in brackets: what activation checkpointing computes again.
RECOMPUTE_RANGE = "AC::recompute"


class PhaseRow(msgspec.Struct, frozen=True):
    """All passages of one name within a step: host nanoseconds, their number, and the peaks within (bytes)."""

    wall_ns: int
    count: int
    peak_allocated_bytes: int | None
    peak_active_bytes: int | None
    peak_reserved_bytes: int | None
    peak_requested_bytes: int | None


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of steps/rank{r}.jsonl; docs/recording.md says what each field means and when it is null.

    Written as a Struct, which is encoded without a dictionary on the way; read as a plain object, since a recording
    may come from another version.
    """

    step: int
    started_unix_ns: int
    wall_ns: int | None
    wall_source: str
    tokens: int | None
    tokens_per_s: float | None
    tflops_per_s: float | None
    mfu_pct: float | None
    mfu_peak_source: str | None
    loss: float | None
    grad_norm: float | None
    scalars: dict[str, float | None] | msgspec.UnsetType = msgspec.UNSET
    memory_source: str
    allocated_bytes: int | None
    active_bytes: int | None
    reserved_bytes: int | None
    requested_bytes: int | None
    peak_allocated_bytes: int | None
    peak_active_bytes: int | None
    peak_reserved_bytes: int | None
    peak_requested_bytes: int | None
    alloc_retries: int | None
    ooms: int | None
    phases: dict[str, PhaseRow]
    nvml_process_bytes: int | None
    nvml_device_bytes: int | None
    rss_bytes: int | None
    peak_rss_bytes: int | None
    tags: list[str]
    peak_composition: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


def manifest_path(directory: Path) -> Path:
    return directory / "manifest.json"


def status_path(directory: Path) -> Path:
    return directory / "status.json"


def rank_path(directory: Path, rank: int) -> Path:
    return directory / "ranks" / f"rank{rank}.json"


def steps_path(directory: Path, rank: int) -> Path:
    return directory / "steps" / f"rank{rank}.jsonl"


def log_path(directory: Path, rank: int) -> Path:
    return directory / "logs" / f"rank{rank}.log"


def trace_path(directory: Path, completed_steps: int, rank: int) -> Path:
    """torchtitan's name; the folder counts completed steps, so `iteration_6` ends with `ProfilerStep#5`."""
    return directory / "profiling" / "traces" / f"iteration_{completed_steps}" / f"rank{rank}_trace.json.gz"


def snapshot_path(directory: Path, completed_steps: int, rank: int, *, at_exit: bool = False) -> Path:
    """torchtitan's name; `at_exit` is the dump after an exception, in a folder that ends in `_exit`."""
    folder = f"step_{completed_steps:012d}" + ("_exit" if at_exit else "")
    return directory / "profiling" / "memory_snapshot" / folder / f"{rank:06d}_step_{completed_steps}.pickle"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` when the block ends well and vanishes when it does not.

    A link stays one, and what it names is replaced. A pipe or a device (`/dev/null`, which root could replace) is
    written to instead.
    """
    if path.is_symlink():
        path = path.resolve()
    if path.exists() and not path.is_file() and not path.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder) / path.name
            yield whole
            path.write_bytes(whole.read_bytes())
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Ranks of other hosts, which may have the same process id, write into the same folder.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes one JSON object atomically; NaN and infinity, which JSON lacks, raise ValueError."""
    text = json.dumps(value, indent=1, allow_nan=False)
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object; raises `InputError` if it is missing or is not one."""
    try:
        value: dict[str, Any] = msgspec.json.decode(_read_file(path), type=dict[str, Any])
    except FileNotFoundError:
        raise InputError(path, "is missing") from None
    except OSError as error:
        raise InputError(path, f"cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise InputError(path, f"is not a JSON object: {error}") from None
    except RecursionError:
        raise InputError(path, "is nested too deeply to be read") from None
    return value


def _read_file(path: Path) -> bytes:
    """Raises OSError, and `InputError` for a pipe or a device, which have no end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise InputError(path, "is not a regular file")
    return path.read_bytes()


def merge_manifest(directory: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Adds `values` to manifest.json and returns the whole.

    A launcher writes what it knows before the start and rank 0 completes it, so keys that are there stay unless
    they are given again, and None never replaces a value. Raises `InputError` if the file there is unreadable.
    """
    path = manifest_path(directory)
    manifest = read_json(path) if path.exists() else {}
    for name, value in values.items():
        if value is not None or name not in manifest:
            manifest[name] = value
    manifest["schema_version"] = SCHEMA_VERSION
    write_json(path, manifest)
    return manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """How the run stands; `reason` is one line, always there for failed and invalid."""

    state: State
    reason: str | None = None
    updated_unix_ns: int = 0


def write_status(directory: Path, state: State, reason: str | None = None) -> Status:
    """Replaces status.json; `failed` and `invalid` need a reason (ValueError without)."""
    if state in ("failed", "invalid") and not reason:
        raise ValueError(f"status {state} needs a reason")
    status = Status(state=state, reason=reason, updated_unix_ns=time.time_ns())
    write_json(status_path(directory), {"schema_version": SCHEMA_VERSION, **msgspec.to_builtins(status)})
    return status


def read_status(directory: Path) -> Status:
    """Raises `InputError` if status.json is missing or holds no known state."""
    path = status_path(directory)
    try:
        return msgspec.convert(read_json(path), Status)
    except msgspec.ValidationError as error:
        raise InputError(path, f"is not a status: {error}") from None


def read_jsonl(path: Path) -> tuple[list[dict[str, Any]], list[InputError]]:
    """The objects of a file with one per line, and what could not be read.

    A last line without its end is what a writer leaves that is killed, or is still writing: it is left out and
    reported at its offset, as is any other line that is not a JSON object.
    """
    try:
        data = _read_file(path)
    except InputError as error:
        return [], [error]
    except FileNotFoundError:
        return [], [InputError(path, "is missing")]
    except OSError as error:
        return [], [InputError(path, f"cannot be read: {error.strerror}")]

    rows: list[dict[str, Any]] = []
    errors: list[InputError] = []
    decoder = msgspec.json.Decoder(dict[str, Any])
    offset = 0
    for line in data.splitlines(keepends=True):
        try:
            if line.strip():
                rows.append(decoder.decode(line))
        except (msgspec.DecodeError, RecursionError) as error:
            torn = not line.endswith(b"\n")
            reason = "the last line is torn and left out" if torn else f"a line is not a JSON object: {error}"
            errors.append(InputError(path, reason, offset))
        offset += len(line)
    return rows, errors


def read_ranks(directory: Path) -> tuple[dict[int, dict[str, Any]], list[InputError]]:
    """Rank -> its ranks/rank{r}.json, and those that could not be read."""
    ranks: dict[int, dict[str, Any]] = {}
    errors: list[InputError] = []
    for rank, path in _by_rank(directory / "ranks", r"rank(\d{1,6})\.json"):
        try:
            ranks[rank], wrong = checked_rank(path, read_json(path))
            errors += wrong
        except InputError as error:
            errors.append(error)
    return ranks, errors


@dataclass(kw_only=True, slots=True)
class Recording:
    """What a recording holds at this moment.

    `steps` maps a rank to its rows in the order written, `ranks` a rank to its ranks/rank{r}.json.
    `missing_ranks` are those that should record (`recorded_ranks` of the manifest) and have no step row.
    """

    directory: Path
    manifest: dict[str, Any]
    status: Status | None
    steps: dict[int, list[dict[str, Any]]]
    ranks: dict[int, dict[str, Any]]
    missing_ranks: list[int]
    errors: list[InputError] = field(default_factory=list)

    @property
    def mode(self) -> str | None:
        return self.manifest.get("mode")

    @property
    def failed_ranks(self) -> dict[int, str]:
        """Rank -> the line of the exception that ended it."""
        return {r: str(d.get("exception")) for r, d in self.ranks.items() if d.get("end_state") == "failed"}

    @property
    def unfinished_ranks(self) -> list[int]:
        """Ranks that started and never said that they ended: still running, or killed."""
        return sorted(r for r, d in self.ranks.items() if d.get("end_state") is None)


def is_recording(directory: Path) -> bool:
    return manifest_path(directory).is_file() or (directory / "steps").is_dir()


def read_recording(directory: str | Path) -> Recording:
    """Everything but traces and snapshots; complete, running, crashed and partial recordings alike.

    Raises `InputError` if `directory` is no recording, or was written by a later version than this one.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise InputError(directory, "is not a folder")
    if not is_recording(directory):
        raise InputError(directory, "is not a recording: it has neither manifest.json nor steps/")

    errors: list[InputError] = []
    manifest: dict[str, Any] = {}
    status: Status | None = None
    try:
        manifest = read_json(manifest_path(directory))
    except InputError as error:
        errors.append(error)
    manifest, wrong = checked_manifest(manifest_path(directory), manifest)
    errors += wrong
    version = manifest.get("schema_version", SCHEMA_VERSION)
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise InputError(
            manifest_path(directory),
            f"has schema_version {version}; this meshscope reads up to {SCHEMA_VERSION}: update it",
        )
    try:
        status = read_status(directory)
    except InputError as error:
        errors.append(error)

    steps: dict[int, list[dict[str, Any]]] = {}
    for rank, path in _by_rank(directory / "steps", r"rank(\d{1,6})\.jsonl"):
        rows, row_errors = read_jsonl(path)
        steps[rank], wrong = checked_rows(path, rows)
        errors += row_errors + wrong
    ranks, rank_errors = read_ranks(directory)
    errors += rank_errors

    expected = manifest.get("recorded_ranks") or range(manifest.get("world_size") or 0)
    missing = sorted(rank for rank in expected if not steps.get(rank))
    errors += missing_rank_errors(missing, lambda rank: steps_path(directory, rank))
    return Recording(
        directory=directory,
        manifest=manifest,
        status=status,
        steps=steps,
        ranks=ranks,
        missing_ranks=missing,
        errors=errors,
    )


def _by_rank(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    found = [(re.fullmatch(pattern, path.name), path) for path in folder.iterdir()]
    return sorted((int(match.group(1)), path) for match, path in found if match)
