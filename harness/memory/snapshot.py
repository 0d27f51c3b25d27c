"""An allocator snapshot, checked and turned into columns: what the final segments hold and what each device did.

Reads what `torch.cuda.memory._snapshot()` and `_dump_snapshot()` write (a dict with `segments` and
`device_traces`) and the bare list of `torch.cuda.memory_snapshot()` (segments only).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.memory.unpickle import load_plain_pickle
from harness.text import printable

Frame = dict[str, Any]
Frames = Sequence[Frame]


class Action(IntEnum):
    """What an entry of a device's history records; the members' names are torch's, upper-cased."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    OOM = 7
    SNAPSHOT = 8
    USER_DEFINED = 9
    UNKNOWN = 10


_ACTIONS = {action.name.lower(): int(action) for action in Action if action is not Action.UNKNOWN}
_NEEDS_NO_ADDRESS = frozenset({Action.OOM, Action.SNAPSHOT, Action.USER_DEFINED, Action.UNKNOWN})
PENDING_STATES = ("active_pending_free", "active_awaiting_free")
_STATES = ("active_allocated", "inactive", *PENDING_STATES)
_LIMIT = 1 << 63

# What our recorder adds to a snapshot: which storages hold parameters, gradients, optimizer states and buffers.
LABELS_KEY = "meshscope_labels"


@dataclass(slots=True)
class Block:
    """A block of a final segment. `size` is rounded, `requested_size` what was asked for (bytes)."""

    address: int
    size: int
    requested_size: int
    state: str
    stream: int
    frames: Frames


@dataclass(slots=True)
class Segment:
    """A piece of memory the allocator holds from the driver at the end (sizes in bytes, rounded); `small`: of the pool
    for requests up to 1 MiB."""

    address: int
    stream: int
    total_size: int
    allocated_size: int
    active_size: int
    expandable: bool
    private_pool: bool
    small: bool
    blocks: list[Block]


@dataclass(slots=True)
class History:
    """The recorded events of one device, oldest first, one list per column.

    `size` is in requested bytes for allocations and frees, real bytes for segments. `time_us` is None when any
    event has no time.
    """

    action: list[int] = field(default_factory=list)
    address: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    time_us: list[int] | None = field(default_factory=list)
    frames: list[Frames] = field(default_factory=list)
    metadata: list[str] = field(default_factory=list)
    device_free: dict[int, int] = field(default_factory=dict)
    unknown_actions: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True, slots=True)
class Holder:
    """What held a storage when the snapshot was made, as our recorder wrote it: `category` (parameter, gradient,
    optimizer_state, buffer) and the storage's address and size (bytes)."""

    address: int
    size: int
    category: str
    name: str


@dataclass(slots=True)
class Device:
    """One device of a snapshot: its final segments and its history (empty if none was recorded).

    `holders` are in the order of their addresses; `annotations` are those of the whole snapshot.
    """

    index: int
    segments: list[Segment]
    history: History
    holders: list[Holder] = field(default_factory=list)
    annotations: list[Annotation] = field(default_factory=list)

    def blocks(self) -> Iterator[Block]:
        for segment in self.segments:
            yield from segment.blocks


@dataclass(frozen=True, slots=True)
class Annotation:
    """An edge of a `record_function` range; `start` tells which."""

    name: str
    start: bool
    device: int | None
    time_us: int


