"""What keeps memory alive, on a real GPU: one rank's NCCL group, a host that is ahead of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.config import CollectiveMemory, Recorder, Trainer, Training, Window
from harness.memory.device import analyse_device
from harness.memory.snapshot import read_snapshot
from harness.recording import read_recording, snapshot_path
from harness.trainer.collectives import all_gather_single, reduce_scatter_single
from harness.trainer.legacy_streams import collective_memory
from harness.workloads.config import Collectives

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MB = 1 << 20
CALLS = 8
# About half a second at 2 GHz: the host issues all calls meanwhile.
BUSY_CYCLES = 1_000_000_000


@pytest.fixture
def group() -> Iterator[None]:
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


def functional(shard: torch.Tensor) -> torch.Tensor:
    name = dist.group.WORLD.group_name
    output = torch.ops._c10d_functional.all_gather_into_tensor(shard, 1, name)
    gathered = torch.ops._c10d_functional.wait_tensor(output)
    output = torch.ops._c10d_functional.reduce_scatter_tensor(gathered * 2, "sum", 1, name)
    return torch.ops._c10d_functional.wait_tensor(output)


def c10d(shard: torch.Tensor, async_op: bool) -> torch.Tensor:
    gathered, output = torch.empty_like(shard), torch.empty_like(shard)
    for call, result, source in ((all_gather_single, gathered, shard), (reduce_scatter_single, output, None)):
        work = call(result, gathered * 2 if source is None else source, async_op=async_op)
        if work is not None:
            work.wait()
    return output


PATTERNS = {"functional": functional, "async": lambda x: c10d(x, True), "sync": lambda x: c10d(x, False)}
# Per call the gathered tensor, the input and the output of the reduce-scatter.
RECORDED = {
    ("functional", "record_stream"): 3,
    ("functional", "record_stream_async"): 3,
    ("async", "record_stream"): 3,
    ("async", "record_stream_async"): 3,
    ("sync", "record_stream"): 3,
    ("sync", "record_stream_async"): 0,
    ("functional", "references"): 0,
    ("async", "references"): 0,
    ("sync", "references"): 0,
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("pattern", "policy"), RECORDED)
def test_freed_tensors_of_collectives_wait_for_the_device_only_if_streams_are_recorded(
    pattern: str, policy: CollectiveMemory
) -> None:
    call: Callable[[torch.Tensor], torch.Tensor] = PATTERNS[pattern]
    with collective_memory(policy):
        shard = torch.ones(MB, device="cuda")
        total = torch.zeros((), device="cuda")
        total += call(shard).sum()  # connects, and loads every kernel, for which the host might wait for the device
        pool = [torch.empty(MB, device="cuda") for _ in range(4 * CALLS)]
        del pool  # memory from the driver might wait for the device
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
        for _ in range(CALLS):
            total += call(shard).sum()
        stats = torch.cuda.memory_stats()
        pending = stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
        assert pending // (4 * MB) == CALLS * RECORDED[pattern, policy]
        assert total.item() == (1 + CALLS) * 2 * MB
    torch.cuda.synchronize()
    torch.empty(MB, device="cuda")  # the allocator looks at its events when it is asked
    stats = torch.cuda.memory_stats()
    assert stats["active_bytes.all.current"] == stats["allocated_bytes.all.current"]


def run(directory: Path, policy: CollectiveMemory) -> dict[str, int]:
    """The highest peaks of the later steps of the collectives workload, one rank, products that take a while."""
    config = Trainer.Config(
        workload="collectives",
        training=Training.Config(device="cuda", steps=6, collective_memory=policy),
        collectives=Collectives.Config(iterations=20, rows=8192, dim=8192),
        recorder=Recorder.Config(trace=Window(), memory=Window(start=5, steps=1)),
    )
    config.build(directory).train()
    rows = read_recording(directory).steps[0][2:]
    return {name: max(row[f"peak_{name}_bytes"] for row in rows) for name in ("allocated", "active")}


def test_workload_shows_stacking_and_the_snapshot_names_its_functions(tmp_path: Path) -> None:
    held, stacked = run(tmp_path / "references", "references"), run(tmp_path / "record_stream", "record_stream")
    assert held["allocated"] == stacked["allocated"]
    assert held["active"] < 1.1 * held["allocated"]
    assert stacked["active"] > 3 * held["active"]
    (device,) = read_snapshot(snapshot_path(tmp_path / "record_stream", 6, 0)).devices
    # A host this far ahead sees no free complete within the window: nothing stacks by definition, all is pending.
    pending = analyse_device(device).pending
    functions = {share.name.rsplit(":", 1)[-1] for share in pending if "collectives.py:" in share.name}
    assert functions == {"all_gather", "multiply", "reduce_scatter"}
