"""Captures without the steps that they hold in part: what means and comparisons are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from harness.trace.activity import Mask
from harness.trace.capture import Capture, DeviceCapture
from harness.trace.intervals import Ns


def complete(captures: Sequence[Capture]) -> list[Capture]:
    """The captures without their incomplete steps; one in which no step is complete is left out."""
    found = []
    for capture in captures:
        if not capture.incomplete:
            found.append(capture)
        elif any(step.number not in capture.incomplete for step in capture.steps):
            found.append(_without(capture))
    return found


def _without(capture: Capture) -> Capture:
    whole = [index for index, step in enumerate(capture.steps) if step.number not in capture.incomplete]
    place = np.full(len(capture.steps) + 1, -1, np.int64)  # the last one is that of events of no step
    place[whole] = np.arange(len(whole))
    gone = np.array([index not in whole for index in range(len(capture.steps))] + [False], np.bool_)
    devices = [_only(device, ~gone[device.step], place[device.step]) for device in capture.devices]
    return replace(capture, steps=[capture.steps[i] for i in whole], devices=devices, incomplete={}, notes=[])


def _only(device: DeviceCapture, kept: Mask, step: Ns) -> DeviceCapture:
    new_index = np.cumsum(kept) - 1
    units = {int(new_index[event]): unit for event, unit in device.units.items() if kept[event]}
    return DeviceCapture(activity=device.activity.only(kept), step=step[kept], units=units)
