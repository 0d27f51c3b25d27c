"""One trace file as columns: device events, launches, annotations and operators, in integer nanoseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness.errors import InputError
from harness.trace import classify
from harness.trace.classify import Label
from harness.trace.intervals import Ns
from harness.trace.stream import EventStream

MISSING = np.iinfo(np.int64).min
# Below 2^43 µs (102 days) float64 tells nanoseconds apart. Traces count from a base less than 92 days ago; those of
# early 2024 hold absolute µs with a fraction, for which only the text is exact.
EXACT_FLOAT_US = 2.0**43
# Far beyond any clock's time in µs; sums and differences of three such times still fit int64 nanoseconds.
MAX_US = 2.0**51
READ_ANNOTATIONS = ("ProfilerStep#", "FSDP::", "AC::", "PP:", "comm:", "gloo:", "Optimizer.step#")
FLOAT8_PRODUCT = "aten::_scaled_mm"
COMPILED_BACKWARD = "CompiledFunctionBackward"
"""A backward that torch.compile made (torch/_functorch/_aot_autograd/runtime_wrappers.py CompiledFunction)."""
LARGEST_RANK = 10**7 - 1  # as a file's name may say it

Time = int | float | str | None
Word = int | float | str | None


class Args(msgspec.Struct, gc=False):
    device: Word = None
    stream: Word = None
    correlation: Word = None
    collective: Word = msgspec.field(name="Collective name", default=None)
    group: Word = msgspec.field(name="Process Group Name", default=None)
    description: Word = msgspec.field(name="Process Group Description", default=None)
    ranks: Word = msgspec.field(name="Process Group Ranks", default=None)
    dtype: Word = None
    in_elements: Word = msgspec.field(name="In msg nelems", default=None)
    out_elements: Word = msgspec.field(name="Out msg nelems", default=None)
    sequence: Word = msgspec.field(name="Seq", default=None)


class Event(msgspec.Struct, gc=False):
    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    pid: Word = None
    tid: Word = None
    ts: Time = None
    dur: Time = None
    args: Args | None = None


class ExactEvent(Event, gc=False):
    """The same with times as decimals, for traces whose times float64 cannot hold."""

    ts: Decimal | None = None  # type: ignore[assignment]
    dur: Decimal | None = None  # type: ignore[assignment]


class DeviceEvents(NamedTuple):
    """Kernels and memory operations. `label` indexes `Trace.labels`, -1 for memory operations, `name` indexes
    `Trace.names`; device, stream, correlation and sequence are MISSING where the trace has none."""

    start: Ns
    dur: Ns
    label: Ns
    device: Ns
    stream: Ns
    correlation: Ns
    sequence: Ns
    name: Ns


class Launches(NamedTuple):
    """Runtime and driver calls; `name` indexes `Trace.names`, `thread` tells host threads apart."""

    start: Ns
    correlation: Ns
    thread: Ns
    name: Ns


class Annotations(NamedTuple):
    """Host annotations that steps, units and host communication are read from; `name` indexes `Trace.names`."""

    start: Ns
    dur: Ns
    thread: Ns
    name: Ns


class Operators(NamedTuple):
    """Host operators that compute or communicate; `communicates` is 1 for c10d's."""

    start: Ns
    dur: Ns
    thread: Ns
    communicates: Ns


class Calls(NamedTuple):
    """What c10d was asked for, by its operator `record_param_comms`; `label` indexes `Trace.call_labels`."""

    start: Ns
    thread: Ns
    label: Ns


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The events of one file. Times are nanoseconds after `base_ns` (unix time), 0 where the file's are absolute."""

    path: Path
    rank: int | None
    world_size: int | None
    base_ns: int
    distributed: dict[str, Any]
    events: int
    device: DeviceEvents
    launches: Launches
    annotations: Annotations
    operators: Operators
    calls: Calls
    labels: list[Label]
    call_labels: list[Label]
    names: list[str]
    float8_products: int
    compiled_backwards: int
    dropped: dict[str, int]
    notes: list[str]


def read_trace(path: Path) -> Trace:
    """Reads a chrome trace. Raises InputError when the file cannot be read to its end or holds no complete event."""
    try:
        return _read(path, Event)
    except NeedsDecimalsError:
        return _read(path, ExactEvent)


class NeedsDecimalsError(Exception):
    """The trace holds times with a fraction that float64 cannot hold exactly."""


