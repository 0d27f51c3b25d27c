"""Everything `meshscope whatif` says, as one object: see `Analysis`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.allocator import Settings
from harness.allocator.conf import ConfError, describe
from harness.errors import InputError, UsageError
from harness.memory.replay import Timeline, follow_blocks, history_state, replay
from harness.memory.snapshot import Device, Snapshot, read_snapshot
from harness.sources import Sources
from harness.text import counted, size
from harness.whatif.fidelity import Fidelity, RecordedDriver, measure_fidelity
from harness.whatif.measure import Outcome, measure
from harness.whatif.recorded import recorded_settings
from harness.whatif.replay import Case, OutOfMemory, lowest_address, releases
from harness.whatif.start import ContradictionError, find_start

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of every snapshot: `confs` as given and read, the process's memory (bytes), and whether pending
    blocks shall be reusable at once."""

    confs: Sequence[tuple[str, Settings]] = ()
    limit_bytes: int | None = None
    without_pending: bool = False

    def __post_init__(self) -> None:
        """Raises UsageError for a fraction of an unknown memory."""
        for text, settings in self.confs:
            if settings.memory_fraction != 1 and self.limit_bytes is None:
                raise UsageError(
                    f"--alloc-conf {text}: a fraction of how much? --limit-gib says what memory the GPU has, "
                    "which a snapshot does not"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case and what came of it. `start`: `empty`, `recorded` or `afresh`, what its history began from; `against`:
    the row that its peak is compared with."""

    alloc_conf: str
    start: str
    outcome: Outcome
    against: int | None = None
    change_pct: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAnswer:
    """One device: `rows[0]` is the recording itself on the model, `peak_reserved_bytes` what it recorded."""

    index: int
    history: str
    base_reserved_bytes: int
    peak_reserved_bytes: int
    recorded: Settings
    fidelity: Fidelity
    rows: list[Row]
    time_us: Sequence[int] | None
    notes: list[str]


@dataclass(slots=True)
class Analysis:
    """What was read and replayed of a path: per snapshot (rank, file, devices)."""

    mode: str
    files: list[tuple[int | None, str, list[DeviceAnswer]]] = field(default_factory=list)
    errors: list[InputError] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The `whatif --json` object."""
        return {
            "schema_version": SCHEMA_VERSION,
            "mode": self.mode,
            "files": [
                {"rank": rank, "file": file, "devices": [_device_json(device) for device in devices]}
                for rank, file, devices in self.files
            ],
            "errors": [error.to_json() for error in self.errors],
        }


def analyse_sources(sources: Sources, question: Question) -> Analysis:
    """Every snapshot of `sources`, replayed; what cannot be is in `errors`, nothing is raised for it."""
    analysis = Analysis(sources.mode, errors=list(sources.errors))
    if not sources.snapshots:
        analysis.errors.append(
            InputError(sources.root, "holds no allocator snapshot (.pickle) to replay: a run on GPUs has one")
        )
    for source in sources.snapshots:
        try:
            answers = answer(read_snapshot(source.path), question)
        except InputError as error:
            analysis.errors.append(error)
        except UNANSWERABLE as error:
            analysis.errors.append(InputError(source.path, str(error)))
        else:
            analysis.files.append((source.rank, str(source.path), answers))
    return analysis


class NothingRecordedError(Exception):
    """A snapshot of segments only."""


UNANSWERABLE = (ContradictionError, ConfError, NothingRecordedError)


def answer(snapshot: Snapshot, question: Question) -> list[DeviceAnswer]:
    """Every device of `snapshot` that has a history, replayed. Raises one of `UNANSWERABLE`."""
    recorded = recorded_settings(snapshot)
    timelines = [(device, replay(device)) for device in snapshot.devices]
    answers = [_answer(device, timeline, recorded, question) for device, timeline in timelines if timeline is not None]
    if not answers:
        raise NothingRecordedError(
            "has no history to replay: record it with torch.cuda.memory._record_memory_history() or meshscope run"
        )
    return answers


def _answer(device: Device, timeline: Timeline, recorded: Settings, question: Question) -> DeviceAnswer:
    start = find_start(device)
    below = lowest_address(device, start)
    itself = Case(settings=recorded)
    if recorded.memory_fraction != 1:  # it had a limit, of a memory that only the question may state
        itself = replace(itself, limit_bytes=_allowed(recorded, question.limit_bytes))
    fidelity = measure_fidelity(device, timeline, start, itself)
    baseline = measure(device, start, recorded, itself, lambda: RecordedDriver(device.history, below))
    populated = bool(start.ranges)
    rows = [Row(alloc_conf="recorded", start="recorded" if populated else "empty", outcome=baseline)]
    for text, case in _cases(recorded, question, populated=populated):
        # From a populated start only rows laid out afresh compare; the first of them is that of the recorded settings.
        against = min(int(populated), len(rows) - 1)
        base = rows[against].outcome.peak_reserved_bytes
        outcome = measure(device, start, recorded, case)
        change = 100 * (outcome.peak_reserved_bytes - base) / base if base else None
        begins = "afresh" if case.afresh else "empty"
        rows.append(Row(alloc_conf=text, start=begins, outcome=outcome, against=against, change_pct=change))
    lives = follow_blocks(device)
    return DeviceAnswer(
        index=device.index,
        history=history_state(timeline, lives),
        base_reserved_bytes=timeline.base_reserved,
        peak_reserved_bytes=timeline.peak("reserved").bytes,
        recorded=recorded,
        fidelity=fidelity,
        rows=rows,
        time_us=device.history.time_us,
        notes=list(_notes(device, fidelity, rows, question)),
    )


def _cases(recorded: Settings, question: Question, *, populated: bool) -> Iterator[tuple[str, Case]]:
    """The recorded settings as far as they make a comparison, then those asked for."""
    limit, without_pending = question.limit_bytes, question.without_pending
    if limit is not None or (populated and (question.confs or without_pending)):
        yield "recorded", Case(settings=recorded, limit_bytes=_allowed(recorded, limit), afresh=populated)
    asked = [("recorded", recorded)] if without_pending else []
    for text, settings in [*asked, *question.confs]:
        yield (
            text,
            Case(
                settings=settings,
                limit_bytes=_allowed(settings, limit),
                without_pending=without_pending,
                afresh=populated,
            ),
        )


def _allowed(settings: Settings, limit_bytes: int | None) -> int | None:
    return None if limit_bytes is None else int(settings.memory_fraction * limit_bytes)


def _notes(device: Device, fidelity: Fidelity, rows: Sequence[Row], question: Question) -> Iterator[str]:
    if not fidelity.exact:
        yield (
            f"the model does not reproduce this recording under its own settings: {fidelity.same_address:,} of "
            f"{fidelity.allocations:,} addresses, {fidelity.same_calls:,} of "
            f"{counted(fidelity.calls, 'call')} to the driver, reserved off by up to "
            f"{size(fidelity.reserved_error_bytes)}. It was made by another allocator, or under a limit (--limit-gib): "
            "take every row as an estimate"
        )
    if rows[-1].start == "afresh":
        yield (
            "afresh: the blocks from before the history are allocated anew, and what was cached besides is gone. Row 1 "
            "against row 0 is what not knowing the beginning costs, and changes smaller than that are undecided; a "
            "history from the start of the process has all"
        )
    by_request = [release for release in releases(device.history) if not release.by_user]
    if by_request and question.limit_bytes is None:
        yield (
            f"the recording gave cached memory back {counted(len(by_request), 'time')} for want of memory: replayed "
            "as emptying the cache at these moments; --limit-gib replays why"
        )
    if any(settings.garbage_collection_threshold for _, settings in question.confs) and question.limit_bytes is None:
        yield "garbage_collection_threshold: torch collects only where the process has a limit; --limit-gib sets one"
    if any(segment.private_pool for segment in device.segments):
        yield "private pools (CUDA graphs, MemPool) are replayed as one pool that gives nothing back"


def _device_json(answer: DeviceAnswer) -> dict[str, Any]:
    fidelity = answer.fidelity
    return {
        "device": answer.index,
        "history": answer.history,
        "base_reserved_bytes": answer.base_reserved_bytes,
        "recorded_peak_reserved_bytes": answer.peak_reserved_bytes,
        "recorded_alloc_conf": describe(answer.recorded),
        "fidelity": {
            "exact": fidelity.exact,
            "allocations": fidelity.allocations,
            "same_address": fidelity.same_address,
            "driver_calls": fidelity.calls,
            "same_driver_calls": fidelity.same_calls,
            "reserved_error_bytes": fidelity.reserved_error_bytes,
        },
        "cases": [_row_json(row, answer.time_us) for row in answer.rows],
        "notes": answer.notes,
    }


def _row_json(row: Row, time_us: Sequence[int] | None) -> dict[str, Any]:
    outcome = row.outcome
    case = outcome.case
    return {
        "alloc_conf": row.alloc_conf,
        "settings": describe(case.settings),
        "start": row.start,
        "limit_bytes": case.limit_bytes,
        "without_pending": case.without_pending,
        "against": row.against,
        "change_pct": row.change_pct,
        "peak_reserved_bytes": outcome.peak_reserved_bytes,
        "peak_allocated_bytes": outcome.peak_allocated_bytes,
        "final_reserved_bytes": outcome.final_reserved_bytes,
        "at_peak": {
            "event": None if outcome.index < 0 else outcome.index,
            "time_us": None if outcome.index < 0 or time_us is None else time_us[outcome.index],
            "allocated_bytes": outcome.allocated_bytes,
            "unused_bytes": outcome.unused_bytes,
            "pools": [
                {
                    "pool": pool.pool,
                    "stream": pool.stream,
                    "reserved_bytes": pool.reserved_bytes,
                    "allocated_bytes": pool.allocated_bytes,
                    "pending_bytes": pool.pending_bytes,
                }
                for pool in outcome.pools
            ],
        },
        "device_allocations": outcome.device_allocations,
        "device_frees": outcome.device_frees,
        "retries": outcome.retries,
        "out_of_memory": None if outcome.out_of_memory is None else _oom_json(outcome.out_of_memory),
    }


def _oom_json(found: OutOfMemory) -> dict[str, Any]:
    return {
        "event": found.index,
        "site": found.site,
        "requested_bytes": found.requested_bytes,
        "reserved_bytes": found.reserved_bytes,
        "allocated_bytes": found.allocated_bytes,
        "largest_free_bytes": found.largest_free_bytes,
    }
