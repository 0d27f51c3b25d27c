"""What `meshscope whatif` prints: per device a table of cases, where each one's unused bytes are, and the notes."""

from __future__ import annotations

from collections.abc import Iterator

from harness.allocator.conf import describe
from harness.text import GIB, counted, printable, signed_percent, size, table
from harness.whatif.analyse import Analysis, DeviceAnswer, Row
from harness.whatif.measure import PoolBytes

_POOLS_SHOWN = 3


def report(analysis: Analysis) -> str:
    """The whole text: sizes as `harness.text.size` writes them."""
    lines: list[str] = []
    for rank, file, devices in analysis.files:
        lines += [f"{file}  ({'rank unknown' if rank is None else f'rank {rank}'}, {analysis.mode})"]
        for device in devices:
            lines += [*_device_lines(device), ""]
    notes = dict.fromkeys(note for _, _, devices in analysis.files for device in devices for note in device.notes)
    lines += [f"note: {note}" for note in notes]
    return "\n".join(map(printable, lines)).rstrip()


def _device_lines(device: DeviceAnswer) -> Iterator[str]:
    fidelity = device.fidelity
    before = f" ({size(device.base_reserved_bytes)} reserved before it)" if device.base_reserved_bytes else ""
    yield (
        f"  device {device.index}   history {device.history}{before}, {counted(fidelity.allocations, 'allocation')}, "
        f"recorded settings: {describe(device.recorded)}"
    )
    if not fidelity.exact:
        yield f"  recorded peak {size(device.peak_reserved_bytes)} reserved; row 0 is the model's, which differs"
    else:
        calls = f", {counted(fidelity.calls, 'call')} to the driver" if fidelity.calls else ""
        yield f"  the model reproduces it: every address{calls}, reserved to the byte"
    headers = [
        "case",
        "peak reserved",
        "change",
        "allocated then",
        "unused then",
        "cudaMalloc",
        "cudaFree",
        "retries",
        "",
    ]
    rows = [
        [
            f"{number}  {_name(row)}",
            size(row.outcome.peak_reserved_bytes),
            "" if row.against is None else f"{signed_percent(row.change_pct)} vs {row.against}",
            size(row.outcome.allocated_bytes),
            size(row.outcome.unused_bytes),
            f"{row.outcome.device_allocations:,}",
            f"{row.outcome.device_frees:,}",
            f"{row.outcome.retries:,}",
            _verdict(row),
        ]
        for number, row in enumerate(device.rows)
    ]
    yield from table(headers, rows, last_left=True)
    yield "  unused at the peak, by pool"
    for number, row in enumerate(device.rows):
        pools = [pool for pool in row.outcome.pools if pool.unused_bytes]
        shown = "; ".join(pool_text(pool) for pool in pools[:_POOLS_SHOWN]) or "nothing"
        more = len(pools) - _POOLS_SHOWN
        yield f"    {number}  {shown}{f'; and {more} more' if more > 0 else ''}"
    for row in device.rows:
        if (found := row.outcome.out_of_memory) is not None:
            yield (
                f"  out of memory ({_name(row)}): {size(found.requested_bytes)} asked with "
                f"{size(found.reserved_bytes)} reserved and {size(found.allocated_bytes)} allocated, largest free "
                f"block {size(found.largest_free_bytes)}, at {found.site}"
            )


def _name(row: Row) -> str:
    case = row.outcome.case
    return case_name(row.alloc_conf, row.start, without_pending=case.without_pending, limit_bytes=case.limit_bytes)


def case_name(alloc_conf: str, start: str, *, without_pending: bool, limit_bytes: int | None) -> str:
    """A case in words, from the fields of its JSON."""
    said = [alloc_conf or "default"]
    if start == "afresh":
        said.append("afresh")
    if without_pending:
        said.append("without pending")
    if limit_bytes is not None:
        said.append(f"limit {limit_bytes / GIB:g} GiB")
    return ", ".join(said)


def _verdict(row: Row) -> str:
    if row.outcome.out_of_memory is not None:
        return "OUT OF MEMORY"
    return "" if row.outcome.case.limit_bytes is None else "fits"


def pool_text(pool: PoolBytes) -> str:
    """What a pool holds and cannot use, and for which stream."""
    pending = f" ({size(pool.pending_bytes)} pending)" if pool.pending_bytes else ""
    return f"{size(pool.unused_bytes)}{pending} {pool.pool}, stream {pool.stream}"
