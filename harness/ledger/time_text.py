"""Predicted times of a step as text."""

from __future__ import annotations

from collections.abc import Iterator

from harness.ledger.time import RankTime, Time
from harness.text import milliseconds, number, percent, signed_percent, table

LINES_SHOWN = 12
"""Of each rank, the longest."""
WAITS_FOR_HOST_PCT = 90
"""From this share of the step on the host is what decides how long it takes."""


def time_lines(time: Time) -> Iterator[str]:
    """Nothing but why, where no time is predicted."""
    if time.step_ns is not None:
        yield from _summary(time)
        for rank in time.ranks:
            yield from _rank(rank, time.step_ns)
    yield from (f"note: {note}" for note in time.notes)


def compared_lines(time: Time) -> Iterator[str]:
    """Without what it is made of; nothing where no time is predicted."""
    if time.step_ns is not None:
        yield from _summary(time)
        yield from (f"  {note}" for note in time.notes)


def _summary(time: Time) -> Iterator[str]:
    yield (
        f"Predicted time of a step, hardware {time.hardware}: {_ms(time.step_ns)}, "
        f"{number(time.tokens_per_s, 0)} tokens/s per device, MFU {percent(time.mfu_pct)}"
    )
    yield from _compared(time)


def _compared(time: Time) -> Iterator[str]:
    if not time.compared:
        return
    rows = []
    for one in time.compared:
        is_share = one.figure.endswith("_pct")
        shown = percent if is_share else _ms
        error = signed_percent(one.error_pct)
        rows.append(
            [one.figure, shown(one.predicted), shown(one.measured), error.replace("%", "points") if is_share else error]
        )
    yield from table(["", "predicted", f"measured, mode {time.measured_mode}", "off by"], rows)


def _ms(value: float | None) -> str:
    return f"{milliseconds(None if value is None else round(value))} ms"


def _rank(rank: RankTime, step_ns: int) -> Iterator[str]:
    of = {"pipeline rank": rank.pipeline_rank, "context-parallel rank": rank.context_rank}
    named = ", ".join(f"{what} {number}" for what, number in of.items() if number is not None)
    hidden = f", {percent(rank.overlap_pct)} hidden" if rank.comm_ns else ""
    yield (
        f"  {f'each rank of {named}' if named else 'each rank'}: computes {_ms(rank.compute_ns)}, communicates "
        f"{_ms(rank.comm_ns)}{hidden}, {_ms(rank.exposed_ns)} exposed, idle {_ms(rank.idle_ns)}"
    )
    if 100 * rank.host_ns >= WAITS_FOR_HOST_PCT * step_ns:
        yield f"  its host needs {_ms(rank.host_ns)} to issue it: the device waits for the host"
    if rank.dimensions:
        rows = [[one.dimension, milliseconds(one.comm_ns), milliseconds(one.exposed_ns)] for one in rank.dimensions]
        yield from table(["dimension", "communication ms", "exposed ms"], rows)
    rows = [
        [
            line.phase,
            line.part,
            line.what,
            f"{line.count:,}",
            milliseconds(line.ns),
            percent(100 * line.ns / step_ns),
            milliseconds(line.exposed_ns) if line.is_communication else "",
        ]
        for line in rank.lines[:LINES_SHOWN]
    ]
    yield from table(["phase", "part", "longest lines", "count", "ms", "of the step", "exposed ms"], rows, left=3)
    if len(rank.lines) > LINES_SHOWN:
        yield f"  {len(rank.lines) - LINES_SHOWN} more lines: --json"
