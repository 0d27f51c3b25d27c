"""Curves anchored at the end: exact values, and the same whatever is missing at the start."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from harness.memory.device import analyse_device, device_json
from harness.memory.replay import Timeline, replay
from harness.memory.snapshot import Device, parse_snapshot

from .brute import brute_device, live_at_peak
from .build import MIB, Allocator, random_allocator, snapshot_of


def devices_of(content: Any) -> list[Device]:
    return parse_snapshot(content).devices


def timeline_of(content: Any) -> Timeline:
    [device] = devices_of(content)
    timeline = replay(device)
    assert timeline is not None
    return timeline


def check_against_brute(content: Any, device: Device) -> None:
    """Everything the brute-force replay knows, for one device."""
    expected = brute_device(content, device.index)
    found = analyse_device(device)
    timeline = found.timeline
    assert timeline is not None
    for name in ("allocated", "active", "reserved"):
        assert getattr(timeline, name).tolist() == expected["curves"][name]
        assert getattr(timeline, f"base_{name}") == expected["base"][name]
        assert timeline.peak(name).bytes == expected["peaks"][name]
    stacking = found.stacking
    assert stacking.blocks == expected["blocks"]
    assert sum(site.bytes for site in stacking.sites) == expected["stacked_bytes"]
    assert stacking.max_pending_bytes == expected["max_pending"]
    assert stacking.pending_at_end_bytes == expected["pending_at_end"]
    assert stacking.byte_seconds == pytest.approx(expected["byte_seconds"])
    entry = device_json(found)
    peak = timeline.peak("allocated")
    assert live_at_peak(content, device.index, peak.index) == peak.bytes
    assert sum(share["bytes"] for share in entry["peak_composition"]) == entry["peak_allocated_bytes"]
    assert not any("disagree" in note or "not in the final" in note for note in entry["notes"])


@pytest.mark.parametrize("seed", range(40))
def test_random_histories_against_brute_force(seed: int) -> None:
    content = snapshot_of(random_allocator(seed))
    for device in devices_of(content):
        check_against_brute(content, device)


@pytest.mark.parametrize("seed", range(4))
def test_cutting_the_head_leaves_the_rest_of_the_curves(seed: int) -> None:
    content = snapshot_of(random_allocator(seed, events=150))
    whole = timeline_of(content)
    trace = content["device_traces"][0]
    for cut in range(1, len(trace)):
        content["device_traces"][0] = trace[cut:]
        part = timeline_of(content)
        for name in ("allocated", "active", "reserved"):
            assert np.array_equal(getattr(part, name), getattr(whole, name)[cut:])
            assert getattr(part, f"base_{name}") == getattr(whole, name)[cut - 1]
        check_against_brute(content, devices_of(content)[0])


def test_several_devices_are_apart() -> None:
    content = snapshot_of(random_allocator(1, device=0), random_allocator(2, device=2))
    assert [device.index for device in devices_of(content)] == [0, 2]
    for device in devices_of(content):
        check_against_brute(content, device)


def test_exact_values_of_a_small_history() -> None:
    allocator = Allocator()
    allocator.segment(2 * MIB)
    a = allocator.alloc(1000)
    b = allocator.alloc(2000)
    allocator.request(a)
    c = allocator.alloc(500)
    allocator.complete(a)
    allocator.free(b)
    timeline = timeline_of(snapshot_of(allocator))
    assert timeline.allocated.tolist() == [0, 1000, 3000, 2000, 2500, 2500, 500, 500]
    assert timeline.active.tolist() == [0, 1000, 3000, 3000, 3500, 3500 - 1000, 2500, 500]
    assert timeline.reserved.tolist() == [2 * MIB] * 8
    assert (timeline.peak("allocated").bytes, timeline.peak("allocated").index) == (3000, 2)
    assert timeline.peak("active").bytes == 3500
    assert timeline.peak("active").time_us == allocator.events[4]["time_us"]
    assert allocator.blocks[c]["state"] == "active_allocated"


def test_peak_before_the_first_event() -> None:
    allocator = Allocator()
    allocator.segment(2 * MIB)
    allocator.free(allocator.alloc(1000))
    content = snapshot_of(allocator)
    content["device_traces"][0] = content["device_traces"][0][2:]
    peak = timeline_of(content).peak("allocated")
    assert (peak.bytes, peak.index, peak.time_us) == (1000, -1, None)


@pytest.mark.parametrize(("cut", "history"), [(0, "complete"), (1, "truncated"), (2, "truncated"), (4, "truncated")])
def test_history_is_complete_only_from_an_empty_allocator(cut: int, history: str) -> None:
    allocator = Allocator()
    allocator.segment(2 * MIB)
    allocator.free(allocator.alloc(1000))
    allocator.alloc(10)
    content = snapshot_of(allocator)
    content["device_traces"][0] = content["device_traces"][0][cut:]
    [device] = devices_of(content)
    assert device_json(analyse_device(device))["history"] == history


def test_expandable_segments_map_and_unmap() -> None:
    allocator = Allocator(expandable=True)
    for _ in range(5):
        allocator.segment(20 * MIB, "segment_map")
    allocator.segment(40 * MIB, "segment_unmap")
    [device] = devices_of(snapshot_of(allocator))
    entry = device_json(analyse_device(device))
    assert (entry["peak_reserved_bytes"], entry["final_reserved_bytes"]) == (100 * MIB, 60 * MIB)
    assert any("expandable" in note for note in entry["notes"])


def test_segments_that_are_freed() -> None:
    allocator = Allocator()
    allocator.segment(20 * MIB)
    allocator.segment(20 * MIB, "segment_free")
    content = snapshot_of(allocator)
    timeline = timeline_of(content)
    assert (timeline.base_reserved, timeline.peak("reserved").bytes) == (0, 20 * MIB)


def test_histories_without_free_requests_follow_completions() -> None:
    allocator = Allocator()
    allocator.segment(2 * MIB)
    allocator.free(allocator.alloc(1000))
    allocator.alloc(300)
    content = snapshot_of(allocator)
    content["device_traces"][0] = [e for e in content["device_traces"][0] if e["action"] != "free_requested"]
    [device] = devices_of(content)
    entry = device_json(analyse_device(device))
    assert (entry["base_allocated_bytes"], entry["peak_allocated_bytes"]) == (0, 1000)
    assert entry["stacking"]["blocks"] is None
    assert any("no free requests" in note for note in entry["notes"])
    assert sum(share["bytes"] for share in entry["peak_composition"]) == 1000


def test_events_without_times() -> None:
    content = snapshot_of(random_allocator(3))
    for event in content["device_traces"][0]:
        del event["time_us"]
    [device] = devices_of(content)
    entry = device_json(analyse_device(device))
    assert entry["stacking"]["byte_seconds"] is None
    assert entry["stacking"]["blocks"] is not None
    assert any("no times" in note for note in entry["notes"])


def test_contradictions_are_noted_and_still_add_up() -> None:
    content = snapshot_of(random_allocator(5))
    broken = copy.deepcopy(content)
    broken["segments"][0]["blocks"] = broken["segments"][0]["blocks"][:1]
    [device] = devices_of(broken)
    entry = device_json(analyse_device(device))
    assert any("not in the final segments" in note for note in entry["notes"])
    assert any("disagree" in note for note in entry["notes"])
    assert sum(share["bytes"] for share in entry["peak_composition"]) == entry["peak_allocated_bytes"]
    twice = copy.deepcopy(content)
    first = next(e for e in twice["device_traces"][0] if e["action"] == "alloc")
    twice["device_traces"][0].insert(twice["device_traces"][0].index(first) + 1, dict(first))
    [device] = devices_of(twice)
    assert any("not freed" in note for note in device_json(analyse_device(device))["notes"])


def test_out_of_memory_events() -> None:
    allocator = Allocator()
    allocator.segment(64 * MIB)
    allocator.alloc(3 * MIB)
    allocator.record(
        "oom", size=1 << 33, device_free=100 * MIB, frames=[{"name": "big", "filename": "/x/train.py", "line": 4}]
    )
    del allocator.events[-1]["stream"]
    [device] = devices_of(snapshot_of(allocator))
    assert device_json(analyse_device(device))["oom"] == [
        {
            "size_bytes": 1 << 33,
            "device_free_bytes": 100 * MIB,
            "site": "/x/train.py:4:big",
            "stream": 0,
            "time_us": allocator.clock_us,
            "allocated_bytes": 3 * MIB,
            "active_bytes": 3 * MIB,
            "reserved_bytes": 64 * MIB,
        }
    ]
