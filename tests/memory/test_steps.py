"""Peaks per step and per phase, from every source they can come from."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from harness.memory import analyse, analyse_sources
from harness.memory.device import trace_device_json
from harness.memory.ranges import phase_of_range, step_of_range
from harness.memory.replay import replay
from harness.memory.snapshot import parse_snapshot
from harness.memory.steps import RangePeaks, phase_peaks, step_peaks
from harness.memory.trace_events import read_trace_memory
from harness.sources import find_sources

from .build import MIB, Allocator, snapshot_of, write


class Ranges:
    """Range edges at the allocator's clock."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.edges: list[dict[str, Any]] = []

    def edge(self, name: str, stage: str) -> None:
        self.allocator.clock_us += 1
        self.edges.append({"name": name, "stage": stage, "device": 0, "time_us": self.allocator.clock_us})


def two_steps() -> dict[str, Any]:
    allocator = Allocator()
    ranges = Ranges(allocator)
    allocator.segment(10_000)
    state = allocator.alloc(100)
    ranges.edge("ProfilerStep#4", "START")
    ranges.edge("forward", "START")
    a = allocator.alloc(1000)
    ranges.edge("forward", "END")
    ranges.edge("backward", "START")
    allocator.request(a)
    b = allocator.alloc(500)
    allocator.complete(a)
    ranges.edge("backward", "END")
    ranges.edge("ProfilerStep#4", "END")
    ranges.edge("step/5", "START")
    allocator.free(b)
    ranges.edge("Optimizer.step#AdamW.step", "START")
    allocator.free(state)
    ranges.edge("Optimizer.step#AdamW.step", "END")
    return snapshot_of(allocator, annotations=ranges.edges)


def peaks_of(content: dict[str, Any], what: Any) -> Any:
    snapshot = parse_snapshot(content)
    timelines = [timeline for device in snapshot.devices if (timeline := replay(device))]
    return what(snapshot, timelines)


def test_steps_from_ranges_count_what_was_there_at_their_start() -> None:
    assert peaks_of(two_steps(), step_peaks) == {
        4: RangePeaks(1100, 1600, 10_000),
        5: RangePeaks(600, 600, 10_000),  # still open when the snapshot was taken
    }


def test_phases_from_ranges() -> None:
    found = peaks_of(two_steps(), phase_peaks)
    assert list(found) == ["forward", "backward", "optimizer"]
    assert found["forward"] == RangePeaks(1100, 1100, 10_000)
    assert found["backward"] == RangePeaks(1100, 1600, 10_000)
    assert found["optimizer"] == RangePeaks(100, 100, 10_000)


def test_phases_from_labels() -> None:
    allocator = Allocator()
    a = allocator.alloc(1000, metadata="category=activation;phase=forward;step=1")
    allocator.alloc(500, metadata="phase=backward")
    allocator.free(a)
    found = peaks_of(snapshot_of(allocator), phase_peaks)
    assert found == {"forward": RangePeaks(1000, 1000, 0), "backward": RangePeaks(1500, 1500, 0)}


def test_steps_before_a_truncated_history_are_unknown() -> None:
    content = two_steps()
    content["device_traces"][0] = content["device_traces"][0][-4:]
    assert list(peaks_of(content, step_peaks)) == [5]


def test_ranges_without_times_give_no_steps() -> None:
    content = two_steps()
    for event in content["device_traces"][0]:
        del event["time_us"]
    assert peaks_of(content, step_peaks) == {}


@pytest.mark.parametrize(
    ("name", "step", "phase"),
    [
        ("ProfilerStep#12", 12, None),
        ("step/3", 3, None),
        ("forward", None, "forward"),
        ("phase/optimizer", None, "optimizer"),
        ("Optimizer.step#SGD.step", None, "optimizer"),
        ("Optimizer.zero_grad#SGD.zero_grad", None, None),
        ("FSDP::pre_forward", None, None),
        ("ProfilerStep#", None, None),
    ],
)
def test_names_of_ranges(name: str, step: int | None, phase: str | None) -> None:
    assert (step_of_range(name), phase_of_range(name)) == (step, phase)


def row(step: int, peak: int | None) -> str:
    sizes = {f"peak_{name}_bytes": peak for name in ("allocated", "active", "reserved")}
    return json.dumps({"step": step, **sizes, "phases": {"forward": sizes}}) + "\n"


def recording(folder: Path, rows: str) -> Path:
    (folder / "steps").mkdir(parents=True)
    (folder / "steps" / "rank2.jsonl").write_text(rows)
    (folder / "manifest.json").write_text('{"schema_version": 1, "mode": "real", "recorded_ranks": [2]}')
    (folder / "status.json").write_text('{"schema_version": 1, "state": "complete", "reason": null}')
    (folder / "profiling").mkdir()
    write(folder / "profiling" / "000002_step_6.pickle", two_steps())
    write(folder / "profiling" / "000003_step_6.pickle", two_steps())
    return folder


