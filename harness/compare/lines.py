"""The ledger's lines beside what a peak was measured to consist of, where the two mean the same memory.

A measurement labels memory by what holds it, else by the phase that allocated it; the ledger's lines say what it is
for. So most lines are measured only as sums (`RankMemory.sums`), and a line has a measurement of its own where all
other lines of its sum are empty at the peak. Compared is the peak's composition: on CPU that of the step row with the
highest peak after the first (`peak_composition`), on CUDA that of the allocator snapshot with the highest one. What a
phase allocates is compared only where the measured peak is in the phase of the predicted one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from harness.compare.against_ledger import recorded_target, states_peak
from harness.compare.measured import Measured
from harness.compare.steps import phases_of, whole
from harness.ledger import Prediction
from harness.ledger.operators import Target
from harness.ledger.prediction import RankMemory, Sum
from harness.memory.categories import PRE_WINDOW
from harness.memory.steps import recorded_composition

Phase = Literal["forward", "backward", "optimizer"]
EVERY: tuple[Phase, ...] = ("forward", "backward", "optimizer")
ACTIVATIONS = "activations: "


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """The ledger's lines that are together what the measured categories are together, at a peak in one of `phases`.
    A line that ends with a colon stands for all that begin so. `held`: known by what holds it, not by the allocation,
    so that memory from before a history counts only if the recorder wrote who holds it."""

    lines: tuple[str, ...]
    measured: tuple[str, ...]
    phases: tuple[Phase, ...] = EVERY
    held: bool = False


ALLOCATED_FORWARD = (ACTIVATIONS, "float8: ", "logits and loss")
GATHERED = ("all-gather input", "all-gather output")
ALLOCATED_BACKWARD = ("gradients", "activation gradients", "unsharded gradients", "accumulated gradients")
REDUCED = ("reduce-scatter input", "reduce-scatter output")

JOINS: dict[Target, tuple[Join, ...]] = {
    # Tracked storages: FSDP2's gathered parameters are parameters to whoever asks what holds them, everything else is
    # known by its phase. The backward allocates gradients of every kind, and gathers.
    "cpu": (
        Join(lines=("parameters", "unsharded parameters"), measured=("parameter",)),
        Join(lines=("optimizer states", "optimizer temporaries"), measured=("optimizer_state",)),
        # At a forward peak of a pipeline those of micro-batches that have had their backward.
        Join(lines=ALLOCATED_BACKWARD, measured=("gradient",), phases=("forward", "optimizer")),
        Join(lines=(*ALLOCATED_FORWARD, *GATHERED), measured=("activation",), phases=("forward",)),
        Join(
            lines=(*ALLOCATED_FORWARD, *GATHERED, *ALLOCATED_BACKWARD, *REDUCED),
            measured=("activation", "gradient"),
            phases=("backward",),
        ),
    ),
    # Snapshots: holders by address, else rules over the stack of the allocation (harness.memory.categories).
    "cuda": (
        Join(lines=("parameters",), measured=("parameter",), held=True),
        Join(lines=("optimizer states",), measured=("optimizer_state",), held=True),
        Join(lines=("gradients",), measured=("gradient",), phases=("optimizer",), held=True),
        Join(lines=("unsharded parameters",), measured=("unsharded_parameter",), phases=("forward", "backward")),
        Join(lines=ALLOCATED_FORWARD, measured=("activation", "logits_loss", "redistribution"), phases=("forward",)),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """What a rank's measured peak consists of (category -> bytes); `phase` is None where the peak's is not known.
    `holders`: everything from before the measurement is known by what holds it."""

    bytes_of: Mapping[str, int]
    phase: str | None
    holders: bool


def put_lines_beside(prediction: Prediction, measured: Measured) -> None:
    """Fills `RankMemory.sums`, and of the entries that a sum is about alone `measured_bytes` and `error_pct`, which is
    100·(predicted − measured)/measured; what was not measured, or not in the predicted way, stays None."""
    compositions = _of_rows(measured) if prediction.target == "cpu" else _of_snapshots(measured)
    for rank in prediction.ranks:
        composition = compositions.get(rank.rank)
        if composition is not None:
            for join in JOINS[prediction.target]:
                _join(rank, join, composition)


def _join(rank: RankMemory, join: Join, composition: Composition) -> None:
    phase = rank.at.partition(":")[0]
    if phase not in join.phases or (join.phases != EVERY and composition.phase != phase):
        return
    if join.held and not composition.holders:
        return
    if not any(category in composition.bytes_of for category in join.measured):
        return
    entries = [e for e in rank.entries if any(_is(e.category, line) for line in join.lines) and e.at_peak_bytes]
    predicted = sum(entry.at_peak_bytes for entry in entries)
    found = sum(composition.bytes_of.get(category, 0) for category in join.measured)
    error = 100 * (predicted - found) / found if found else None
    rank.sums.append(
        Sum(
            lines=[entry.category for entry in entries],
            measured_as=[category for category in join.measured if category in composition.bytes_of],
            predicted_bytes=predicted,
            measured_bytes=found,
            error_pct=error,
        )
    )
    if len(entries) == 1:
        entries[0].measured_bytes, entries[0].error_pct = found, error


def _is(category: str, line: str) -> bool:
    return category.startswith(line) if line.endswith(": ") else category == line


def _of_rows(measured: Measured) -> dict[int, Composition]:
    """By rank, of the step with the highest tracked peak from the second step on."""
    recording = measured.recording
    found: dict[int, Composition] = {}
    if recording is None or recorded_target(recording) != "cpu":
        return {}
    for rank, rows in recording.steps.items():
        tracked = [row for row in rows if row.get("step", 0) >= 1 and states_peak(row) and recorded_composition(row)]
        if tracked:
            row = max(tracked, key=lambda row: row["peak_allocated_bytes"])
            shares = recorded_composition(row) or []
            found[rank] = Composition(
                bytes_of={share["category"]: share["bytes"] for share in shares}, phase=_peak_phase(row), holders=True
            )
    return found


def _of_snapshots(measured: Measured) -> dict[int, Composition]:
    """By rank, of the snapshot with the highest allocated peak; the phase is that of the rank's highest row."""
    peaks: dict[int, int] = {}
    found: dict[int, Composition] = {}
    for source, device in measured.snapshots.devices if measured.snapshots else ():
        if source.rank is None or device.timeline is None:
            continue
        peak = device.timeline.peak("allocated").bytes
        if peak > peaks.get(source.rank, -1):
            peaks[source.rank] = peak
            bytes_of = {share.name: share.bytes for share in device.by_category}
            found[source.rank] = Composition(
                bytes_of=bytes_of,
                phase=_phase_of_rank(measured, source.rank),
                holders=device.holders_known or PRE_WINDOW not in bytes_of,
            )
    return found


def _phase_of_rank(measured: Measured, rank: int) -> str | None:
    rows = measured.recording.steps.get(rank, []) if measured.recording else []
    steady = [row for row in rows if row.get("step", 0) >= 1 and states_peak(row)]
    return _peak_phase(max(steady, key=lambda row: row["peak_allocated_bytes"])) if steady else None


def _peak_phase(row: Mapping[str, Any]) -> str | None:
    """The phase whose allocated peak is the step's."""
    peaks = {name: peak for name, phase in phases_of(row).items() if (peak := whole(phase, "peak_allocated_bytes"))}
    highest = max(peaks, key=lambda name: peaks[name], default=None)
    return highest if highest and peaks[highest] == row.get("peak_allocated_bytes") else None
