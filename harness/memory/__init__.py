"""Allocator snapshots and memory events: timelines, peaks and what they consist of, stacking, peaks per step.

Pure functions of files, without torch. `analyse` gives the `memory --json` object; `read_snapshot` and
`analyse_device` give the `Timeline` (absolute curves over time) and the blocks behind it.
"""

from harness.memory.analyse import Analysis, analyse, analyse_sources
from harness.memory.device import DeviceAnalysis, DeviceSummary, analyse_device
from harness.memory.replay import Timeline, follow_blocks, replay
from harness.memory.snapshot import Snapshot, read_snapshot
from harness.memory.stacking import Stacking, measure_stacking

__all__ = [
    "Analysis",
    "DeviceAnalysis",
    "DeviceSummary",
    "Snapshot",
    "Stacking",
    "Timeline",
    "analyse",
    "analyse_device",
    "analyse_sources",
    "follow_blocks",
    "measure_stacking",
    "read_snapshot",
    "replay",
]