@dataclass(slots=True)
class Snapshot:
    """A whole snapshot file; `devices` holds only those with segments or events, `settings` what torch wrote of its
    allocator's (nothing before 2.0)."""

    devices: list[Device]
    annotations: list[Annotation]
    settings: dict[str, Any] = field(default_factory=dict)


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot in `path`. Raises InputError, naming the place, if it cannot be read or is none."""
    content = load_plain_pickle(path)
    try:
        return parse_snapshot(content)
    except MalformedSnapshotError as error:
        raise InputError(path, f"not an allocator snapshot: {error}") from error


class MalformedSnapshotError(Exception):
    """The content is not what an allocator writes; the message names where."""


def parse_snapshot(content: Any) -> Snapshot:
    """`content` as a Snapshot; raises `MalformedSnapshotError` (see `read_snapshot`) where it is something else."""
    if isinstance(content, list):
        content = {"segments": content}
    if not isinstance(content, dict):
        raise MalformedSnapshotError(f"a {type(content).__name__} instead of a dict or a list of segments")
    if "segments" not in content:
        raise MalformedSnapshotError("no 'segments' key")
    segments: dict[int, list[Segment]] = {}
    for where, item in _items(content["segments"], "segments"):
        device = _integer(item, "device", where, default=0)
        segments.setdefault(device, []).append(_segment(item, where))
    histories: dict[int, History] = {}
    traces = content.get("device_traces", [])
    if not isinstance(traces, list | tuple):
        raise MalformedSnapshotError("device_traces is not a list")
    for device, trace in enumerate(traces):
        if trace:
            histories[device] = _history(trace, f"device_traces[{device}]")
    holders = _holders(content.get(LABELS_KEY) or [])
    annotations = _annotations(content.get("external_annotations") or [])
    devices = [
        Device(index, segments.get(index, []), histories.get(index) or History(), holders.get(index, []), annotations)
        for index in sorted(segments.keys() | histories.keys())
    ]
    settings = content.get("allocator_settings")
    return Snapshot(devices, annotations, settings if isinstance(settings, dict) else {})


def _items(value: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(value, list | tuple):
        raise MalformedSnapshotError(f"{where} is not a list")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise MalformedSnapshotError(f"{where}[{index}] is not a dict")
        yield f"{where}[{index}]", item


def _integer(item: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = item.get(key, default)
    if type(value) is not int:
        raise MalformedSnapshotError(f"{where}.{key} is {'missing' if key not in item else 'not an integer'}")
    if not -_LIMIT <= value < 2 * _LIMIT:
        raise MalformedSnapshotError(f"{where}.{key} does not fit 64 bits")
    return value


def _bytes(item: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = _integer(item, key, where, default)
    if not 0 <= value < 1 << 53:  # more than any address space; sums of such sizes still fit 64 bits
        raise MalformedSnapshotError(f"{where}.{key} is {value}, which is no size in bytes")
    return value


def _frames(item: dict[str, Any], where: str) -> Frames:
    frames = item.get("frames") or ()
    if not isinstance(frames, list | tuple):
        raise MalformedSnapshotError(f"{where}.frames is not a list")
    return frames


def _segment(item: dict[str, Any], where: str) -> Segment:
    stream = _integer(item, "stream", where, default=0)
    address = _integer(item, "address", where, default=0)
    blocks = []
    position = address
    for place, block in _items(item.get("blocks"), f"{where}.blocks"):
        size = _bytes(block, "size", place)
        state = block.get("state")
        if not isinstance(state, str) or state not in _STATES:
            said = f"{state[:40]!r}" if isinstance(state, str) else f"a {type(state).__name__}"
            raise MalformedSnapshotError(f"{place}.state is {said}, expected one of {', '.join(_STATES)}")
        # Blocks tile their segment in order; torch wrote no block addresses before 2.1.
        at = _integer(block, "address", place, default=position)
        requested = _bytes(block, "requested_size", place, default=size)
        blocks.append(Block(at, size, requested, state, stream, _frames(block, place)))
        position = at + size
    pool = item.get("segment_pool_id")
    allocated = sum(block.size for block in blocks if block.state == "active_allocated")
    active = sum(block.size for block in blocks if block.state != "inactive")
    return Segment(
        address=address,
        stream=stream,
        total_size=_bytes(item, "total_size", where),
        allocated_size=_bytes(item, "allocated_size", where, default=allocated),
        active_size=_bytes(item, "active_size", where, default=active),
        expandable=item.get("is_expandable") is True,
        private_pool=isinstance(pool, list | tuple) and tuple(pool) != (0, 0),
        small=item.get("segment_type") == "small",
        blocks=blocks,
    )


def _history(trace: Any, where: str) -> History:
    history = History()
    times: list[int] = []
    for index, (place, event) in enumerate(_items(trace, where)):
        name = event.get("action")
        if not isinstance(name, str):
            raise MalformedSnapshotError(f"{place}.action is {'missing' if 'action' not in event else 'not a string'}")
        action = _ACTIONS.get(name, int(Action.UNKNOWN))
        if action == Action.UNKNOWN:
            history.unknown_actions[printable(name[:40])] += 1
        optional = 0 if action in _NEEDS_NO_ADDRESS else None
        history.action.append(action)
        history.size.append(_bytes(event, "size", place, optional))
        history.address.append(_integer(event, "addr", place, optional))
        history.stream.append(_integer(event, "stream", place, 0))
        if event.get("time_us") is not None:
            times.append(_bytes(event, "time_us", place))
        history.frames.append(_frames(event, place))
        metadata = event.get("user_metadata")
        history.metadata.append(metadata if isinstance(metadata, str) else "")
        if action == Action.OOM and "device_free" in event:
            history.device_free[index] = _bytes(event, "device_free", place)
    history.time_us = times if len(times) == len(history) else None
    return history


def _annotations(items: Any) -> list[Annotation]:
    annotations = []
    for where, item in _items(items, "external_annotations"):
        name, stage = item.get("name"), item.get("stage")
        if not isinstance(name, str) or stage not in ("START", "END"):
            raise MalformedSnapshotError(f"{where} has no name or its stage is neither START nor END")
        device = item.get("device")
        annotations.append(
            Annotation(
                name, stage == "START", device if type(device) is int else None, _integer(item, "time_us", where)
            )
        )
    return annotations


def _holders(items: Any) -> dict[int, list[Holder]]:
    """Device -> its holders, by address."""
    holders: dict[int, list[Holder]] = {}
    for where, item in _items(items, LABELS_KEY):
        category, name = item.get("category"), item.get("name")
        if not (isinstance(category, str) and category and isinstance(name, str)):
            raise MalformedSnapshotError(f"{where} has no category or no name")
        holder = Holder(
            _integer(item, "address", where), _bytes(item, "size", where), printable(category), printable(name)
        )
        holders.setdefault(_integer(item, "device", where), []).append(holder)
    for found in holders.values():
        found.sort(key=lambda holder: holder.address)
    return holders
