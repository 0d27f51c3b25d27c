"""The structure of a snapshot: what is accepted, and where something else is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.errors import InputError
from harness.memory.device import analyse_device, device_json
from harness.memory.snapshot import Action, parse_snapshot, read_snapshot

from .build import MIB, Allocator, snapshot_of, write


def example() -> dict[str, Any]:
    allocator = Allocator()
    allocator.segment(64 * MIB)
    kept = allocator.alloc(1000)
    allocator.alloc(5000)
    allocator.request(kept)
    return snapshot_of(allocator)


def set_at(*path: Any, value: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_at("segments", value=None), "segments is not a list"),
        (set_at("segments", 0, value=3), r"segments\[0\] is not a dict"),
        (set_at("segments", 0, "total_size", value="big"), r"segments\[0\]\.total_size is not an integer"),
        (set_at("segments", 0, "total_size", value=True), r"segments\[0\]\.total_size is not an integer"),
        (set_at("segments", 0, "total_size", value=-1), r"segments\[0\]\.total_size is -1"),
        (set_at("segments", 0, "blocks", value={}), r"segments\[0\]\.blocks is not a list"),
        (set_at("segments", 0, "blocks", 1, "state", value="lost"), r"blocks\[1\]\.state is 'lost'"),
        (set_at("segments", 0, "blocks", 1, "state", value=[]), r"blocks\[1\]\.state is a list"),
        (set_at("segments", 0, "blocks", 1, "size", value=1 << 60), r"blocks\[1\]\.size is \d+, which is no size"),
        (set_at("device_traces", value={}), "device_traces is not a list"),
        (set_at("device_traces", 0, 2, value="x"), r"device_traces\[0\]\[2\] is not a dict"),
        (set_at("device_traces", 0, 2, "size", value=1.5), r"device_traces\[0\]\[2\]\.size is not an integer"),
        (set_at("device_traces", 0, 2, "action", value=7), r"device_traces\[0\]\[2\]\.action is not a string"),
        (set_at("device_traces", 0, 2, "addr", value=1 << 80), r"device_traces\[0\]\[2\]\.addr does not fit"),
        (set_at("device_traces", 0, 2, "frames", value=5), r"device_traces\[0\]\[2\]\.frames is not a list"),
        (set_at("external_annotations", value=[{"name": "x", "stage": "MIDDLE"}]), r"external_annotations\[0\]"),
        (set_at("external_annotations", value=3), "external_annotations is not a list"),
    ],
)
def test_garbage_is_named_with_its_place(tmp_path: Path, change: Callable[[Any], None], message: str) -> None:
    content = copy.deepcopy(example())
    change(content)
    with pytest.raises(InputError, match=message) as caught:
        read_snapshot(write(tmp_path / "s.pickle", content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["size", "addr", "action"])
def test_missing_keys_of_an_event_are_named(tmp_path: Path, key: str) -> None:
    content = example()
    del content["device_traces"][0][1][key]
    with pytest.raises(InputError, match=rf"device_traces\[0\]\[1\]\.{key} is missing"):
        read_snapshot(write(tmp_path / "s.pickle", content))


@pytest.mark.parametrize("content", [None, 3, "text", {}, {"device_traces": []}, (1, 2)])
def test_other_objects_are_no_snapshot(tmp_path: Path, content: Any) -> None:
    with pytest.raises(InputError, match="not an allocator snapshot"):
        read_snapshot(write(tmp_path / "s.pickle", content))


def test_bare_list_is_segments_only() -> None:
    [device] = parse_snapshot(example()["segments"]).devices
    found = device_json(analyse_device(device))
    assert found["history"] == "none"
    assert found["final_reserved_bytes"] == 64 * MIB
    assert (found["final_allocated_bytes"], found["final_active_bytes"]) == (5120, 5120 + 1024)
    assert found["final_requested_bytes"] == 5000
    unknown = ("base_allocated_bytes", "peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes")
    assert [found[key] for key in (*unknown, "peak_requested_bytes", "peak_composition")] == [None] * 6
    assert found["stacking"] == {
        "blocks": None,
        "max_pending_bytes": None,
        "pending_at_end_bytes": 1000,
        "byte_seconds": None,
        "sites": [],
        "pending_sites": [],
    }


def test_old_blocks_without_address_or_requested_size() -> None:
    content = example()
    for block in content["segments"][0]["blocks"]:
        del block["address"], block["requested_size"]
    [device] = parse_snapshot(content).devices
    assert [block.requested_size for block in device.blocks()] == [1024, 5120]
    first = content["segments"][0]["address"]
    assert [block.address for block in device.blocks()] == [first, first + 1024]


def test_both_names_of_the_pending_state() -> None:
    content = example()
    content["segments"][0]["blocks"][0]["state"] = "active_awaiting_free"
    [device] = parse_snapshot(content).devices
    assert device_json(analyse_device(device))["stacking"]["pending_at_end_bytes"] == 1000


def test_optional_fields_and_unknown_actions() -> None:
    content = example()
    content["device_traces"][0][1] |= {"pool_id": (0, 1), "compile_context": "0/1", "user_metadata": None}
    content["device_traces"][0].append({"action": "teleport"})
    content["device_traces"][0].append({"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": 5})
    content["device_traces"][0].append({"action": "user_defined", "size": 0})
    [device] = parse_snapshot(content).devices
    assert device.history.unknown_actions == {"teleport": 1}
    assert device.history.action[-2:] == [Action.SNAPSHOT, Action.USER_DEFINED]
    assert "events of unknown kind, not replayed: teleport (1)" in device_json(analyse_device(device))["notes"]


def test_devices_without_anything_are_left_out() -> None:
    allocator = Allocator(device=3)
    allocator.segment(64 * MIB)
    content = snapshot_of(allocator)
    assert len(content["device_traces"]) == 4
    assert [device.index for device in parse_snapshot(content).devices] == [3]


def test_private_pools_are_noted() -> None:
    content = example()
    content["segments"][0]["segment_pool_id"] = (0, 2)
    [device] = parse_snapshot(content).devices
    assert any(
        "1 segment (64.000 MiB) in private pools" in note for note in device_json(analyse_device(device))["notes"]
    )
