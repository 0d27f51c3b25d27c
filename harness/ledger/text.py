"""The ledger as a table for people."""

from __future__ import annotations

from itertools import groupby

from harness.ledger.layout import MEANINGS
from harness.ledger.prediction import Prediction, RankMemory
from harness.ledger.time_text import time_lines
from harness.text import printable, signed_percent, size, table


def report(prediction: Prediction) -> str:
    """One table for each set of ranks that are alike, then the communication of a step."""
    lines = [f"Predicted, target {prediction.target}, world size {prediction.world_size}."]
    alike: dict[int, list[RankMemory]] = {}
    for rank in prediction.ranks:
        alike.setdefault(rank.alike_rank, []).append(rank)
    for ranks in alike.values():
        lines += ["", *_memory(ranks)]
    lines += ["", *_communication(prediction), *_host_copies(prediction)]
    time = list(time_lines(prediction.time))
    lines += ["", *time] if time else []
    lines += [f"note: {note}" for note in prediction.notes]
    return "\n".join(map(printable, lines))


def _names(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0 to 3`, `ranks 0 to 3, 8 to 11`."""
    # Neighbouring ranks have the same difference between number and position.
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), key=lambda item: item[1] - item[0])]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}"


def _memory(ranks: list[RankMemory]) -> list[str]:
    first = ranks[0]
    lines = [
        f"{_names([rank.rank for rank in ranks])}: peak allocated {size(first.peak_allocated_bytes)} at {first.at}",
        f"  first step {size(first.first_step_peak_allocated_bytes)} at {first.first_step_at}, "
        f"between steps {size(first.resident_bytes)}",
    ]
    if first.host_bytes:
        of = "; ".join(f"{line.category} {size(line.bytes)} = {line.formula} B" for line in first.host_entries)
        lines.append(f"  in host memory up to {size(first.host_bytes)}: {of}")
    for rank in ranks:
        if rank.measured_peak_allocated_bytes is not None:
            measured_line = (
                f"  rank {rank.rank} measured {size(rank.measured_peak_allocated_bytes)}, "
                f"prediction off by {signed_percent(rank.error_pct)}"
            )
            if rank.reserved_error_pct is not None:
                reserved = size(rank.measured_peak_reserved_bytes)
                measured_line += f"; reserved {reserved}, off by {signed_percent(rank.reserved_error_pct)}"
            lines.append(measured_line)
    if first.peak_reserved_bytes is not None:
        pools = [[p.stream, size(p.reserved_bytes), size(p.unused_at_peak_bytes)] for p in first.pools]
        total = [
            size(sum(getattr(p, name) for p in first.pools)) for name in ("reserved_bytes", "unused_at_peak_bytes")
        ]
        lines += table(["allocator, by stream", "reserved", "unused at the peak"], [*pools, ["all", *total]])
    measured = next((rank for rank in ranks if rank.sums), first)
    if measured.sums:
        rows = [
            [_together(one.lines), size(one.predicted_bytes), size(one.measured_bytes), signed_percent(one.error_pct)]
            for one in measured.sums
        ]
        headers = [f"rank {measured.rank}'s peak, as it was measured", "predicted", "measured", "off by"]
        lines += table(headers, rows)
    rows = [[e.category, size(e.at_peak_bytes), size(e.bytes), f" {e.formula}"] for e in first.entries]
    lines += table(["line", "at peak", "its most", " formula of its most (bytes)"], rows, last_left=True)
    used = " ".join([*(e.formula for e in first.entries), *(line.formula for line in first.host_entries)])
    names = {
        name for term in used.split(" + ") for part in term.split("/") for name in part.replace(" ", "·").split("·")
    }
    lines.append(
        "  where " + "; ".join(f"{n} = {first.quantities[n]:,} ({MEANINGS[n]})" for n in MEANINGS if n in names)
    )
    return lines


def _together(lines: list[str]) -> str:
    """Lines as a sum; all that begin alike as one."""
    return " + ".join(dict.fromkeys(line.partition(": ")[0] for line in lines))


def _host_copies(prediction: Prediction) -> list[str]:
    lines = []
    for copies in prediction.host_copies:
        of = "each rank" if copies.pipeline_rank is None else f"each rank of pipeline rank {copies.pipeline_rank}"
        lines.append(
            f"Copies of {of} and step: {size(copies.to_device_bytes)} of shards from host memory to the device, "
            f"{size(copies.to_host_bytes)} of their gradients back."
        )
    return lines and ["", *lines]


def _communication(prediction: Prediction) -> list[str]:
    if not prediction.communication:
        return ["No communication: one rank."]
    lines: list[str] = []
    for stage, totals in groupby(prediction.communication, key=lambda total: total.pipeline_rank):
        rows = []
        for total in totals:
            rows.append([total.dimension, total.kind, f"{total.count:,}", f"{total.bytes:,}", ""])
            rows += [
                ["", "", f"{c.count:,}", f"{c.bytes // c.count:,} each", f" {c.purpose}"]
                for c in prediction.collectives
                if (c.pipeline_rank, c.dimension, c.kind) == (stage, total.dimension, total.kind)
            ]
        of = "each rank" if stage is None else f"each rank of pipeline rank {stage}"
        lines.append(f"Communication of {of} and step (bytes of the full, unsharded side):")
        lines += table(["dimension", "kind", "count", "bytes", " for"], rows, left=2, last_left=True)
    return lines
