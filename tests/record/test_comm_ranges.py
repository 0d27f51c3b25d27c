"""On CPU the trace says of every collective its kind, group, order and bytes; each outermost call has one range."""

import gzip
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.config import Window
from harness.record import Recorder
from harness.recording import trace_path

WORLD = 4


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """2 × 2 ranks of which this process is rank 0; the fake backend runs no communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def comm_ranges(directory: Path, work: Callable[[], Any]) -> list[str]:
    """The `comm:` ranges of one traced step, in the order they opened."""
    config = Recorder.Config(trace=Window(start=0, steps=1), memory=Window())
    with Recorder(directory, config=config, device="cpu", mode="rehearsal") as recorder, recorder.step():
        work()
    with gzip.open(trace_path(directory, 1, 0)) as file:
        events = json.load(file)["traceEvents"]
    found = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("comm:")]
    return [e["name"] for e in sorted(found, key=lambda e: e["ts"])]


def test_calls_of_torch_distributed(tmp_path: Path, mesh: DeviceMesh) -> None:
    tp = mesh.get_group("tp")
    x, parts = torch.ones(8), [torch.ones(8), torch.ones(8)]

    def work() -> None:
        dist.all_reduce(x)
        dist.all_reduce(x, group=tp)
        dist.all_gather(parts, x, group=tp)
        dist.reduce_scatter(x, parts, group=tp)
        dist.broadcast(x, 0)
        dist.all_reduce(x, group=tp, async_op=True)
        dist.send(x, 1)
        dist.recv(x, 1)
        dist.all_to_all_single(torch.empty(8), x, group=tp)
        dist.barrier(group=tp)

    assert comm_ranges(tmp_path, work) == [
        "comm:all_reduce:default_pg:0:32",
        "comm:all_reduce:mesh_tp:0:32",
        "comm:all_gather:mesh_tp:1:64",
        "comm:reduce_scatter:mesh_tp:2:64",
        "comm:broadcast:default_pg:1:32",
        "comm:all_reduce:mesh_tp:3:32",
        "comm:send:default_pg:2:32",
        "comm:recv:default_pg:3:32",
        "comm:all_to_all:mesh_tp:4:32",
        "comm:barrier:mesh_tp:5:0",
    ]


def test_single_tensor_collectives_count_the_full_side(tmp_path: Path, mesh: DeviceMesh) -> None:
    group = mesh.get_group("dp")
    shard, full = torch.ones(8, dtype=torch.bfloat16), torch.ones(16, dtype=torch.bfloat16)

    def work() -> None:
        with warnings.catch_warnings():  # torch 2.13 renamed them; 2.11 has only these names
            warnings.simplefilter("ignore", FutureWarning)
            dist.all_gather_into_tensor(full, shard, group=group)
            dist.reduce_scatter_tensor(shard, full, group=group)

    assert comm_ranges(tmp_path, work) == ["comm:all_gather:mesh_dp:0:32", "comm:reduce_scatter:mesh_dp:1:32"]


def test_functional_collectives_and_their_waits(tmp_path: Path, mesh: DeviceMesh) -> None:
    group = mesh.get_group("tp")

    def work() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            gathered = funcol.all_gather_tensor(torch.ones(8), 0, group)
        reduced = funcol.all_reduce(torch.ones(4), "sum", group)
        assert (gathered.sum() + reduced.sum()).shape == ()

    assert comm_ranges(tmp_path, work) == [
        "comm:all_gather:mesh_tp:0:64",
        "comm:all_reduce:mesh_tp:1:16",
        "comm:wait:mesh_tp:0",
        "comm:wait:mesh_tp:1",
    ]


def test_dtensor_redistribution(tmp_path: Path, mesh: DeviceMesh) -> None:
    local = torch.ones(4, 8)
    sharded = distribute_tensor(torch.ones(4, 8), mesh["tp"], [Shard(0)], src_data_rank=None)

    def work() -> None:
        sharded.redistribute(placements=[Replicate()]).to_local().sum()
        partial = DTensor.from_local(local, mesh["tp"], [Partial()], run_check=False)
        partial.redistribute(placements=[Shard(0)]).to_local().sum()
        partial.redistribute(placements=[Replicate()]).to_local().sum()

    names = [name for name in comm_ranges(tmp_path, work) if not name.startswith("comm:wait")]
    assert names == [
        f"comm:all_gather:mesh_tp:0:{4 * 8 * 4}",
        f"comm:reduce_scatter:mesh_tp:1:{4 * 8 * 4}",
        f"comm:all_reduce:mesh_tp:2:{4 * 8 * 4}",
    ]


def test_group_without_description_goes_by_its_name(tmp_path: Path, mesh: DeviceMesh) -> None:
    group = dist.new_group([0, 1])
    (name,) = comm_ranges(tmp_path, lambda: dist.all_reduce(torch.ones(1), group=group))
    assert name == f"comm:all_reduce:{group.group_name}:0:4"


def test_no_ranges_and_no_mode_outside_the_window(tmp_path: Path, mesh: DeviceMesh) -> None:
    config = Recorder.Config(trace=Window(start=1, steps=1), memory=Window())
    with Recorder(tmp_path, config=config, device="cpu", mode="rehearsal") as recorder:
        for _ in range(3):
            with recorder.step():
                dist.all_reduce(torch.ones(2))
    with gzip.open(trace_path(tmp_path, 2, 0)) as file:
        names = Counter(e.get("name") for e in json.load(file)["traceEvents"])
    assert names["comm:all_reduce:default_pg:0:8"] == 1
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
