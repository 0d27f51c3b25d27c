"""Every rule of the analysis on traces small enough to check by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_builder import annotation, complete, group, kernel, launch, nccl, operator, pg, step, write

from harness.sources import find_sources
from harness.trace import analyse, collective_counts, read_captures
from harness.trace.classify import Label, collective_kind, is_nccl, is_symmetric
from harness.trace.intervals import clip, intersection, subtract, union


def one(path: Path) -> dict[str, Any]:
    result = analyse(find_sources(path))
    assert result["errors"] == []
    [entry] = result["ranks"]
    return dict(entry)


def test_every_key_of_the_contract(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [step(1, 0, 100), launch(1, 1), kernel("gemm", 10, 20, correlation=1)])
    result = analyse(find_sources(path))
    assert set(result) == {"schema_version", "mode", "ranks", "cross_rank", "errors"}
    assert result["schema_version"] == 1
    assert result["mode"] == "imported"
    window = {"comm_ns", "compute_ns", "memory_ns", "overlap_ns", "exposed_ns", "idle_ns", "span_ns", "overlap_pct"}
    [entry] = result["ranks"]
    assert set(entry["window"]) == window
    assert set(entry["steps"][0]) == {"step", "rule"} | window
    assert set(entry["unattributed"]) == {"count", "comm_ns", "compute_ns"}
    breakdown = {"step", "compute_ns", "exposed", "exposed_memory_ns", "idle_ns", "idle_host_ns", "span_ns"}
    assert set(entry["breakdown"][0]) == breakdown
    keys = "rank file device source window steps unattributed breakdown units collectives dimensions dropped notes"
    assert set(keys.split()) <= set(entry)
    assert set(result["cross_rank"]) == {"aligned", "collectives", "notes"}
    json.dumps(result, allow_nan=False)


def test_communication_is_never_decided_by_stream(tmp_path: Path) -> None:
    """Metadata makes any kernel communication; a kernel on NCCL's stream computes."""
    events = [
        kernel("ncclDevKernel_Generic", 0, 10, stream=7, **group("1", "mesh_tp", [0, 1], "all_to_allv")),
        kernel("my_own_kernel", 20, 10, stream=7, **group("1", "mesh_tp", [0, 1], "_allgather_base")),
        kernel("elementwise", 40, 10, stream=20),
        nccl("AllReduce", 60, 10),
    ]
    entry = one(write(tmp_path / "t.json", events))
    assert (entry["window"]["comm_ns"], entry["window"]["compute_ns"]) == (30_000, 10_000)
    kinds = {(c["kind"], c["dimension"], c["group"]) for c in entry["collectives"]}
    assert kinds == {
        ("all_to_all", "mesh_tp", "1"),
        ("all_gather", "mesh_tp", "1"),
        ("all_reduce", "no group data", None),
    }


