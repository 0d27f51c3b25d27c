"""The ledger as a table for people."""

from __future__ import annotations

from itertools import groupby

from harness.ledger.layout import MEANINGS
from harness.ledger.prediction import Prediction, RankMemory

GIB = 2**30


def report(prediction: Prediction) -> str:
    """One table for each set of ranks that are alike, then the communication of a step."""
    lines = [f"Predicted, target {prediction.target}, world size {prediction.world_size}. GiB = 2^30 bytes."]
    for _, group in groupby(prediction.ranks, key=lambda rank: rank.alike_rank):
        ranks = list(group)
        lines += ["", *_memory(ranks)]
    lines += ["", *_communication(prediction)]
    return "\n".join(lines)


def _memory(ranks: list[RankMemory]) -> list[str]:
    first = ranks[0]
    who = f"rank {first.rank}" if len(ranks) == 1 else f"ranks {first.rank} to {ranks[-1].rank}"
    lines = [
        f"{who}: peak allocated {_gib(first.peak_allocated_bytes)} GiB at {first.at}",
        f"  first step {_gib(first.first_step_peak_allocated_bytes)} GiB at {first.first_step_at}, "
        f"between steps {_gib(first.resident_bytes)} GiB, reserved: not predicted",
    ]
    lines += [
        f"  rank {rank.rank} measured {_gib(rank.measured_peak_allocated_bytes)} GiB, "
        f"prediction off by {rank.error_pct:+.2f} %"
        for rank in ranks
        if rank.measured_peak_allocated_bytes is not None
    ]
    width = max(len(entry.category) for entry in first.entries)
    lines.append(f"  {'line':{width}}  {'at peak':>9}  {'its most':>9}  formula of its most (bytes)")
    lines += [
        f"  {e.category:{width}}  {_gib(e.at_peak_bytes):>9}  {_gib(e.bytes):>9}  {e.formula}" for e in first.entries
    ]
    used = " ".join(entry.formula for entry in first.entries)
    names = {
        name for term in used.split(" + ") for part in term.split("/") for name in part.replace(" ", "·").split("·")
    }
    lines.append(
        "  where " + "; ".join(f"{n} = {first.quantities[n]:,} ({MEANINGS[n]})" for n in MEANINGS if n in names)
    )
    return lines


def _communication(prediction: Prediction) -> list[str]:
    if not prediction.communication:
        return ["No communication: one rank."]
    lines = ["Communication of each rank and step (bytes of the full, unsharded side):"]
    for total in prediction.communication:
        lines.append(f"  {total.dimension:10}  {total.kind:14}  {total.count:>5}  {_gib(total.bytes):>9} GiB")
        lines += [
            f"  {'':10}    {c.count:>5} × {c.bytes // c.count:,} B  {c.purpose}"
            for c in prediction.collectives
            if (c.dimension, c.kind) == (total.dimension, total.kind)
        ]
    return lines


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / GIB:.4f}"
