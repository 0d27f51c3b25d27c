"""The life of an FSDP unit's parameters as text."""

from __future__ import annotations

from collections.abc import Iterator

from harness.compare.lifetime import Lifetime, Row
from harness.report.build import Report
from harness.text import counted, milliseconds, percent, size, table

ROWS_SHOWN = 24
HEADERS = ["from", "ms", "phase", "what", "bytes", "source", "dtype", "stream", "dimension", "exposed", "waiting"]


def render(report: Report) -> Iterator[str]:
    """Nothing without a trace; one line where no trace has a unit of FSDP2."""
    life = report.lifetime
    if life is None:
        if report.captures:
            yield f"Life of a parameter: {report.no_lifetime}"
        return
    yield f"Life of {heading(life)}; ms from the step's first event"
    if life.parameter is not None:
        yield f"  {share(life)}"
    rows = [cells(row) for row in life.rows]
    yield from table(HEADERS, rows[:ROWS_SHOWN], left=0)
    if len(rows) > ROWS_SHOWN:
        yield f"  {len(rows) - ROWS_SHOWN} more: --json, --html"
    yield from (f"  {note}" for note in life.notes)
    yield f"  another one: --unit or --parameter NAME; {counted(len(life.units), 'unit')} on this rank"


def heading(life: Lifetime) -> str:
    rank = "rank ?" if life.rank is None else f"rank {life.rank}"
    parameters = f" ({counted(len(life.parameters), 'parameter')})" if life.parameters else ""
    return f"{life.unit}{parameters} in step {life.step} of {rank}, {life.source} time"


def share(life: Lifetime) -> str:
    """The named parameter's shapes in the model, gathered (where tensor parallelism leaves a part) and in the shard."""
    one = life.parameter
    assert one is not None
    return (
        f"{one.name}: {shape(one.whole)} in the model, {shape(one.gathered)} gathered ({size(one.gathered_bytes)}), "
        f"{shape(one.shard)} in the shard ({size(one.shard_bytes)}); {percent(one.share_pct)} of its unit"
    )


def shape(sizes: tuple[int, ...]) -> str:
    return f"[{', '.join(f'{n:,}' for n in sizes)}]"


def cells(row: Row) -> list[str]:
    """A line of the table, as `HEADERS`."""
    return [
        milliseconds(row.start_ns),
        milliseconds(row.dur_ns),
        row.phase,
        what(row),
        "" if row.kind == "compute" else size(row.bytes),
        origin(row),
        row.dtype or "",
        ", ".join(map(str, row.streams)),
        row.dimension or "",
        "" if row.exposed_ns is None else milliseconds(row.exposed_ns),
        waiting(row),
    ]


def what(row: Row) -> str:
    if row.kind == "compute":
        return "computes" if row.phase != "recompute" else "computes again"
    return f"{row.what}, ahead" if row.prefetched else row.what


def origin(row: Row) -> str:
    """Where a size is from; one that only follows from it says so."""
    if row.source is None or row.source == "configuration":
        return row.source or ""
    return row.source if row.measured else f"{row.source}, derived"


def waiting(row: Row) -> str:
    """`3.400 for rank 1`."""
    if row.wait_ns is None:
        return ""
    return milliseconds(row.wait_ns) + (f" for rank {row.last_rank}" if row.wait_ns else "")
