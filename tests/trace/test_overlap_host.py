"""Traces without device events: calls, gloo's works and operators, small enough to check by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trace_builder import Event, annotation, operator, pg, step, write

from harness.sources import find_sources
from harness.trace import analyse, collective_counts, read_captures

CONFIG = [pg("5", "mesh_dp", [0, 1]), pg("6", "mesh_tp", [0, 1])]


def one(path: Path) -> dict[str, Any]:
    result = analyse(find_sources(path))
    assert result["errors"] == []
    [entry] = result["ranks"]
    return dict(entry)


def test_a_collective_is_its_call_and_its_work(tmp_path: Path) -> None:
    """The work gives time, the call everything else; a collective without a work is its call; compute is per thread."""
    events = [
        step(3, 0, 100),
        operator("aten::mm", 0, 20),
        operator("aten::nested", 5, 5),
        annotation("comm:reduce_scatter:mesh_dp:0:4096", 20, 4),
        operator("c10d::_reduce_scatter_base_", 21, 2),
        annotation("gloo:all_reduce", 22, 18, tid=300),
        operator("aten::add", 30, 20),
        annotation("comm:wait:mesh_dp:0", 50, 10),
        operator("aten::mul", 70, 20),
        annotation("comm:all_gather:mesh_dp:1:8192", 75, 5),
    ]
    path = write(tmp_path / "t.json", events, pg_config=CONFIG)
    entry = one(path)
    assert (entry["source"], entry["device"]) == ("host", None)
    whole = entry["window"]
    assert whole["comm_ns"] == (40 - 20 + 60 - 50 + 80 - 75) * 1000
    assert whole["compute_ns"] == (20 + 20 + 15) * 1000
    assert whole["overlap_ns"] == 10_000
    found = [
        (c["kind"], c["group"], c["count"], c["comm_ns"], c["overlap_ns"], c["sum_ns"]) for c in entry["collectives"]
    ]
    assert found == [
        ("reduce_scatter", "mesh_dp", 1, 20_000, 10_000, 18_000),
        ("all_gather", "mesh_dp", 1, 5_000, 0, 5_000),
    ]
    assert entry["collectives"][0]["raw_kinds"] == ["gloo:all_reduce", "reduce_scatter"]
    assert [(d["dimension"], d["comm_ns"], d["overlap_ns"]) for d in entry["dimensions"]] == [
        ("mesh_dp", 35_000, 10_000)
    ]
    assert {(s["step"], s["rule"]) for s in entry["steps"]} == {(3, "launch"), (3, "clip")}
    captures, _ = read_captures(find_sources(path))
    assert collective_counts(captures[0].records()) == [
        {"rank": 0, "step": 3, "dimension": "mesh_dp", "kind": "reduce_scatter", "count": 1, "bytes": 4096},
        {"rank": 0, "step": 3, "dimension": "mesh_dp", "kind": "all_gather", "count": 1, "bytes": 8192},
    ]
    assert [(r.start_ns, r.dur_ns, r.sequence) for r in captures[0].records()] == [
        (22_000, 18_000, 0),
        (75_000, 5_000, 1),
    ]


def test_a_late_work_is_of_its_calls_step_and_unit(tmp_path: Path) -> None:
    """The work starts in step 2, the call in step 1: the launch rule gives it to step 1, with the wait between."""
    events = [
        step(1, 0, 50),
        step(2, 50, 50),
        annotation("FSDP::all_gather (layers.0)", 10, 10),
        annotation("comm:all_gather:mesh_dp:0:64", 12, 3),
        annotation("gloo:all_gather", 60, 20, tid=300),
        operator("aten::mm", 65, 10),
    ]
    entry = one(write(tmp_path / "t.json", events, pg_config=CONFIG))
    steps = {(s["step"], s["rule"]): (s["comm_ns"], s["span_ns"]) for s in entry["steps"]}
    assert steps == {
        (1, "launch"): (23_000, 68_000),
        (1, "clip"): (3_000, 50_000),
        (2, "launch"): (0, 10_000),
        (2, "clip"): (20_000, 50_000),
    }
    found = [(u["unit"], u["phase"], u["kind"], u["comm_ns"], u["overlap_ns"]) for u in entry["units"]]
    assert found == [("layers.0", "forward", "all_gather", 23_000, 10_000)]


def test_two_groups_in_flight(tmp_path: Path) -> None:
    """dp's worker starts late, so tp's starts first: the kinds of the later works tell them apart."""
    events = [
        annotation("comm:all_gather:mesh_dp:0:64", 0, 1),
        annotation("comm:all_gather:mesh_tp:0:64", 2, 1),
        annotation("gloo:all_gather", 4, 10, tid=300),
        annotation("gloo:all_gather", 6, 20, tid=400),
        annotation("comm:all_reduce:mesh_tp:1:64", 30, 1),
        annotation("gloo:all_reduce", 32, 5, tid=300),
        operator("aten::mm", 10, 10),
    ]
    entry = one(write(tmp_path / "t.json", events, pg_config=CONFIG))
    found = [(c["dimension"], c["kind"], c["count"], c["comm_ns"], c["overlap_ns"]) for c in entry["collectives"]]
    assert found == [
        ("mesh_dp", "all_gather", 1, 21_000, 10_000),
        ("mesh_tp", "all_gather", 1, 11_000, 4_000),
        ("mesh_tp", "all_reduce", 1, 6_000, 0),
    ]
    assert entry["window"]["overlap_ns"] == 10_000


def test_works_without_a_recorded_call(tmp_path: Path) -> None:
    events = [
        annotation("gloo:all_reduce", 0, 10, tid=300),
        annotation("comm:all_gather:mesh_dp:0:64", 20, 2),
        annotation("gloo:all_gather", 21, 10, tid=300),
        operator("aten::mm", 5, 10),
    ]
    entry = one(write(tmp_path / "t.json", events, pg_config=CONFIG))
    found = [(d["dimension"], d["comm_ns"], d["overlap_ns"]) for d in entry["dimensions"]]
    assert found == [("mesh_dp", 11_000, 0), ("no group data", 10_000, 5_000)]
    assert [(c["kind"], c["count"]) for c in entry["collectives"]] == [("all_gather", 1)]
    assert "1 of 2 gloo works have no recorded call: their time is under no group data" in entry["notes"]


def test_gloo_without_our_ranges_goes_by_its_names(tmp_path: Path) -> None:
    events = [operator("aten::mm", 0, 20), annotation("gloo:all_reduce", 10, 20, tid=300)]
    entry = one(write(tmp_path / "t.json", events))
    assert entry["window"]["overlap_ns"] == 10_000
    found = [(c["kind"], c["dimension"], c["count"]) for c in entry["collectives"]]
    assert found == [("all_reduce", "no group data", 1)]
    assert any("misname" in note for note in entry["notes"])


def test_waiting_in_a_backward_hook_is_no_compute(tmp_path: Path) -> None:
    """FSDP2's hooks run inside autograd's nodes, and on the CPU they wait there for the reduce-scatter."""
    events = [
        operator("autograd::engine::evaluate_function: RegisterPostBackwardFunctionBackward", 0, 100),
        operator("RegisterPostBackwardFunctionBackward", 1, 98),
        operator("PythonDispatchMode", 2, 97),
        operator("aten::cat", 2, 8),
        annotation("comm:reduce_scatter:mesh_dp:0:64", 10, 5),
        operator("c10d::_reduce_scatter_base_", 11, 3),
        annotation("gloo:all_reduce", 12, 60, tid=300),
        operator("aten::add_", 80, 10),
        operator("Torch-Compiled Region: 0/0", 110, 10),
    ]
    entry = one(write(tmp_path / "t.json", events, pg_config=CONFIG))
    window = entry["window"]
    assert (window["comm_ns"], window["compute_ns"], window["overlap_ns"]) == (62_000, 28_000, 0)
    assert any("the host waited for every collective" in note for note in entry["notes"])


def test_a_send_waited_for_later_hides_no_compute(tmp_path: Path) -> None:
    """Its annotation is open until the wait: of it only the wait counts, since the last thing the thread did before."""
    events = [
        step(1, 0, 60),
        step(2, 60, 40),
        annotation("PP:0SEND_F0", 8, 7),
        annotation("comm:send:mesh_pp:0:64", 10, 4),
        operator("c10d::send", 11, 3),
        annotation("gloo:send", 12, 68),
        annotation("PP:0F1", 20, 40),
        operator("aten::mm", 22, 30),
        operator("aten::add", 25, 5),
        annotation("gloo:all_reduce", 30, 20, tid=300),
        operator("aten::mul", 62, 10),
    ]
    entry = one(write(tmp_path / "t.json", events, pg_config=CONFIG))
    window = entry["window"]
    assert window["compute_ns"] == (30 + 10) * 1000
    assert window["comm_ns"] == (4 + 20 + 80 - 72) * 1000
    assert window["overlap_ns"] == 20_000
    [send] = [c for c in entry["collectives"] if c["kind"] == "send"]
    assert (send["count"], send["comm_ns"], send["overlap_ns"], send["sum_ns"]) == (1, 12_000, 0, 8_000)
    assert send["raw_kinds"] == ["send"]
    steps = {(s["step"], s["rule"]): s["comm_ns"] for s in entry["steps"]}
    assert steps[1, "launch"] == 32_000, "the wait in step 2 is of the call in step 1"
    assert steps[2, "clip"] == 8_000
    assert any("1 of 1 sends and receives were waited for later" in note for note in entry["notes"])


def test_a_receive_is_waited_for_in_what_needs_it(tmp_path: Path) -> None:
    """Two receives are open at once; without our ranges, too. What is open when a wait ends is what waits."""
    events = [
        annotation("gloo:recv", 0, 50),
        annotation("gloo:recv", 2, 68),
        annotation("forward", 0, 30),
        operator("aten::mm", 5, 20),
        annotation("PP:1F0", 40, 60),
        annotation("forward", 75, 20),
        operator("aten::mm", 75, 20),
    ]
    entry = one(write(tmp_path / "t.json", events))
    window = entry["window"]
    assert window["compute_ns"] == (20 + 20) * 1000
    assert window["comm_ns"] == (70 - 40) * 1000
    [recv] = entry["collectives"]
    assert (recv["count"], recv["sum_ns"]) == (2, (10 + 20) * 1000)


def test_transfers_waited_for_at_once_last_as_long_as_their_works(tmp_path: Path) -> None:
    """An operator that ended before and one after: the whole of gloo's annotation is the wait."""
    events = [
        operator("aten::mm", 0, 9),
        annotation("comm:recv:mesh_pp:0:64", 10, 4),
        operator("c10d::recv_", 11, 2),
        annotation("gloo:recv", 12, 30),
        operator("aten::mm", 42, 10),
    ]
    entry = one(write(tmp_path / "t.json", events, pg_config=CONFIG))
    [recv] = entry["collectives"]
    assert (recv["comm_ns"], recv["sum_ns"], recv["raw_kinds"]) == (32_000, 30_000, ["gloo:recv", "recv"])
    assert not any("waited for later" in note for note in entry["notes"])


