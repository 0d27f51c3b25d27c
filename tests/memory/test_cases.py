"""Exact values on public snapshots and traces and on recordings of H200s."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.memory import analyse
from harness.memory.replay import replay
from harness.memory.snapshot import parse_snapshot, read_snapshot
from harness.sources import find_sources

from .test_replay import check_against_brute

pytestmark = pytest.mark.shared_data


def only_device(path: Path) -> dict[str, Any]:
    found = analyse(find_sources(path))
    assert found["errors"] == []
    [file] = found["files"]
    [device] = file["devices"]
    return dict(device)


def values(device: dict[str, Any], *keys: str) -> list[Any]:
    return [device[key] for key in keys]


def test_c47_totals_of_memory_events(cases: Path) -> None:
    found = analyse(find_sources(cases / "files" / "t05-ddp2-mem"))
    [file] = found["files"]
    [device] = file["devices"]
    assert (file["rank"], device["device"]) == (1, 1)
    assert values(device, "peak_allocated_bytes", "peak_reserved_bytes") == [6629508096, 12782141440]
    assert device["final_allocated_bytes"] == 4096614400
    assert values(device, "peak_active_bytes", "peak_requested_bytes") == [None, None]
    assert found["steps"] == [
        {
            "rank": 1,
            "step": step,
            "peak_allocated_bytes": 6629508096,
            "peak_active_bytes": None,
            "peak_reserved_bytes": 12782141440,
        }
        for step in (2, 3, 4, 5, 6)
    ]


def test_c49_memory_events_without_totals(cases: Path) -> None:
    found = analyse(find_sources(cases / "files" / "t31-tbp-w0"))
    assert found["errors"] == []
    assert len(found["files"]) == 2
    for file in found["files"]:
        [device] = file["devices"]
        assert values(device, "base_allocated_bytes", "peak_allocated_bytes", "peak_reserved_bytes") == [None] * 3
        assert any("relative peak 2791636480 B above" in note for note in device["notes"])
    assert [row["step"] for row in found["steps"]] == [*range(5, 11), *range(16, 22)]
    assert {row["peak_allocated_bytes"] for row in found["steps"]} == {None}


def test_small_trace_with_two_captures(cases: Path) -> None:
    found = analyse(find_sources(cases / "files" / "t59-sidnb-a"))
    assert [row["step"] for row in found["steps"]] == [1, 2, 3, 6, 7, 8]
    assert {row["peak_allocated_bytes"] for row in found["steps"]} == {94398464}
    assert {row["peak_reserved_bytes"] for row in found["steps"]} == {117440512}


def test_c50_complete_history(cases: Path) -> None:
    device = only_device(cases / "files" / "s20-silmont-tiny")
    assert device["history"] == "complete"
    assert values(device, "base_allocated_bytes", "peak_allocated_bytes") == [0, 3249143816]
    assert values(device, "peak_reserved_bytes", "final_reserved_bytes") == [3781165056, 3781165056]
    assert values(device, "final_allocated_bytes", "final_requested_bytes") == [31719936, 31719428]


def test_c51_truncated_history(cases: Path) -> None:
    device = only_device(cases / "files" / "s08-ws-infer1024")
    assert device["history"] == "truncated"
    assert values(device, "base_allocated_bytes", "peak_allocated_bytes") == [1701711872, 2877435904]
    assert values(device, "final_reserved_bytes", "final_allocated_bytes") == [3204448256, 1703677952]
    assert values(device["stacking"], "blocks", "max_pending_bytes", "pending_at_end_bytes") == [0, 0, 0]


def test_c57_stacking(cases: Path) -> None:
    device = only_device(cases / "files" / "e01-stack")
    assert values(device, "peak_active_bytes", "peak_allocated_bytes") == [671088640, 335544320]
    assert device["final_allocated_bytes"] == 268435456
    stacking = device["stacking"]
    assert values(stacking, "blocks", "max_pending_bytes", "pending_at_end_bytes") == [19, 335544320, 0]
    assert stacking["sites"] == [{"site": "/x/train.py:1:all_gather", "blocks": 19, "bytes": 19 * 67108864}]
    device = only_device(cases / "files" / "e02-nostack")
    assert values(device, "peak_active_bytes", "peak_allocated_bytes") == [335544320, 335544320]
    assert values(device["stacking"], "blocks", "max_pending_bytes", "sites") == [0, 0, []]


def test_c59_expandable_segments_and_out_of_memory(cases: Path) -> None:
    device = only_device(cases / "files" / "e05-expandable")
    assert values(device, "peak_reserved_bytes", "final_reserved_bytes") == [209715200, 146800640]
    assert values(device, "peak_allocated_bytes", "final_allocated_bytes") == [209715200, 104857600]
    device = only_device(cases / "files" / "e06-oom")
    [oom] = device["oom"]
    assert values(oom, "size_bytes", "device_free_bytes", "site") == [8589934592, 104857600, "/x/train.py:1:big"]
    assert device["stacking"]["pending_at_end_bytes"] == 402653184


def test_c61_evil_snapshot(
    cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["memory", str(cases / "files" / "e08-evil")]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "refused: pickle opcode GLOBAL (posix.mkdir)" in err
    assert not (tmp_path / "pwned_marker_dir").exists()


def test_every_snapshot_against_brute_force(cases: Path, recordings: Path) -> None:
    paths = [path for folder in (cases / "files", recordings) for path in sorted(folder.rglob("*.pickle"))]
    checked = 0
    for path in paths:
        if "evil" in str(path):
            continue
        content = pickle.loads(path.read_bytes())
        for device in read_snapshot(path).devices:
            check_against_brute(content, device)
            checked += 1
    assert checked >= 17


@pytest.mark.parametrize("name", ["h200x2_collectives_record_stream", "h200_fsdp4_tp2"])
def test_cutting_the_head_of_a_real_history(recordings: Path, name: str) -> None:
    whole = pickle.loads((recordings / name / "rank0_snapshot.pickle").read_bytes())
    trace = whole["device_traces"][0]
    expected = replay(parse_snapshot(whole).devices[0])
    assert expected is not None
    for cut in range(1, len(trace), max(1, len(trace) // 40)):
        part = replay(parse_snapshot(whole | {"device_traces": [trace[cut:]]}).devices[0])
        assert part is not None
        for curve in ("allocated", "active", "reserved"):
            assert getattr(part, curve).tolist() == getattr(expected, curve)[cut:].tolist()


MIB = 1 << 20
# Blocks, most pending at an allocation and pending at the end in MiB, and the sites, largest first.
STACKED = {
    "h200x2_collectives_record_stream": (18, 416, 416, ["stack.py:18:fwd", "stack.py:16:fwd", "stack.py:19:fwd"]),
    "h200_collectives_record_stream": (5, 944, 1088, ["stack.py:16:fwd", "stack.py:18:fwd", "stack.py:19:fwd"]),
    "h200x2_p2p_record_stream": (1, 448, 576, ["p2p.py:10:once"]),
}


@pytest.mark.parametrize("name", STACKED)
def test_record_stream_stacks(recordings: Path, name: str) -> None:
    device = only_device(recordings / name)
    stacking = device["stacking"]
    blocks, most, at_end, sites = STACKED[name]
    assert values(stacking, "blocks", "max_pending_bytes", "pending_at_end_bytes") == [blocks, most * MIB, at_end * MIB]
    assert [site["site"] for site in stacking["sites"]] == [f"train/{site}" for site in sites]
    assert stacking["byte_seconds"] > 0
    assert device["peak_active_bytes"] > 6 * device["peak_allocated_bytes"]


@pytest.mark.parametrize("name", ["h200x2_collectives_held", "h200_collectives_held"])
def test_held_references_do_not_stack(recordings: Path, name: str) -> None:
    device = only_device(recordings / name)
    expected = {"blocks": 0, "max_pending_bytes": 0, "pending_at_end_bytes": 0, "byte_seconds": 0.0, "sites": []}
    expected |= {"pending_sites": []}
    assert device["stacking"] == expected
    assert device["peak_active_bytes"] == device["peak_allocated_bytes"]


# Allocated peak as the allocator states it, in GiB, and steps in the snapshot.
TRAINING = {
    "h200x2_fsdp2_connections_unset": (22.3726, range(8)),
    "h200x2_tp2": (14.4543, range(8)),
    "h200_fsdp4_ac": (3.7763, range(6)),
    "h200_fsdp2_tp2": (4.5692, range(6)),
    "h200_llama1b_untied_fsdp4_tp2": (6.2178, range(5)),
}


@pytest.mark.parametrize("name", TRAINING)
def test_training_peaks_by_step_and_category(recordings: Path, name: str) -> None:
    stated, steps = TRAINING[name]
    found = analyse(find_sources(recordings / name / "rank0_snapshot.pickle"))
    [device] = found["files"][0]["devices"]
    assert device["history"] == "complete"
    peak = device["peak_allocated_bytes"]
    assert stated * (1 - 0.0015) <= peak / 2**30 <= stated + 0.0001  # requested bytes: a little below
    assert [row["step"] for row in found["steps"]] == list(steps)
    assert {row["peak_allocated_bytes"] for row in found["steps"][1:]} == {peak}
    assert found["steps"][0]["peak_allocated_bytes"] < peak  # no optimizer state yet
    shares = {share["category"]: share["bytes"] for share in device["peak_composition"]}
    assert sum(shares.values()) == peak
    assert shares["unknown"] < 0.001 * peak
    # Adam keeps two values per parameter, of the parameter's type (plus one step count each).
    assert shares["optimizer_state"] == pytest.approx(2 * shares["parameter"], rel=1e-4)


def test_steps_of_a_trace_stand_in_where_there_is_no_snapshot(recordings: Path) -> None:
    found = analyse(find_sources(recordings / "h200x2_fsdp2_cuda_sync"))
    assert [(row["rank"], row["step"]) for row in found["steps"]] == [(0, 0), (0, 1)]
    assert all(row["peak_allocated_bytes"] > 2**31 for row in found["steps"])


def test_traces_without_memory_events_add_nothing(recordings: Path) -> None:
    found = analyse(find_sources(recordings / "h200_fsdp4_tp2"))
    assert [file["rank"] for file in found["files"]] == [0, 1]
    assert {row["rank"] for row in found["steps"]} == {0, 1}
    assert found["errors"] == []