def to_ns(values: list[Any]) -> Ns:
    """Microseconds of a trace (numbers, numbers as text, decimals, None) as exact ns; MISSING for what is no finite
    time below 2^51 µs. Raises NeedsDecimalsError for floats too large to be exact."""
    kinds = set(map(type, values))
    if not kinds <= {int, float, type(None)}:
        return np.array([_exact_ns(value) for value in values], np.int64)
    try:
        us = np.array(values, np.float64)
    except OverflowError:  # an integer beyond float64
        return np.array([_exact_ns(value) for value in values], np.int64)
    usable = np.abs(us) < MAX_US  # False for NaN, too
    us[~usable] = 0
    if float in kinds and us.size and float(np.abs(us).max()) >= EXACT_FLOAT_US:
        large = zip(values, np.abs(us) >= EXACT_FLOAT_US, strict=True)
        if any(is_large and type(value) is float for value, is_large in large):
            raise NeedsDecimalsError
    whole = np.floor(us)
    ns = whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)
    ns[~usable] = MISSING
    return ns


def _exact_ns(value: object) -> int:
    if not isinstance(value, int | float | str | Decimal) or isinstance(value, bool):
        return int(MISSING)
    try:
        us = Decimal(value)
    except InvalidOperation:
        return int(MISSING)
    if not us.is_finite() or abs(us) >= MAX_US:
        return int(MISSING)
    return int((us * 1000).to_integral_value())


def to_id(value: Word) -> int:
    """A device, stream, correlation or sequence number; MISSING where there is none."""
    if type(value) is int:
        return value if -(2**63) < value < 2**63 else int(MISSING)
    if isinstance(value, str) and value.strip().lstrip("-").isdecimal() and len(value) < 19:
        return int(value)
    return int(MISSING)


K = TypeVar("K")


class Interned(dict[K, int], Generic[K]):
    """Numbers for values, in order of appearance."""

    def __missing__(self, key: K) -> int:
        self[key] = number = len(self)
        return number


class Columns:
    """Rows gathered batch by batch into int64 columns; the first `times` columns are µs until a batch is closed."""

    def __init__(self, width: int, times: int) -> None:
        self._width, self._times = width, times
        self._done: list[list[Ns]] = [[] for _ in range(width)]
        self.rows: list[tuple[Any, ...]] = []

    def close_batch(self) -> None:
        if not self.rows:
            return
        for index, column in enumerate(zip(*self.rows, strict=True)):
            values = to_ns(list(column)) if index < self._times else np.array(column, np.int64)
            self._done[index].append(values)
        self.rows = []

    def finish(self) -> list[Ns]:
        return [np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in self._done]


def _read(path: Path, event_type: type[Event]) -> Trace:
    stream = EventStream(path, event_type)
    reader = _Reader()
    for batch in stream:
        reader.add(batch)
    if not reader.complete:
        raise InputError(path, f"holds no complete event ({reader.seen} entries in traceEvents)")
    return reader.finish(path, stream)


