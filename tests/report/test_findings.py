"""Findings: each from the smallest input that has it, and silence without it."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from written import MIB, rewrite_steps, write_kernels, write_recording, write_snapshot, write_trace

from dashboard.places import place_of
from harness import recording
from harness.cli import main
from harness.config import Parallelism, Trainer, Training
from harness.config_json import to_dict
from harness.report import build
from harness.report.finding import SEVERITIES, Finding, ranks_text
from harness.report.findings_host import why_late
from harness.text import size

CONFIG = Trainer.Config(name="written", world_size=2, parallelism=Parallelism.Config(tp=2))
GIB = 1024 * MIB


def findings(path: Path, word: str = "") -> list[Finding]:
    return [finding for finding in build(path).findings if word in finding.title]


def trace(path: Path, *kernels: tuple[str, str | None, int, int, int], rank: int = 0) -> Path:
    return write_kernels(path / f"rank{rank}_trace.json.gz", kernels, rank=rank)


@pytest.mark.parametrize(
    ("compute_us", "severity", "share"), [(0, "high", 100.0), (850, "medium", 15.0), (1000, "info", 0.0)]
)
def test_exposed_communication_by_dimension(tmp_path, compute_us, severity, share):
    """All-gathers of 1000 µs of which `compute_us` are hidden."""
    kernels = [("_allgather_base", "mesh_dp_shard", 20, 0, 1000), ("gemm", None, 7, 0, max(compute_us, 1))]
    (found,) = findings(trace(tmp_path, *kernels).parent, "mesh_dp_shard")
    assert found.severity == severity
    assert found.evidence["exposed_pct"] == pytest.approx(share, abs=0.2)
    assert found.evidence["dominant_kind"] == "all_gather"
    assert found.where.startswith("mesh_dp_shard, rank 0")


def test_times_of_a_shared_gpu_are_never_grave(tmp_path):
    write_recording(tmp_path, manifest={"mode": "shared-gpu"}, steps=4)
    kernels = [("_allgather_base", "mesh_dp_shard", 20, 0, 1000), ("gemm", None, 7, 0, 1)]
    write_kernels(recording.trace_path(tmp_path, 4, 0), kernels)
    (found,) = findings(tmp_path, "mesh_dp_shard")
    assert found.severity == "low"
    assert "mode shared-gpu" in found.where
    assert findings(tmp_path, "the ranks share one GPU")[0].severity == "info"


def test_communication_on_the_compute_stream(tmp_path):
    kernels = [("gemm", None, 7, 0, 900), ("allreduce", "mesh_tp", 7, 900, 100), ("allreduce", "mesh_tp", 20, 0, 300)]
    (found,) = findings(trace(tmp_path, *kernels).parent, "compute stream")
    assert found.evidence["on_compute_stream_ns"] == 100_000
    assert found.evidence["on_compute_stream_pct"] == 25.0
    assert "stream 7" in found.where
    assert found.severity == "medium", "400 µs exposed of 1,000"


def test_little_communication_on_the_compute_stream_is_no_grave_matter(tmp_path):
    trace(tmp_path, ("gemm", None, 7, 0, 9_900), ("allreduce", "mesh_tp", 7, 9_900, 100))
    (found,) = findings(tmp_path, "compute stream")
    assert found.severity == "low", "100 µs exposed of 10,000"


def test_context_parallelism_gathers_keys_and_values_not_parameters(tmp_path):
    trace(tmp_path, ("_allgather_base", "mesh_cp", 20, 0, 1000), ("gemm", None, 7, 0, 500))
    (found,) = findings(tmp_path, "mesh_cp")
    assert "cp_attention=ring" in found.advice
    assert "reshard_after_forward" not in found.advice


def test_communication_beside_compute_is_no_finding(tmp_path):
    trace(tmp_path, ("gemm", None, 7, 0, 900), ("allreduce", "mesh_tp", 20, 0, 300))
    assert findings(tmp_path, "compute stream") == []


@pytest.mark.parametrize(
    ("late", "title"), [([1, 1, 1, 1], "wait for rank 1"), ([1, 0, 1, 0], "% of communication is")]
)
def test_waiting_for_a_late_rank(tmp_path, late, title):
    """Four all-reduces of 1000 µs that end together; the late rank joins 800 µs after the other."""
    for rank in range(2):
        starts = [(2000 * k + (800 if late[k] == rank else 0), 200 if late[k] == rank else 1000) for k in range(4)]
        trace(tmp_path, *(("allreduce", "mesh_dp", 20, start, dur) for start, dur in starts), rank=rank)
    (found,) = [f for f in findings(tmp_path) if "wait_ns" in f.evidence]
    assert title in found.title
    assert found.evidence["transfer_ns"] == 800_000
    assert found.evidence["wait_ns"] == 1_600_000
    (exposed,) = findings(tmp_path, "exposed")
    assert exposed.advice.startswith("First see why ranks wait for one another (67 % of it is waiting")


def test_a_rank_is_late_because_its_device_waits_for_its_host(tmp_path):
    """Rank 1 launches its all-reduce 800 µs late and has nothing to run until then."""
    for rank, late in ((0, 0), (1, 800)):
        kernels = [("gemm", None, 7, 2, 100), ("allreduce", "mesh_dp", 20, 102 + late, 1000 - late)]
        place = tmp_path / f"rank{rank}_trace.json.gz"
        write_kernels(place, kernels, rank=rank, launched_us=[1, 101 + late])
    (found,) = [finding for finding in findings(tmp_path) if "wait_ns" in finding.evidence]
    assert "wait for rank 1" in found.title
    assert "waits for its host 73 % of a traced step" in found.advice, "799 of 1,100 µs"
    assert "is not known" in found.advice, "there are no plain steps"


@pytest.mark.parametrize(
    ("plain_ns", "whose"), [(12_000_000, "the profiler's cost"), (19_000_000, "launches too late")]
)
def test_whose_doing_it_is_that_a_rank_is_late(plain_ns, whose):
    """8 ms without a launch in a traced step of 20."""
    assert whose in str(why_late({"idle_host_ns": 8_000_000, "span_ns": 20_000_000}, plain_ns))
    assert why_late({"idle_host_ns": 800_000, "span_ns": 20_000_000}, plain_ns) is None


@pytest.mark.parametrize(
    ("plain_ms", "title", "severity"),
    [(None, "The device waits", "medium"), (12, "The profiler's own cost", "low"), (19, "The device waits", "high")],
)
def test_waiting_for_the_host_is_told_from_the_profilers_own(tmp_path, plain_ms, title, severity):
    """A traced step of 20 ms in which nothing is launched for 8: plain steps of 12 ms do not wait, those of 19 do."""
    if plain_ms is not None:
        write_recording(tmp_path, ranks=1, world_size=1, steps=6, manifest={"mode": "real"})
        rewrite_steps(tmp_path, 0, wall_ns=[plain_ms * 1_000_000] * 6)
    kernels = [("gemm", None, 7, 2, 6_000), ("gemm", None, 7, 14_002, 6_000)]
    place = tmp_path / "profiling" / "traces" / "iteration_4" / "rank0_trace.json.gz"
    write_kernels(place, kernels, world_size=1, launched_us=[1, 14_002], length_us=20_010)
    (found,) = [finding for finding in findings(tmp_path) if "idle_host_ns" in finding.evidence]
    assert found.title.startswith(title)
    assert found.severity == severity
    assert (found.evidence["idle_host_ns"], found.evidence["traced_span_ns"]) == (8_000_000, 20_000_000)
    assert "40 %" in found.title


def test_stacking_names_its_sites(tmp_path):
    write_snapshot(tmp_path / "rank0_snapshot.pickle", pending=3)
    (found,) = findings(tmp_path, "stacks up")
    assert found.severity == "high"
    assert found.evidence["max_pending_bytes"] == 300 * MIB
    assert "train.py:7:forward" in found.where


def test_what_never_became_reusable_is_named_too(tmp_path, capsys):
    """A host so far ahead that no free completes in the window: nothing stacked by definition, all is pending."""
    write_snapshot(tmp_path / "rank0_snapshot.pickle", pending=3, completes=False)
    (found,) = findings(tmp_path, "stacks up")
    assert (found.severity, found.evidence["blocks"], found.evidence["max_pending_bytes"]) == ("high", 0, 300 * MIB)
    assert "train.py:7:forward (3 blocks, 0.2930 GiB)" in found.where
    assert main(["memory", str(tmp_path), "--no-cache"]) == 0
    out = capsys.readouterr().out
    assert "pending when most was, by allocation site" in out
    assert "3 blocks  /home/me/train.py:7:forward" in out


REFERENCE, REUSE = "Hold a reference until the collective", "keep their buffers and use them again"


@pytest.mark.parametrize(
    ("collective", "torch", "memory", "reference", "reuse"),
    [
        ("_allgather_base", "2.11.0", "record_stream", True, False),
        ("_allgather_base", "2.7.1", "references", True, False),
        ("send", "2.11.0", "references", False, True),
        ("recv", "2.8.0+cu128", "references", False, True),
        ("send", "2.7.1", "references", True, True),
        ("send", "2.11.0", "record_stream", True, True),
        ("send", "unknown", "references", True, True),
    ],
)
def test_no_reference_helps_against_what_sends_stack(tmp_path, collective, torch, memory, reference, reuse):
    config = replace(CONFIG, training=Training.Config(collective_memory=memory))
    write_recording(tmp_path, config=to_dict(config), manifest={"versions": {"torch": torch}})
    write_snapshot(recording.snapshot_path(tmp_path, 4, 0), pending=3)
    kernels = [(collective, "mesh_pp", 20, 0, 1000), ("gemm", None, 7, 0, 1)]
    write_kernels(recording.trace_path(tmp_path, 4, 0), kernels)
    (found,) = findings(tmp_path, "stacks up")
    assert (REFERENCE in found.advice, REUSE in found.advice) == (reference, reuse)


@pytest.mark.parametrize(
    ("config", "reuse"),
    [
        (Trainer.Config(name="written", world_size=2, parallelism=Parallelism.Config(pp=2)), True),
        (Trainer.Config(name="written", world_size=2, workload="point_to_point"), True),
        (CONFIG, False),
    ],
)
def test_without_a_trace_the_configuration_says_whether_ranks_send(tmp_path, config, reuse):
    write_recording(tmp_path, config=to_dict(config), manifest={"versions": {"torch": "2.11.0"}})
    write_snapshot(recording.snapshot_path(tmp_path, 4, 0), pending=3)
    (found,) = findings(tmp_path, "stacks up")
    assert (REFERENCE in found.advice, REUSE in found.advice) == (not reuse, reuse)


def test_no_stacking_no_finding(tmp_path):
    write_snapshot(tmp_path / "rank0_snapshot.pickle")
    assert findings(tmp_path, "stacks up") == []


@pytest.mark.parametrize(("reserved", "severity"), [(4.4, None), (5.2, "low"), (6.0, "medium")])
def test_reserved_above_the_peak(tmp_path, reserved, severity):
    write_recording(tmp_path, peak_active_bytes=4 * GIB, peak_reserved_bytes=int(reserved * GIB))
    assert [f.severity for f in findings(tmp_path, "reserved above")] == ([] if severity is None else [severity])


@pytest.mark.parametrize("counter", ["alloc_retries", "ooms"])
def test_counters_of_the_allocator(tmp_path, counter):
    write_recording(tmp_path)
    assert [f for f in findings(tmp_path) if counter in f.evidence] == []
    rewrite_steps(tmp_path, 1, **{counter: [0, 1, 3]})
    (found,) = [f for f in findings(tmp_path) if counter in f.evidence]
    assert (found.severity, found.evidence[counter], found.where) == ("high", 3, "rank 1")


def test_ranks_that_need_unequal_memory(tmp_path):
    write_recording(tmp_path)
    assert findings(tmp_path, "unequal") == []
    rewrite_steps(tmp_path, 1, peak_allocated_bytes=[MIB, 2 * MIB, 4 * MIB])
    assert findings(tmp_path, "unequal")[0].where == "rank 0 and rank 1"


@pytest.mark.parametrize(("factor", "severity"), [(1.0, "info"), (1.05, "medium"), (1.5, "high")])
def test_how_far_the_prediction_is(tmp_path, factor, severity):
    write_recording(tmp_path, config=to_dict(CONFIG))
    predicted = build(tmp_path).prediction.ranks[0].peak_allocated_bytes
    for rank in range(2):
        rewrite_steps(tmp_path, rank, peak_allocated_bytes=[MIB, MIB, int(predicted * factor)])
    (found,) = [f for f in findings(tmp_path) if "error_pct" in f.evidence]
    assert found.severity == severity
    assert found.evidence["measured_peak_allocated_bytes"] == int(predicted * factor)


def test_a_run_without_figures_is_told_its_predicted_peak(tmp_path):
    write_recording(tmp_path, ranks=0, config=to_dict(CONFIG))
    recording.write_status(tmp_path, "failed", "rank 1: out of memory")
    predicted = max(build(tmp_path).prediction.ranks, key=lambda rank: rank.peak_allocated_bytes)
    (found,) = findings(tmp_path, "The memory peak")
    assert size(predicted.peak_allocated_bytes) in found.title
    assert found.evidence["largest_part_bytes"] == max(entry.at_peak_bytes for entry in predicted.entries)
    assert place_of(asdict(found), ()) == ("ledger", {"of_rank": predicted.rank})


def test_the_predicted_composition_is_of_the_rank_that_is_named(tmp_path):
    """Ranks of a pipeline hold unequal parts: the last one has the logits."""
    pipeline = Trainer.Config(name="written", world_size=2, parallelism=Parallelism.Config(pp=2))
    write_recording(tmp_path, config=to_dict(pipeline))
    rewrite_steps(tmp_path, 1, peak_allocated_bytes=[MIB, 2 * MIB, 4 * MIB])
    (found,) = findings(tmp_path, "Memory peaks in")
    first, last = (max(entry.at_peak_bytes for entry in rank.entries) for rank in build(tmp_path).prediction.ranks)
    assert found.where == "rank 1"
    assert found.evidence["largest_part_bytes"] == last != first


def test_collectives_that_nobody_configured(tmp_path):
    write_trace(write_recording(tmp_path, config=to_dict(CONFIG)), 0, [("broadcast", 2, 64)])
    (found,) = findings(tmp_path, "not what the configuration says")
    assert "broadcast on tp" in found.where


def test_steps_with_the_garbage_collector(tmp_path):
    write_recording(tmp_path, steps=7)
    for rank in range(2):
        tags = [["warmup"], [], ["gc"], [], [], ["gc"], []]
        rewrite_steps(tmp_path, rank, tags=tags, wall_ns=[90_000, 1000, 1500, 1000, 1000, 1500, 1000])
    (found,) = findings(tmp_path, "garbage collector take 50 % longer")
    assert found.evidence == {"gc_step_wall_ns": 1500, "step_wall_ns": 1000, "gc_steps": 2}
    assert findings(tmp_path, "The first step took 90.0 times")[0].severity == "info"


def test_a_run_of_one_step_has_no_time(tmp_path):
    write_recording(tmp_path, steps=1)
    assert findings(tmp_path, "No step tells the time")
    assert build(tmp_path).metrics["step_wall_ns"].value is None


def test_what_did_not_end_well_comes_first(tmp_path):
    write_recording(tmp_path, ranks=1)
    recording.write_status(tmp_path, "failed", "rank 1 exited: out of memory")
    found = findings(tmp_path)
    assert found[0].title == "The run failed: rank 1 exited: out of memory"
    assert found[1].where == "rank 1"
    order = [SEVERITIES.index(finding.severity) for finding in found]
    assert order == sorted(order)


def test_ranks_without_a_trace(tmp_path):
    trace(tmp_path, ("gemm", None, 7, 0, 900))
    assert findings(tmp_path, "1 of 2 ranks has a trace")


def test_text_shows_five_and_counts_the_rest(tmp_path, capsys):
    write_recording(tmp_path, config=to_dict(CONFIG), alloc_retries=1, ooms=1)
    write_trace(tmp_path, 0, [("broadcast", 2, 64)])
    recording.write_status(tmp_path, "failed", "ended")
    main(["report", str(tmp_path), "--json"])
    count = len(json.loads(capsys.readouterr().out)["findings"])
    main(["report", str(tmp_path)])
    out = capsys.readouterr().out
    assert count > 5
    assert f"{count - 5} more: --json, --html" in out
    assert "alloc_retries 2" in out


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1, 2], "ranks 0 to 2"),
        ([5, 0, 2], "ranks 0, 2, 5"),
        ([None], "rank unknown"),
        (list(range(0, 20, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 2 more"),
    ],
)
def test_ranks_are_named_shortly(ranks, text):
    assert ranks_text(ranks) == text


def test_memory_pending_before_the_history_counts_as_not_reusable(tmp_path):
    """Eight blocks were freed before it and seven of them become reusable before its first allocation."""
    size, base = 100 * MIB, 1 << 40

    def event(action, place):
        return {"action": action, "addr": base + place * size, "size": size, "stream": 0}

    events = [event("free_completed", place) for place in range(7)]
    events += [event("alloc", 8), event("free_requested", 8), event("alloc", 0)]
    events += [event("free_completed", place) for place in (8, 7)]
    events = [{"time_us": 1_000_000 + index} | item for index, item in enumerate(events)]
    blocks = [
        {"address": base + place * size, "size": size, "state": "inactive" if place else "active_allocated"}
        for place in range(9)
    ]
    segment = {"device": 0, "address": base, "total_size": 9 * size, "stream": 0, "blocks": blocks}
    snapshot = {"segments": [segment], "device_traces": [events]}
    (tmp_path / "rank0.pickle").write_bytes(pickle.dumps(snapshot, protocol=4))
    (found,) = findings(tmp_path, "stacks up")
    assert found.evidence["peak_active_bytes"] == 8 * size
    assert found.evidence["peak_allocated_bytes"] == size
    assert found.evidence["not_reusable_bytes"] == 7 * size
    assert found.evidence["max_pending_bytes"] == 2 * size
    assert "0.6836 GiB freed and not reusable at once" in found.title


def with_environment(path: Path, environment: dict[str, str], mode: str = "real", torch: str = "2.11.0+cu130") -> Path:
    write_recording(path, manifest={"mode": mode, "versions": {"torch": torch}}, ranks=1, world_size=1, steps=4)
    recording.write_json(recording.rank_path(path, 0), {"rank": 0, "environment_before": environment})
    return path


@pytest.mark.parametrize(
    ("value", "mode", "severities"),
    [
        ("1", "real", ["medium"]),
        ("2", "shared-gpu", ["low"]),
        ("8", "real", []),
        ("many", "real", []),
        ("1", "cpu", []),
    ],
)
def test_fewer_hardware_queues_than_the_default(tmp_path, value, mode, severities):
    with_environment(tmp_path, {"CUDA_DEVICE_MAX_CONNECTIONS": value}, mode)
    kernels = [("_allgather_base", "mesh_dp_shard", 20, 0, 1000), ("gemm", None, 7, 0, 1)]
    write_kernels(recording.trace_path(tmp_path, 4, 0), kernels)
    assert [finding.severity for finding in findings(tmp_path, "MAX_CONNECTIONS")] == severities


def test_few_hardware_queues_with_nothing_exposed_are_a_hint(tmp_path):
    with_environment(tmp_path, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    (found,) = findings(tmp_path, "MAX_CONNECTIONS")
    assert found.severity == "low"
    assert found.evidence["exposed_ns"] is None


@pytest.mark.parametrize(("torch", "count"), [("2.11.0+cu130", 1), ("2.7.1", 0), ("unknown", 0)])
def test_variable_that_this_torch_ignores(tmp_path, torch, count):
    with_environment(tmp_path, {"TORCH_NCCL_AVOID_RECORD_STREAMS": "0"}, torch=torch)
    assert len(findings(tmp_path, "does nothing")) == count