def test_symmetric_memory_is_included_and_repeated(tmp_path: Path) -> None:
    events = [kernel("multimem_all_reduce_kernel<bf16>", 0, 10), nccl("AllGather", 20, 5), kernel("gemm", 5, 10)]
    entry = one(write(tmp_path / "t.json", events))
    assert entry["window"]["comm_ns"] == 15_000
    assert entry["symmetric_comm_ns"] == 10_000
    assert {c["kind"] for c in entry["collectives"]} == {"all_reduce", "all_gather"}
    assert any("symmetric" in note for note in entry["notes"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_allgather_base", "all_gather"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("allreduce_coalesced", "all_reduce"),
        ("all_to_allv", "all_to_all"),
        ("_broadcast_oop", "broadcast"),
        ("_reduce_oop", "reduce"),
        ("barrier", "barrier"),
        ("send", "send"),
        ("recv", "recv"),
        ("gather", "other"),
        ("scatter", "other"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclReduceScatterRingLLKernel_sum_f32", "reduce_scatter"),
        ("void vllm::cross_device_reduce_1stage<half, 2>(x)", "all_reduce"),
        ("void deep_ep::internode_ll::dispatch<true>(x)", "all_to_all"),
        ("ncclDevKernel_Generic(x)", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert collective_kind(name) == kind


@pytest.mark.parametrize(
    "name",
    [
        "c10d::symmetric_memory::two_shot_all_reduce_kernel",
        "one_shot_all_reduce_kernel",
        "multimem_one_shot_all_reduce_kernel",
        "void vllm::cross_device_reduce_2stage<half, 8>",
        "nvshmemi_transfer",
    ],
)
def test_symmetric_names(name: str) -> None:
    assert is_symmetric(Label(name))
    assert not is_nccl(Label(name))


@pytest.mark.parametrize("name", ["triton_red_fused_sum_0", "cutlass_gemm", "reduce_kernel<512>", "incclude", ""])
def test_compute_names(name: str) -> None:
    assert not is_symmetric(Label(name))
    assert not is_nccl(Label(name))


def test_dimension_names(tmp_path: Path) -> None:
    config = [
        pg("0", "default_pg", [0, 1, 2, 3]),
        pg("1", "mesh_dp", [0, 2]),
        pg("2", "undefined", [0, 2]),
        pg("3", "undefined", [0, 3]),
    ]
    named = [
        group("1", "mesh_dp", [0, 2]),
        group("1", None, [0, 2]),
        group("2", "undefined", [0, 2]),
        group("3", "undefined", [0, 3]),
        group("0", "default_pg", [0, 1, 2, 3]),
    ]
    events = [nccl("AllReduce", 10 * index, 5, **args) for index, args in enumerate(named)] + [nccl("AllReduce", 90, 5)]
    path = write(tmp_path / "run" / "rank0.json", events, world_size=4, pg_config=config)
    captures, _ = read_captures(find_sources(path))
    found = [record.dimension for record in captures[0].records()]
    # 2 has the ranks of mesh_dp; 3 has no name anywhere.
    assert found == ["mesh_dp", "mesh_dp", "mesh_dp", "no group data", "world", "no group data"]

    (tmp_path / "run" / "manifest.json").write_text(json.dumps({"mode": "cpu", "mesh": {"dp_shard": [0, 1, 2, 3]}}))
    sources = find_sources(tmp_path / "run")
    assert (sources.recording, sources.mode) == (True, "cpu")
    captures, _ = read_captures(sources)
    assert captures[0].records()[4].dimension == "mesh_dp_shard"
    assert analyse(sources)["mode"] == "cpu"


def test_steps_by_both_rules_and_unattributed(tmp_path: Path) -> None:
    events = [
        step(1, 0, 100),
        step(2, 100, 100),
        launch(10, 1),
        launch(110, 2),
        launch(205, 3),
        launch(120, 9),
        kernel("gemm", 150, 100, correlation=1),
        nccl("AllReduce", 180, 40, correlation=2),
        kernel("gemm", 300, 10, correlation=3),
        kernel("before", 0, 5, correlation=77),
        nccl("AllReduce", 5, 5),
    ]
    entry = one(write(tmp_path / "t.json", events))
    steps = {(s["step"], s["rule"]): (s["comm_ns"], s["compute_ns"], s["span_ns"]) for s in entry["steps"]}
    assert steps == {
        (1, "launch"): (0, 100_000, 100_000),
        (1, "clip"): (5_000, 5_000, 100_000),
        (2, "launch"): (40_000, 0, 40_000),
        (2, "clip"): (20_000, 50_000, 100_000),
    }
    assert entry["unattributed"] == {"count": 2, "comm_ns": 5_000, "compute_ns": 5_000}
    assert any("1 events were launched outside" in note for note in entry["notes"])
    assert any("1 launches have no device event" in note for note in entry["notes"])
    assert any("2 events have no launch" in note for note in entry["notes"])


def test_empty_step_window(tmp_path: Path) -> None:
    entry = one(write(tmp_path / "t.json", [step(1, 50, 0), kernel("gemm", 0, 100)]))
    for measured in entry["steps"]:
        assert (measured["step"], measured["span_ns"], measured["comm_ns"]) == (1, 0, 0)
        assert measured["overlap_pct"] is None


def test_breakdown_adds_up_to_the_span(tmp_path: Path) -> None:
    events = [
        step(1, 0, 100),
        *(launch(index, index) for index in range(1, 5)),
        kernel("gemm", 10, 30, correlation=1),
        nccl("AllReduce", 30, 30, correlation=2, **group("1", "mesh_tp", [0, 1])),
        complete("gpu_memcpy", "Memcpy HtoD", 55, 10, args={"device": 0, "stream": 9, "correlation": 3}),
        kernel("gemm", 90, 10, correlation=4),
    ]
    [item] = one(write(tmp_path / "t.json", events))["breakdown"]
    assert item == {
        "step": 1,
        "compute_ns": 40_000,
        "exposed": {"mesh_tp": 20_000},
        "exposed_memory_ns": 5_000,
        "idle_ns": 25_000,
        "idle_host_ns": 0,
        "span_ns": 90_000,
    }


@pytest.mark.parametrize(
    ("launched", "starved"),
    [
        ((1, 2, 3), 0),  # all launched at once: the gaps are waits for other streams
        ((1, 45, 75), 5_000 + 15_000),  # 40 to 45 and 60 to 75: nothing is queued
        ((1, 2, 75), 15_000),  # the second one waits on the device from 40 to 50
        ((1, 75, 3), 0),  # the clock of the second launch is off: its kernel ran before; the third one is queued
    ],
)
def test_idle_for_the_host_is_when_nothing_is_launched(tmp_path: Path, launched: tuple[int, ...], starved: int) -> None:
    """Three kernels at 10 to 40, 50 to 60 and 80 to 90 µs; idle is 30 µs of 80."""
    times = ((10, 30), (50, 10), (80, 10))
    events = [
        step(1, 0, 100),
        *(launch(at, number) for number, at in enumerate(launched, start=1)),
        *(kernel("gemm", start, dur, correlation=number) for number, (start, dur) in enumerate(times, start=1)),
    ]
    [item] = one(write(tmp_path / "t.json", events))["breakdown"]
    assert (item["idle_ns"], item["idle_host_ns"]) == (30_000, starved)


def test_units_and_phases(tmp_path: Path) -> None:
    """The innermost range names the unit: a prefetch inside another unit's hook is the prefetched unit's."""
    events = [
        annotation("FSDP::pre_forward (layers.0)", 0, 10),
        annotation("FSDP::all_gather (layers.0)", 1, 5),
        launch(2, 1),
        annotation("FSDP::pre_backward (layers.1)", 20, 10, tid=200),
        annotation("FSDP::backward_prefetch for layers.0", 21, 8, tid=200),
        annotation("FSDP::all_gather (layers.0)", 22, 5, tid=200),
        launch(23, 2, tid=200),
        annotation("FSDP::post_backward_reduce (layers.1)", 40, 10, tid=200),
        launch(41, 3, tid=200),
        launch(60, 4),
        nccl("AllGather", 100, 10, correlation=1),
        nccl("AllGather", 120, 20, correlation=2),
        nccl("ReduceScatter", 150, 30, correlation=3),
        nccl("AllReduce", 200, 40, correlation=4),
    ]
    entry = one(write(tmp_path / "t.json", events))
    assert [(u["unit"], u["phase"], u["kind"], u["comm_ns"]) for u in entry["units"]] == [
        ("layers.0", "forward", "all_gather", 10_000),
        ("layers.0", "backward", "all_gather", 20_000),
        ("layers.1", "backward", "reduce_scatter", 30_000),
    ]


def test_devices_of_one_file_are_apart(tmp_path: Path) -> None:
    events = [kernel("gemm", 0, 10), nccl("AllReduce", 0, 10)]
    events[1]["args"]["device"] = 1
    entries = analyse(find_sources(write(tmp_path / "t.json", events)))["ranks"]
    assert [(e["device"], e["window"]["comm_ns"], e["window"]["compute_ns"]) for e in entries] == [
        (0, 0, 10_000),
        (1, 10_000, 0),
    ]


def test_device_events_leave_host_intervals_out(tmp_path: Path) -> None:
    events = [kernel("gemm", 0, 10), annotation("gloo:all_reduce", 0, 99), operator("aten::mm", 0, 99)]
    entry = one(write(tmp_path / "t.json", events))
    assert (entry["source"], entry["window"]["span_ns"]) == ("device", 10_000)


def test_waits_across_ranks(tmp_path: Path) -> None:
    """Sequence numbers match where there are any: rank 1's trace lacks the first collective."""
    args = group("1", "mesh_dp", [0, 1])
    first = [nccl("AllReduce", 10, 40, **args, Seq=5), nccl("AllReduce", 100, 50, **args, Seq=6)]
    write(tmp_path / "rank0.json", first, baseTimeNanoseconds=10**18)
    write(tmp_path / "rank1.json", [nccl("AllReduce", 130, 20, **args, Seq=6)], rank=1, baseTimeNanoseconds=10**18)
    across = analyse(find_sources(tmp_path))["cross_rank"]
    assert across["aligned"] is True
    assert across["collectives"] == [
        {
            "kind": "all_reduce",
            "group": "1",
            "dimension": "mesh_dp",
            "transfer_ns": 20_000,
            "wait_ns": {"0": 30_000, "1": 0},
            "last_rank": 1,
        }
    ]
    assert any("1 collectives are matched of 1 to 2" in note for note in across["notes"])


def test_clocks_that_disagree_leave_only_the_transfer(tmp_path: Path) -> None:
    args = group("1", "mesh_dp", [0, 1, 2])
    write(tmp_path / "rank0.json", [nccl("AllReduce", 0, 40, **args)])
    write(tmp_path / "rank1.json", [nccl("AllReduce", 500, 30, **args)], rank=1)
    across = analyse(find_sources(tmp_path))["cross_rank"]
    [found] = across["collectives"]
    assert (across["aligned"], found["transfer_ns"]) == (False, 30_000)
    assert (found["wait_ns"], found["last_rank"]) == (None, None)
    assert any("2 of its 3 ranks" in note for note in across["notes"])


def test_a_send_and_a_receive_match(tmp_path: Path) -> None:
    for rank, kind in enumerate(("send", "recv")):
        events = [nccl("SendRecv", 10, 20, **group("1", "pp", [0, 1], kind))]
        write(tmp_path / f"rank{rank}.json", events, rank=rank)
    assert [c["kind"] for c in analyse(find_sources(tmp_path))["cross_rank"]["collectives"]] == ["send_recv"]


def test_iterations_of_one_rank_are_captures_in_time(tmp_path: Path) -> None:
    for iteration, ts in ((20, 5000), (10, 0)):
        events = [step(iteration, ts, 100), nccl("AllReduce", ts, 10)]
        for rank in (0, 1):
            path = tmp_path / f"profiling/traces/iteration_{iteration}/rank{rank}_trace.json"
            write(path, events, rank=rank)
    result = analyse(find_sources(tmp_path))
    assert result["errors"] == []
    found = [(e["rank"], e["iteration"], e["steps"][0]["step"]) for e in result["ranks"]]
    assert found == [(0, 10, 10), (0, 20, 20), (1, 10, 10), (1, 20, 20)]
    assert len(result["cross_rank"]["collectives"]) == 2


def test_a_rank_without_one_of_the_iterations(tmp_path: Path) -> None:
    for iteration, rank in ((10, 0), (20, 0), (20, 1)):
        path = tmp_path / f"iteration_{iteration}/rank{rank}_trace.json"
        write(path, [nccl("AllReduce", 1000 * iteration, rank + 1)], rank=rank)
    across = analyse(find_sources(tmp_path))["cross_rank"]
    assert [(c["transfer_ns"], c["wait_ns"]) for c in across["collectives"]] == [(1_000, {"0": 0, "1": 1_000})]


def test_rank_of_the_trace_goes_before_its_name(tmp_path: Path) -> None:
    entry = one(write(tmp_path / "rank3_trace.json", [kernel("gemm", 0, 1)], rank=1))
    assert entry["rank"] == 1
    assert any("file name says rank 3" in note for note in entry["notes"])
    entry = one(write(tmp_path / "x" / "rank-4.json", [kernel("gemm", 0, 1)], rank=None))
    assert entry["rank"] == 4


def test_bytes_are_those_of_the_full_side(tmp_path: Path) -> None:
    sizes = {"In msg nelems": 100, "Out msg nelems": 400, "dtype": "BFloat16"}
    scattered = {"In msg nelems": 400, "Out msg nelems": 100, "dtype": "Float"}
    events = [
        nccl("AllGather", 0, 1, **group("1", "mesh_dp", [0, 1], "_allgather_base", **sizes)),
        nccl("AllGather", 5, 1, **group("1", "mesh_dp", [0, 1], "_allgather_base", **sizes)),
        nccl("ReduceScatter", 10, 1, **group("1", "mesh_dp", [0, 1], "_reduce_scatter_base", **scattered)),
        nccl("AllReduce", 20, 1),
    ]
    captures, _ = read_captures(find_sources(write(tmp_path / "t.json", events)))
    counts = {(c["kind"]): (c["count"], c["bytes"]) for c in collective_counts(captures[0].records())}
    assert counts == {"all_gather": (2, 1600), "reduce_scatter": (1, 1600), "all_reduce": (1, None)}


def test_intervals_against_sets_of_moments() -> None:
    random = np.random.default_rng(7)
    for _ in range(300):
        sets, moments = [], []
        for size in random.integers(0, 8, 2):
            start = random.integers(0, 30, size)
            end = start + random.integers(0, 6, size)
            sets.append(union(start, end))
            moments.append({t for a, b in zip(start, end, strict=True) for t in range(a, b)})
        a, b = sets
        results = [a, intersection(a, b), subtract(a, b), clip(a, 5, 20)]
        wanted = [moments[0], moments[0] & moments[1], moments[0] - moments[1], moments[0] & set(range(5, 20))]
        for found, want in zip(results, wanted, strict=True):
            assert found.total_ns() == len(want)
            assert {t for x, y in zip(*found, strict=True) for t in range(x, y)} == want
            assert (found.end > found.start).all()
            assert (found.start[1:] >= found.end[:-1]).all()
