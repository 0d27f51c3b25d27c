"""The recorder on a real GPU: allocator statistics, snapshots, device traces, NVML, running out of memory."""

import gzip
import json
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

from harness.config import Window
from harness.memory.device import analyse_device, summarise
from harness.memory.snapshot import read_snapshot
from harness.record import Recorder
from harness.recording import read_recording, snapshot_path, trace_path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MB = 1 << 20
OFF = Recorder.Config(trace=Window(), memory=Window())
MEASURES = ("allocated", "active", "reserved", "requested")


# What `torch.cuda._sleep` takes to keep the device busy for about half a second at 2 GHz.
BUSY_CYCLES = 1_000_000_000


def train(directory: Path, steps: int, config: Recorder.Config) -> dict[int, list[dict[str, Any]]]:
    model = nn.Sequential(*[nn.Linear(1024, 1024, device="cuda") for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with Recorder(directory, config=config, tokens_per_step=512, flops_per_token=6 * 4 * 1024**2) as recorder:
        recorder.watch(model, optimizer)
        for _ in range(steps):
            with recorder.step():
                with recorder.phase("forward"):
                    loss = model(torch.randn(512, 1024, device="cuda")).square().mean()
                with recorder.phase("backward"):
                    loss.backward()
                with recorder.phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
                recorder.log(loss=loss)
    return read_recording(directory).steps


def test_rows_hold_the_allocators_figures(tmp_path: Path) -> None:
    rows = train(tmp_path, 4, OFF)[0]
    for row in rows:
        assert row["memory_source"] == "cuda_allocator"
        for measure in MEASURES:
            assert 0 < row[f"{measure}_bytes"] <= row[f"peak_{measure}_bytes"]
            assert max(p[f"peak_{measure}_bytes"] for p in row["phases"].values()) <= row[f"peak_{measure}_bytes"]
        assert row["peak_allocated_bytes"] <= row["peak_active_bytes"] <= row["peak_reserved_bytes"]
        assert (row["alloc_retries"], row["ooms"]) == (0, 0)
        assert row["tflops_per_s"] > 0
    # Nothing changes from the second step on, so peaks repeat to the byte.
    assert rows[2]["peak_allocated_bytes"] == rows[3]["peak_allocated_bytes"]
    read = read_recording(tmp_path)
    device = read.ranks[0]["device"]
    assert device["uuid"].startswith("GPU-")
    assert read.manifest["mode"] == "real"
    assert read.manifest["versions"]["cuda"]
    reason = [note for note in read.ranks[0]["notes"] if note.startswith("NVML")]
    assert rows[0]["nvml_process_bytes"] is not None or reason
    if rows[0]["nvml_process_bytes"] is not None:
        assert rows[0]["nvml_process_bytes"] >= rows[0]["reserved_bytes"]


def test_a_step_does_not_wait_for_the_device(tmp_path: Path) -> None:
    host_s, rows_written = [], []
    with Recorder(tmp_path, config=OFF) as recorder:
        for step in range(4):
            before = time.perf_counter()
            with recorder.step():
                # The first step is short: in it kernels are loaded and pinned memory is allocated, which may wait.
                torch.cuda._sleep(BUSY_CYCLES if step else 1000)
                value = torch.full((), float(step), device="cuda")
                recorder.log(loss=value, half=value.bfloat16(), given=2)
                value.add_(10)  # before the end of the step, so it counts
            host_s.append(time.perf_counter() - before)
            rows_written.append(len(read_recording(tmp_path).steps[0]))
            if step == 0:
                torch.cuda.synchronize()
                started = time.perf_counter()
    total_ns = (time.perf_counter() - started) * 1e9
    rows = read_recording(tmp_path).steps[0]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["loss"] for row in rows] == [10.0, 11.0, 12.0, 13.0]
    assert [row["scalars"] for row in rows] == [{"half": float(step), "given": 2.0} for step in range(4)]
    assert {row["wall_source"] for row in rows} == {"cuda_events"}
    walls = [row["wall_ns"] for row in rows[1:]]
    assert min(walls) > 0.1e9
    assert sum(walls) <= total_ns
    # The first long step was only enqueued; the end of the second waited for it.
    assert host_s[1] * 1e9 < walls[0] / 2
    assert rows_written[1:] == [1, 2, 3]


def test_logging_does_not_allocate_on_the_device(tmp_path: Path) -> None:
    with Recorder(tmp_path, config=OFF) as recorder:
        for _ in range(3):
            with recorder.step():
                value = torch.zeros((), device="cuda")
                before = torch.cuda.memory_stats()["allocation.all.allocated"]
                recorder.log(loss=value)
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_nvml_is_sampled_beside_the_steps(tmp_path: Path) -> None:
    with Recorder(tmp_path, config=OFF) as recorder:
        with recorder.step():
            pass
        time.sleep(2.5)
        with recorder.step():
            pass
        with recorder.step():
            pass
    assert not [thread for thread in threading.enumerate() if thread.name == "meshscope-nvml"]
    first, second, third = read_recording(tmp_path).steps[0]
    assert first["nvml_device_bytes"] > 0
    assert second["nvml_device_bytes"] > 0
    assert third["nvml_device_bytes"] is None


def run_device_assert(rank: int, directory: Path) -> None:
    values, beyond = torch.zeros(2, device="cuda"), torch.tensor([7], device="cuda")
    values[beyond - 7].sum().item()  # loading a kernel waits for the device, which must not happen below
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    with Recorder(directory, config=OFF, device="cuda") as recorder, recorder.step():
        torch.cuda._sleep(BUSY_CYCLES)  # so that the host has ended the step before the device comes to the error
        values[beyond].sum()


@pytest.mark.distributed
def test_an_error_of_the_device_that_no_call_reported(tmp_path: Path) -> None:
    # In a process of its own: nothing runs on the device after it.
    with pytest.raises(ProcessRaisedException, match="device-side assert"):
        spawn(run_device_assert, args=(tmp_path,), nprocs=1)
    read = read_recording(tmp_path)
    assert "device-side assert" in read.failed_ranks[0]
    (row,) = read.steps[0]
    assert (row["wall_ns"], "unfinished" in row["tags"]) == (None, True)


def test_phase_peaks_are_those_of_the_phase(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    with Recorder(tmp_path, config=OFF) as recorder, recorder.step():
        base = torch.cuda.memory_allocated()
        with recorder.phase("forward"):
            a = torch.empty(8 * MB, dtype=torch.uint8, device="cuda")
            b = torch.empty(16 * MB, dtype=torch.uint8, device="cuda")
            del b
        c = torch.empty(32 * MB, dtype=torch.uint8, device="cuda")  # between phases: counts for the step
        del c
        with recorder.phase("backward"):
            d = torch.empty(4 * MB, dtype=torch.uint8, device="cuda")
    (row,) = read_recording(tmp_path).steps[0]
    assert row["phases"]["forward"]["peak_allocated_bytes"] == base + 24 * MB
    assert row["phases"]["backward"]["peak_allocated_bytes"] == base + 12 * MB
    assert row["peak_allocated_bytes"] == base + 40 * MB
    assert row["allocated_bytes"] == base + 12 * MB
    del a, d


def test_snapshot_tells_step_phase_and_category(tmp_path: Path) -> None:
    rows = train(tmp_path, 5, Recorder.Config(trace=Window(), memory=Window(start=2, steps=2)))[0]
    assert [("memory_history" in row["tags"]) for row in rows] == [False, False, True, True, False]
    path = snapshot_path(tmp_path, 4, 0)
    data = path.read_bytes()
    assert data[:2] == b"\x80\x04"  # pickle protocol 4
    snapshot = pickle.loads(data)
    events = [event for trace in snapshot["device_traces"] for event in trace]
    assert {"alloc", "free_requested", "free_completed"} <= {event["action"] for event in events}
    assert any("test_cuda.py" in frame["filename"] for event in events for frame in event.get("frames", []))
    annotations = {a["name"] for a in snapshot["external_annotations"]}
    assert {"ProfilerStep#2", "ProfilerStep#3", "forward", "backward", "optimizer"} <= annotations
    if hasattr(torch.cuda.memory, "_set_memory_metadata"):
        labels = {event.get("user_metadata") for event in events if event["action"] == "alloc"}
        assert "category=activation;phase=forward;step=2" in labels
    held = {(label["category"], label["name"]): label for label in snapshot["meshscope_labels"]}
    weight = held["parameter", "0.weight"]
    assert weight["size"] == 4 * 1024 * 1024
    blocks = {block["address"] for segment in snapshot["segments"] for block in segment["blocks"]}
    assert weight["address"] in blocks
    assert ("optimizer_state", "0.weight.exp_avg") in held
    (device,) = read_snapshot(path).devices
    shares = {share.name: share.bytes for share in summarise(analyse_device(device)).by_category}
    weights = 4 * 4 * (1024 * 1024 + 1024)
    assert (shares["parameter"], shares["optimizer_state"]) == (weights, 2 * weights + 8 * 4)
    # The history is off again.
    assert not torch.cuda.memory._snapshot()["device_traces"][0][len(events) + 1 :]


def test_trace_has_kernels_inside_the_recorders_steps(tmp_path: Path) -> None:
    train(tmp_path, 5, Recorder.Config(trace=Window(start=2, steps=2), memory=Window(start=2, steps=2)))
    with gzip.open(trace_path(tmp_path, 4, 0)) as file:
        trace = json.load(file)
    assert trace["distributedInfo"]["rank"] == 0
    events = trace["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    launched = {e["args"]["correlation"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    assert kernels
    assert all(e["args"]["correlation"] in launched for e in kernels), "a kernel of the step before is in the trace"
    names = {e["name"] for e in events if e.get("cat") == "user_annotation"}
    assert {"ProfilerStep#2", "ProfilerStep#3", "forward"} <= names
    assert not {"ProfilerStep#1", "ProfilerStep#4"} & names


def run_out_of_memory(directory: Path, config: Recorder.Config) -> None:
    with Recorder(directory, config=config) as recorder:
        with recorder.step():
            torch.ones(MB, device="cuda")
        with recorder.step(), recorder.phase("forward"):
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("window", [Window(), Window(start=1, steps=1)])
def test_running_out_of_memory_leaves_a_snapshot(tmp_path: Path, window: Window) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        run_out_of_memory(tmp_path, Recorder.Config(trace=Window(), memory=window))
    read = read_recording(tmp_path)
    assert read.failed_ranks[0].startswith("OutOfMemoryError: CUDA out of memory")
    failed = read.ranks[0]["failed_step"]
    assert (failed["step"], failed["phase"], failed["ooms"]) == (1, "forward", 1 + read.steps[0][0]["ooms"])
    snapshot = pickle.loads(snapshot_path(tmp_path, 1, 0, at_exit=True).read_bytes())
    actions = {event["action"] for trace in snapshot["device_traces"] for event in trace}
    assert ("oom" in actions) == (window.steps > 0)