def test_rows_of_a_recording_go_before_ranges_of_a_snapshot(tmp_path: Path) -> None:
    analysis = analyse_sources(find_sources(recording(tmp_path, row(0, 70) + row(1, 90))))
    found = analysis.to_json()
    assert found["mode"] == "real"
    assert found["errors"] == []
    steps = [(row["rank"], row["step"], row["peak_allocated_bytes"]) for row in found["steps"]]
    assert steps == [(2, 0, 70), (2, 1, 90), (3, 4, 1100), (3, 5, 600)]
    assert analysis.phases[2, "forward"] == RangePeaks(90, 90, 90)


def test_a_torn_last_row_is_left_out_and_reported(tmp_path: Path) -> None:
    whole = row(0, 70)
    folder = recording(tmp_path, whole + row(1, 90)[:-9])
    found = analyse(find_sources(folder))
    assert [row["step"] for row in found["steps"] if row["rank"] == 2] == [0]
    [error] = found["errors"]
    assert error["file"].endswith("rank2.jsonl")
    assert error["offset"] == len(whole)
    assert "torn" in error["reason"]


def test_rows_without_device_memory_leave_steps_to_the_snapshot(tmp_path: Path) -> None:
    found = analyse(find_sources(recording(tmp_path, row(0, None))))
    assert [row["step"] for row in found["steps"] if row["rank"] == 2] == [4, 5]


def memory_event(ts: float, size: int, total: int | None, device: int = 0, kind: int = 1) -> dict[str, Any]:
    args: dict[str, Any] = {"Device Type": kind, "Device Id": device, "Addr": 1, "Bytes": size}
    if total is not None:
        args |= {"Total Allocated": total, "Total Reserved": 2 * MIB}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": ts, "args": args}


def trace(path: Path, *events: dict[str, Any], rank: int | None = 5) -> Path:
    info = {} if rank is None else {"distributedInfo": {"rank": rank}}
    path.write_bytes(gzip.compress(json.dumps({**info, "traceEvents": list(events)}).encode()))
    return path


def step_range(number: int, ts: float, dur: float, cat: str = "user_annotation") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": f"ProfilerStep#{number}", "ts": ts, "dur": dur}


def test_memory_events_of_a_trace(tmp_path: Path) -> None:
    path = trace(
        tmp_path / "rank0_trace.json.gz",
        memory_event(0, 1000, 1000),
        memory_event(2, 500, 1500),
        memory_event(2, -500, 1000),
        memory_event(3, 7, 9, device=-1, kind=0),
        memory_event(9.5, 50, 1050),
        memory_event(10, 100, 1150),
        step_range(0, 0, 10),
        step_range(0, 0, 10, cat="gpu_user_annotation"),
        step_range(1, 10, 5),
        step_range(2, 30, 5),
        {"ph": "i", "name": "[memory]", "ts": "x", "args": {}},
    )
    memory = read_trace_memory(path)
    assert memory.rank == 5
    assert memory.dropped == 1
    assert memory.steps == {
        0: RangePeaks(1500, None, 2 * MIB),
        1: RangePeaks(1150, None, 2 * MIB),
        2: RangePeaks(None, None, None),
    }
    [device] = memory.devices
    entry = trace_device_json(device, memory.dropped)
    assert (entry["history"], entry["base_allocated_bytes"]) == ("complete", 0)
    assert (entry["peak_allocated_bytes"], entry["final_allocated_bytes"]) == (1500, 1150)
    assert entry["peak_reserved_bytes"] == 2 * MIB
    assert any("1 memory event of this file left out" in note for note in entry["notes"])


@pytest.mark.parametrize("ts", [10**40, -(10**40), 2.0**60])
def test_a_time_that_no_clock_has_is_dropped(tmp_path: Path, ts: float) -> None:
    memory = read_trace_memory(trace(tmp_path / "t.json", memory_event(ts, 9, 9), memory_event(1, 4, 4)))
    assert memory.dropped == 1
    assert memory.devices[0].allocated.tolist() == [4]


def test_memory_events_without_totals_are_relative(tmp_path: Path) -> None:
    path = trace(
        tmp_path / "t.json", memory_event(1, -300, None), memory_event(0, 1000, None), memory_event(2, 100, None)
    )
    [device] = read_trace_memory(path).devices
    assert device.relative_peak_bytes == 1000
    entry = trace_device_json(device)
    assert (entry["history"], entry["base_allocated_bytes"], entry["peak_allocated_bytes"]) == ("truncated", None, None)


def test_the_same_steps_of_one_rank_twice_is_said(tmp_path: Path) -> None:
    events = (memory_event(0, 1, 1), step_range(0, 0, 10))
    trace(tmp_path / "a.json.gz", *events)
    trace(tmp_path / "b.json.gz", *events)
    found = analyse(find_sources(tmp_path))
    assert [file["rank"] for file in found["files"]] == [5, 5]
    [error] = found["errors"]
    assert error["file"].endswith("b.json.gz")
    assert "a.json.gz" in error["reason"]