class _Reader:
    def __init__(self) -> None:
        self.seen = self.complete = self.float8_products = self.compiled_backwards = 0
        self.labels: Interned[Label] = Interned()
        self.call_labels: Interned[Label] = Interned()
        self.names: Interned[str] = Interned()
        self.threads: Interned[tuple[Word, Word]] = Interned()
        self.device, self.launches = Columns(8, 2), Columns(4, 1)
        self.annotations, self.operators, self.calls = Columns(4, 2), Columns(4, 2), Columns(3, 1)
        self._category: dict[str | None, str] = {}
        self.dropped: Counter[str] = Counter()

    def add(self, batch: Iterable[Event]) -> None:
        category = self._category
        for event in batch:
            self.seen += 1
            cat = category.get(event.cat)
            if cat is None:
                cat = category[event.cat] = room_of(event.cat)
            if event.ph != "X":
                if cat in ("kernel", "memory") and event.ph in ("B", "E"):
                    self.dropped["ph is not X"] += 1
                continue
            self.complete += 1
            if cat == "operator":
                self._operator(event)
            elif cat == "launch":
                correlation = to_id(event.args.correlation) if event.args else MISSING
                thread = self.threads[event.pid, event.tid]
                self.launches.rows.append((event.ts, correlation, thread, self.names[event.name or ""]))
            elif cat:
                self._device_or_annotation(event, cat)
        for columns in (self.device, self.launches, self.annotations, self.operators, self.calls):
            columns.close_batch()

    def _operator(self, event: Event) -> None:
        name = event.name or ""
        if name.startswith("ProfilerStep#"):  # torch 1.9 gives steps the category Operator
            self._annotation(event, name)
            return
        self.float8_products += name == FLOAT8_PRODUCT
        self.compiled_backwards += name == COMPILED_BACKWARD
        if name == classify.RECORDED_CALL and event.args and event.args.collective is not None:
            label = self.call_labels[label_of(name, event.args)]
            self.calls.rows.append((event.ts, self.threads[event.pid, event.tid], label))
        communicates = bool(classify.HOST_COMMUNICATION_OP.match(name))
        if communicates or classify.HOST_COMPUTING_OP.match(name):
            self.operators.rows.append((event.ts, event.dur, self.threads[event.pid, event.tid], int(communicates)))

    def _annotation(self, event: Event, name: str) -> None:
        thread = self.threads[event.pid, event.tid]
        self.annotations.rows.append((event.ts, event.dur, thread, self.names[name]))

    def _device_or_annotation(self, event: Event, cat: str) -> None:
        name = event.name or ""
        if cat == "annotation":
            if name.startswith(READ_ANNOTATIONS) or name in ("forward", "backward", "optimizer"):
                self._annotation(event, name)
            return
        args = event.args or Args()
        label = -1 if cat == "memory" else self.labels[label_of(name, args)]
        device = to_id(args.device if args.device is not None else event.pid)
        numbers = (to_id(args.stream), to_id(args.correlation), to_id(args.sequence), self.names[name])
        self.device.rows.append((event.ts, event.dur, label, device, *numbers))

    def finish(self, path: Path, stream: EventStream[Any]) -> Trace:
        info = stream.header.get("distributedInfo")
        distributed = info if isinstance(info, dict) else {}
        base = stream.header.get("baseTimeNanoseconds")
        device = self._without_dropped(DeviceEvents(*self.device.finish()))
        launches = Launches(*self.launches.finish())
        known = (launches.start != MISSING) & (launches.correlation != MISSING)
        calls = Calls(*self.calls.finish())
        notes = [f"{count} times: {what}" for what, count in stream.repaired.items() if count]
        stated = distributed.get("rank")
        rank = to_number(stated)
        if rank is not None and not 0 <= rank <= LARGEST_RANK:
            rank = None
        if rank is None and stated is not None:
            notes.append(f"distributedInfo says rank {str(stated)[:40]}, which is none: not used")
        return Trace(
            path=path,
            rank=rank,
            world_size=to_number(distributed.get("world_size")),
            base_ns=base if type(base) is int else 0,
            distributed=distributed,
            events=self.seen,
            device=device,
            launches=Launches(*(column[known] for column in launches)),
            annotations=Annotations(*only_timed(self.annotations.finish())),
            operators=Operators(*only_timed(self.operators.finish())),
            calls=Calls(*(column[calls.start != MISSING] for column in calls)),
            labels=list(self.labels),
            call_labels=list(self.call_labels),
            names=list(self.names),
            float8_products=self.float8_products,
            compiled_backwards=self.compiled_backwards,
            dropped=dict(self.dropped + stream.dropped),
            notes=notes,
        )

    def _without_dropped(self, events: DeviceEvents) -> DeviceEvents:
        no_start, no_dur = events.start == MISSING, events.dur == MISSING
        negative = ~no_dur & (events.dur < 0)
        reasons = {"no finite ts": no_start, "no finite dur": no_dur & ~no_start, "negative dur": negative & ~no_start}
        self.dropped.update({reason: int(mask.sum()) for reason, mask in reasons.items() if mask.any()})
        good = ~(no_start | no_dur | negative)
        return DeviceEvents(*(column[good] for column in events))


def room_of(category: str | None) -> str:
    """Which columns an event of a category goes to, "" for none."""
    name = (category or "").lower()
    if name in classify.KERNEL_CATEGORIES:
        return "kernel"
    if name in classify.MEMORY_CATEGORIES:
        return "memory"
    if name in classify.LAUNCH_CATEGORIES:
        return "launch"
    if name in classify.OPERATOR_CATEGORIES:
        return "operator"
    return "annotation" if name == "user_annotation" else ""


def label_of(name: str, args: Args) -> Label:
    if args.collective is None and args.group is None:
        return Label(name)
    return Label(
        name=name,
        collective=to_text(args.collective),
        group=to_text(args.group),
        description=to_text(args.description),
        ranks=to_text(args.ranks),
        dtype=to_text(args.dtype),
        in_elements=to_number(args.in_elements),
        out_elements=to_number(args.out_elements),
    )


def only_timed(columns: list[Ns]) -> list[Ns]:
    """Host columns without rows that have no time; a negative or missing duration counts as none."""
    start, dur = columns[0], columns[1]
    good: NDArray[np.bool_] = (start != MISSING) & (dur != MISSING) & (dur >= 0)
    return [column[good] for column in columns]


def to_text(value: Word) -> str | None:
    return None if value is None else str(value)


def to_number(value: object) -> int | None:
    number = to_id(value) if isinstance(value, int | float | str) else int(MISSING)
    return None if number == MISSING else number