def test_sends_waited_for_later_are_not_matched_with_other_ranks(tmp_path: Path) -> None:
    for rank, kind in ((0, "send"), (1, "recv")):
        events: list[Event] = [
            annotation(f"comm:{kind}:mesh_pp:0:64", 0, 2),
            annotation(f"gloo:{kind}", 1, 40),
            operator("aten::mm", 5, 20),
            annotation(f"comm:{kind}:mesh_dp:0:64", 50, 2),
            annotation(f"gloo:{kind}", 51, 10),
        ]
        write(tmp_path / f"rank{rank}.json", events, rank=rank)
    across = analyse(find_sources(tmp_path))["cross_rank"]
    assert not any(found["group"] == "mesh_pp" for found in across["collectives"])
    assert any("mesh_pp: sends and receives waited for later are not matched" in note for note in across["notes"])
    assert not any("mesh_dp" in note and "waited for later" in note for note in across["notes"])


def test_ranks_wait_in_gloos_works(tmp_path: Path) -> None:
    """Rank 1 calls 30 us later: rank 0's work waits for it, while both calls take 2 us."""
    for rank, late in ((0, 0), (1, 30)):
        events: list[Event] = [
            annotation("comm:all_reduce:mesh_dp:0:64", late, 2),
            annotation("gloo:all_reduce", late + 1, 40 - late, tid=300),
        ]
        write(tmp_path / f"rank{rank}.json", events, rank=rank, pg_config=CONFIG, baseTimeNanoseconds=10**18)
    across = analyse(find_sources(tmp_path))["cross_rank"]
    assert across == {
        "aligned": True,
        "collectives": [
            {
                "kind": "all_reduce",
                "group": "mesh_dp",
                "dimension": "mesh_dp",
                "transfer_ns": 10_000,
                "wait_ns": {"0": 30_000, "1": 0},
                "last_rank": 1,
            }
        ],
        "notes": [],
    }


def test_calls_alone_across_ranks_are_said_to_be_calls(tmp_path: Path) -> None:
    for rank in (0, 1):
        events = [annotation("comm:all_reduce:mesh_dp:0:64", 0, 2)]
        write(tmp_path / f"rank{rank}.json", events, rank=rank, pg_config=CONFIG)
    [note] = analyse(find_sources(tmp_path))["cross_rank"]["notes"]
    assert "those of the calls" in note
