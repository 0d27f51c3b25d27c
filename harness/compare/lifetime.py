"""The life of one parameter: the states of its FSDP unit in a traced step of a rank, with times and bytes.

Bytes are those of the trace's own collectives and of the allocator snapshot where the recording has them, else what the
configuration says; each figure names which. Times are relative to the step's first event.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal

from harness.compare.unit_sizes import SHARD_DTYPE, Source, UnitSizes
from harness.compare.waits import Wait, waits_of
from harness.config import DTYPE_BYTES, Trainer
from harness.errors import UsageError
from harness.ledger.parameters import shapes_of
from harness.memory import Analysis
from harness.trace import Capture
from harness.trace.intervals import Intervals
from harness.trace.lifetime import Life, Span, life_of, units_of

NO_RANGES = "the traces have no FSDP:: ranges, so no unit of FSDP2 to follow"
NUMBERED = re.compile(r"^(.*\.)?(\d{1,9})$")
NAMED = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """An FSDP unit by its name or one of its modules', or by the name of a parameter; both None: any."""

    unit: str | None = None
    parameter: str | None = None

    @property
    def option(self) -> str:
        return f"--parameter {self.parameter}" if self.parameter is not None else f"--unit {self.unit}"

    @property
    def is_named(self) -> bool:
        return self.unit is not None or self.parameter is not None

    def among(self, units: Sequence[str]) -> str | None:
        """The wanted one, by default a layer in the middle; None if it is not there."""
        if self.parameter is not None:
            modules = ((unit, f"{module}.") for unit in units for module in unit.split(", "))
            return next((unit for unit, module in modules if self.parameter.startswith(module)), None)
        if self.unit is not None:
            return next(
                (u for u in units if u == self.unit), next((u for u in units if self.unit in u.split(", ")), None)
            )
        layers = [unit for unit in units if NUMBERED.match(unit)] or list(units)
        return layers[len(layers) // 2] if layers else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A state of the storage, a collective or a pass of computing. `bytes` are a state's own, of a collective those of
    its full (unsharded) side; `measured` says whether a collective or an allocation had them, `source` where they are
    from. `exposed_ns`: while nothing computed; `wait_ns`: how long this rank waited in it for `last_rank`; `busy_ns`: a
    pass without its gaps."""

    kind: Literal["storage", "communication", "compute"]
    what: str
    phase: str
    start_ns: int
    end_ns: int
    dtype: str | None = None
    bytes: int | None = None
    source: Source | None = None
    measured: bool | None = None
    streams: tuple[int, ...] = ()
    dimension: str | None = None
    exposed_ns: int | None = None
    wait_ns: int | None = None
    last_rank: int | None = None
    prefetched: bool | None = None
    busy_ns: int | None = None

    @property
    def dur_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """The named parameter's part of its unit; bytes on this rank."""

    name: str
    whole: tuple[int, ...]
    gathered: tuple[int, ...]
    shard: tuple[int, ...]
    shard_bytes: int
    gathered_bytes: int
    share_pct: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    phase: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifetime:
    """`rows` in order of their starts. `source`: device, or host, whose times are no device's. `parameters`: of the
    unit, as far as they are known; `units`: of the rank. `compute` and `communication` are all of the step's,
    `own_compute` the unit's."""

    unit: str
    rank: int | None
    step: int
    source: str
    span_ns: int
    phases: list[Phase]
    rows: list[Row]
    parameter: Parameter | None
    parameters: list[str]
    units: list[str]
    notes: list[str]
    compute: Intervals
    own_compute: Intervals
    communication: Intervals

    def of_kind(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row.kind == kind]

    def to_json(self) -> dict[str, Any]:
        """`lifetime` of `report --json`."""
        plain = ("unit", "rank", "step", "source", "span_ns", "parameters", "units", "notes")
        return {
            **{name: getattr(self, name) for name in plain},
            "phases": [asdict(phase) for phase in self.phases],
            "parameter": asdict(self.parameter) if self.parameter else None,
            "rows": [asdict(row) for row in self.rows],
        }


def lifetime_of(
    config: Trainer.Config | None, captures: Sequence[Capture], snapshots: Analysis | None, wanted: Wanted
) -> Lifetime | str:
    """The life of the wanted unit, by default a layer in the middle, in the last step of `captures` (whole steps only)
    on the first rank that has it; a sentence where there is none. Raises `UsageError` for a name that is not there."""
    units = list(dict.fromkeys(unit for capture in captures for unit in units_of(capture)))
    if not units:
        return _without(wanted, NO_RANGES if captures else "no trace with a whole step")
    if wanted.among(units) is None:
        raise UsageError(f"{wanted.option}: is in no FSDP unit of the traces, which are {named(units)}")
    for capture in captures:
        unit = wanted.among(units_of(capture))
        for place in reversed(range(len(capture.steps))):
            for device in capture.devices:
                life = life_of(capture, device, place, unit) if unit is not None else None
                if life is not None:
                    step = capture.steps[place].number
                    return _sized(config, captures, snapshots, wanted.parameter, capture, step, life)
    return _without(wanted, "no FSDP:: range lies within a whole traced step")


def _without(wanted: Wanted, reason: str) -> str:
    if wanted.is_named:
        raise UsageError(f"{wanted.option}: {reason}")
    return reason


def named(units: Sequence[str]) -> str:
    """Names of units in few words: `tok_embeddings; layers.0 to layers.15; norm, lm_head`."""
    runs: list[list[str]] = []
    for unit in units:
        before, now = NUMBERED.match(runs[-1][-1]) if runs else None, NUMBERED.match(unit)
        if before and now and before[1] == now[1] and int(now[2]) == int(before[2]) + 1:
            runs[-1].append(unit)
        else:
            runs.append([unit])
    words = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return "; ".join([*words[:NAMED], *([f"and {len(words) - NAMED} more"] if len(words) > NAMED else [])])


def _sized(
    config: Trainer.Config | None,
    captures: Sequence[Capture],
    snapshots: Analysis | None,
    parameter: str | None,
    capture: Capture,
    step: int,
    life: Life,
) -> Lifetime:
    shapes = shapes_of(config, life.unit, capture.rank or 0) if config is not None else []
    sizes = UnitSizes(config, life, shapes, snapshots, capture.rank)
    waits = waits_of(captures, capture) if life.transfers else {}
    rows = [*_states(life, sizes), *_transfers(life, sizes, capture, waits), *_computations(life)]
    begin = life.span.start
    return Lifetime(
        unit=life.unit,
        rank=capture.rank,
        step=step,
        source=life.source,
        span_ns=life.span.end - begin,
        phases=[Phase(phase=name, start_ns=s.start - begin, end_ns=s.end - begin) for name, s in life.phases],
        rows=sorted(rows, key=lambda row: (row.start_ns, row.end_ns)),
        parameter=_parameter(config, sizes, parameter, life.unit),
        parameters=[shape.name for shape in shapes],
        units=units_of(capture),
        notes=list(_notes(config, life)),
        compute=life.compute.shifted(-begin),
        own_compute=life.own_compute.shifted(-begin),
        communication=life.communication.shifted(-begin),
    )


def _states(life: Life, sizes: UnitSizes) -> Iterator[Row]:
    for state in life.states:
        if state.name == "all-gather input" and not sizes.casts:
            continue
        size, dtype = sizes.of(state)
        times = _times(life, state.phase, state.span)
        yield Row(kind="storage", what=state.name, dtype=dtype, streams=state.streams, **times, **size._asdict())


def _transfers(life: Life, sizes: UnitSizes, capture: Capture, waits: Mapping[tuple[int, int], Wait]) -> Iterator[Row]:
    for one in life.transfers:
        wait = waits.get((capture.base_ns + one.span.start, one.span.end - one.span.start))
        yield Row(
            kind="communication",
            what=one.kind,
            dtype=sizes.dtype if one.kind == "all_gather" else sizes.reduce_dtype,
            streams=() if one.stream is None else (one.stream,),
            dimension=one.collective.dimension,
            exposed_ns=one.exposed_ns,
            wait_ns=wait.wait_ns if wait else None,
            last_rank=wait.last_rank if wait else None,
            prefetched=one.ahead,
            **_times(life, one.phase, one.span),
            **sizes.moved(one)._asdict(),
        )


def _computations(life: Life) -> Iterator[Row]:
    for one in life.computations:
        yield Row(kind="compute", what=one.phase, busy_ns=one.busy.total_ns(), **_times(life, one.phase, one.span))


def _times(life: Life, phase: str, span: Span) -> dict[str, Any]:
    return {"phase": phase, "start_ns": span.start - life.span.start, "end_ns": span.end - life.span.start}


def _parameter(config: Trainer.Config | None, sizes: UnitSizes, name: str | None, unit: str) -> Parameter | None:
    """Raises `UsageError` if the unit, whose parameters are known, has none of this name."""
    shapes = sizes.shapes
    if name is None or config is None or not shapes:
        return None
    if config.model.tied_embeddings and not config.tied_across_stages and name == "lm_head.weight":
        name = "tok_embeddings.weight"
    shape = next((one for one in shapes if one.name == name), None)
    if shape is None:
        have = ", ".join(one.name for one in shapes)
        raise UsageError(f"--parameter {name}: the unit {unit} has no such parameter; it has {have}")
    element = DTYPE_BYTES[sizes.dtype or SHARD_DTYPE]
    return Parameter(
        name=name,
        whole=shape.whole,
        gathered=shape.gathered,
        shard=shape.shard,
        shard_bytes=prod(shape.shard) * DTYPE_BYTES[SHARD_DTYPE],
        gathered_bytes=shape.gathered_elements * element,
        share_pct=100 * shape.gathered_elements / sum(one.gathered_elements for one in shapes),
    )


def _notes(config: Trainer.Config | None, life: Life) -> Iterator[str]:
    """What a reader of the figures has to know."""
    if life.source == "host":
        yield "host time, not device time: a state begins and ends with the ranges of FSDP2 on the CPU"
    if not any(one.kind in ("all_gather", "reduce_scatter") for one in life.transfers):
        yield "one shard: nothing is gathered or scattered, parameters are cast and copied"
    backward = [one for one in life.computations if one.phase == "backward"]
    kept = [s for s in life.states if s.name == "unsharded parameters" and s.phase == "forward"]
    if any(s.span.start < one.span.start < s.span.end for s in kept for one in backward):
        yield "stays gathered from forward to backward"
    reductions = sum(state.name == "reduce-scatter input" for state in life.states)
    if len(backward) > 1:
        yield f"{len(backward)} backward passes in the step, gradients reduced after {reductions} of them"
    if config is not None and config.training.cpu_offload:
        yield "shards and reduced gradients are in host memory: copied to the device for each all-gather, and back"
