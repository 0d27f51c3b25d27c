"""Measured times of a step beside predicted ones."""

from __future__ import annotations

from collections.abc import Collection
from statistics import mean, median
from typing import Any

from harness.compare.measured import Measured
from harness.compare.waits import waiting
from harness.config import Trainer
from harness.ledger.hardware import fitting, load
from harness.ledger.operators import Target
from harness.ledger.time import ComparedTime, Time, predict_time
from harness.recording import Recording
from harness.text import milliseconds, printable

COMPARABLE = ("real", "imported")
"""Modes whose times are those of ranks that have a GPU each, and those of other tools, which do not say."""
DEFAULT = "h200"
"""The calibration that a GPU run is predicted with of which no recording says the device."""
WAITING_PCT = 25.0
"""From this share of the measured communication on, waiting is worth a note."""
FROM_TRACES = ("compute_ns", "comm_ns", "exposed_ns", "overlap_pct")


def time_of(
    config: Trainer.Config, target: Target, measured: Measured | None = None, hardware: str | None = None
) -> Time:
    """The predicted time of a step of `config`, beside the measured one; `hardware`: a shipped calibration, a file, or
    `none`; by default the shipped one of the recording's device, else of GPUs where those are the `target`.

    Raises `UsageError` and `InputError` as `hardware.load` does.
    """
    if hardware == "none":
        return Time()
    if hardware is None:
        recording = measured.recording if measured is not None else None
        hardware, lacks = _shipped_for(target, _devices(recording) if recording is not None else set())
        if hardware is None:
            return Time(notes=[f"no time: {lacks}"])
    time = predict_time(config, target, load(hardware), name=hardware)
    if measured is not None:
        put_time_beside(time, measured)
    return time


def _shipped_for(target: Target, devices: Collection[str]) -> tuple[str | None, str]:
    """The name of a shipped calibration; without one, why there is none."""
    if target != "cuda":
        return None, "times of CPUs are not predicted"
    for device in sorted(devices):
        name = fitting(device)
        return name, f"no calibration of {printable(device)} is shipped; meshscope calibrate makes one for --hardware"
    return DEFAULT, ""


def _devices(recording: Recording) -> set[str]:
    """Names of GPUs, as far as ranks state them."""
    found = (device.get("name") for rank in recording.ranks.values() if isinstance(device := rank.get("device"), dict))
    return {name for name in found if isinstance(name, str)}


def put_time_beside(time: Time, measured: Measured) -> None:
    """Fills `time.compared`, or says in its notes why nothing is compared."""
    if time.step_ns is None:
        return
    time.measured_mode = measured.mode
    if measured.mode not in COMPARABLE:
        time.notes.append(f"time: not compared, mode {measured.mode}: its times are not those of a cluster")
        return
    found: dict[str, float] = {}
    walls = [step["wall_ns"] for step in measured.steps if step["plain"] and step["wall_ns"] is not None]
    if walls:
        found["step_ns"] = median(walls)
    windows = _windows(measured)
    for figure in FROM_TRACES if windows else ():
        values = [window[figure] for window in windows if window[figure] is not None]
        if values:
            found[figure] = mean(values)
    time.compared = [_compared(figure, getattr(time, figure), value) for figure, value in found.items()]
    time.notes += _waiting(measured, {window["step"] for window in windows})
    if not found:
        time.notes.append("time: nothing to compare with, no undisturbed step and no trace of a device")


def _windows(measured: Measured) -> list[dict[str, Any]]:
    """Of each rank and traced step that a file holds wholly, events by the step that launched them."""
    if measured.complete_overlap is None:
        return []
    ranks = [rank for rank in measured.complete_overlap["ranks"] if rank["source"] == "device"]
    return [step for rank in ranks for step in rank["steps"] if step["rule"] == "launch"]


def _waiting(measured: Measured, steps: Collection[int]) -> list[str]:
    """What of the measured communication is waiting for the rank that comes last: no prediction has it."""
    if measured.complete_overlap is None or not measured.complete_overlap["cross_rank"]["aligned"] or not steps:
        return []
    wait_ns, transfer_ns = waiting(measured.complete_overlap["cross_rank"]["collectives"])
    share = 100 * wait_ns / (wait_ns + transfer_ns) if wait_ns else 0.0
    if share < WAITING_PCT:
        return []
    each = (round(part / len(steps)) for part in (transfer_ns, wait_ns))
    transfer, wait = map(milliseconds, each)
    return [
        f"time: of a traced step's communication {wait} ms ({share:.0f} %) is waiting for the rank that comes last, "
        f"which is not predicted and adds to what is exposed; {transfer} ms is transfer"
    ]


def _compared(figure: str, predicted: float | None, measured: float) -> ComparedTime:
    is_share = figure.endswith("_pct")
    error = None
    if predicted is not None and (is_share or measured):
        error = predicted - measured if is_share else 100 * (predicted - measured) / measured
    return ComparedTime(figure=figure, predicted=predicted, measured=measured, error_pct=error)
