"""Kernels of coalesced point-to-point transfers, which say nothing themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trace_builder import annotation, complete, group, kernel, launch, pg, step, write

from harness.sources import find_sources
from harness.trace import analyse
from harness.trace.capture import collective_counts, read_captures

SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
PIPELINE = [0, 2]


def transfer(ts: float, dur: float, correlation: int) -> Any:
    return kernel(SEND_RECV, ts, dur, stream=17, correlation=correlation)


def call(collective: str, ts: float, elements: int, ranks: list[int] = PIPELINE) -> Any:
    about = group("3", "mesh_pp", ranks, collective) | {"dtype": "BFloat16"}
    about |= {"In msg nelems": elements, "Out msg nelems": elements}
    return complete("cpu_op", "record_param_comms", ts, 1, args=about)


def collectives(folder: Path) -> list[tuple[Any, ...]]:
    (rank,) = analyse(find_sources(folder))["ranks"]
    names = ("dimension", "kind", "group", "count")
    return sorted((tuple(one[name] for name in names) for one in rank["collectives"]), key=str)


def test_calls_since_the_launch_before_say_what_a_kernel_carries(tmp_path):
    events = [
        *(step(1, 0, 100), launch(1, 1), kernel("gemm", 5, 10, correlation=1)),
        *(call("send", 10, 64), launch(12, 2), transfer(20, 5, 2)),
        *(call("recv", 30, 64), call("recv", 32, 16), launch(34, 3), transfer(40, 5, 3)),
        *(call("send", 50, 64), call("recv", 52, 16), launch(54, 4), transfer(60, 5, 4)),
        *(launch(70, 5), transfer(80, 5, 5)),
    ]
    write(tmp_path / "rank0.json", events)

    assert collectives(tmp_path) == [
        ("mesh_pp", "recv", "3", 1),
        ("mesh_pp", "send", "3", 1),
        ("mesh_pp", "send_recv", "3", 1),
        ("no group data", "send_recv", None, 1),  # no call came before it
    ]


def test_the_action_of_a_pipeline_says_it_where_operators_are_left_out(tmp_path):
    events = [
        *(step(1, 0, 100), annotation("PP:0SEND_F2", 10, 5), launch(12, 1), transfer(20, 5, 1)),
        *(annotation("PP:0RECV_B0", 30, 5), launch(32, 2), transfer(40, 5, 2)),
        *(annotation("PP:0F3", 50, 5), launch(52, 3), transfer(60, 5, 3)),
        *(annotation("PP:0SEND_F3", 70, 5, tid=101), launch(72, 4), transfer(80, 5, 4)),  # another thread
        *(annotation("PP:nonsense", 90, 5), launch(92, 5), transfer(94, 5, 5)),
    ]
    write(tmp_path / "rank0.json", events, pg_config=[pg("3", "mesh_pp", PIPELINE)])

    assert collectives(tmp_path) == [
        ("mesh_pp", "recv", None, 1),
        ("mesh_pp", "send", None, 1),
        ("no group data", "send_recv", None, 3),
    ]


def test_sizes_of_transfers_in_one_kernel_add_up(tmp_path):
    events = [step(1, 0, 100), call("send", 10, 64), call("send", 11, 16), launch(12, 2), transfer(20, 5, 2)]
    write(tmp_path / "rank0.json", events)

    (capture,), _ = read_captures(find_sources(tmp_path))
    (record,) = capture.records()
    assert (record.kind, record.in_bytes, record.ranks) == ("send", 160, (0, 2))


def test_a_kernel_that_sends_and_receives_counts_as_one_of_each(tmp_path):
    events = [step(1, 0, 100), call("send", 10, 64), call("recv", 11, 16), launch(12, 2), transfer(20, 5, 2)]
    write(tmp_path / "rank0.json", events)

    (capture,), _ = read_captures(find_sources(tmp_path))
    (record,) = capture.records()
    assert record.kind == "send_recv"
    found = {item["kind"]: (item["count"], item["bytes"]) for item in collective_counts([record])}
    assert found == {"send": (1, 128), "recv": (1, 32)}


def test_of_more_than_two_ranks_transfers_are_not_matched(tmp_path):
    """Whose send is whose receive, no trace says; taking them in order would blame ranks for waits."""
    ranks = [0, 1, 2]
    for rank in ranks:
        events = [step(1, 0, 100), call("send", 10, 64, ranks), launch(12, 2), transfer(20 + rank, 5, 2)]
        write(tmp_path / f"rank{rank}.json", events, rank=rank, world_size=3)

    result = analyse(find_sources(tmp_path))

    across = result["cross_rank"]
    assert across["collectives"] == []
    assert any("its sends and receives are not matched" in note for note in across["notes"])
