"""Two real gloo processes: FSDP2 steps recorded on both ranks, and one rank failing."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

from harness.config import Window
from harness.record import Recorder
from harness.recording import Recording, read_recording, trace_path

pytestmark = pytest.mark.distributed

WORLD = 2
WIDTH = 32
STEPS = 5
CONFIG = Recorder.Config(trace=Window(start=2, steps=2), memory=Window(start=1, steps=2))


def train(rank: int, directory: Path, failing_rank: int | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp_shard",))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    axes = {"dp_shard": list(range(WORLD))}
    with Recorder(directory / "recording", config=CONFIG, device="cpu", mesh=axes, tokens_per_step=64) as recorder:
        for step in range(STEPS):
            with recorder.step():
                with recorder.phase("forward"):
                    loss = model(torch.ones(4, WIDTH)).square().mean()
                if rank == failing_rank and step == 3:
                    raise RuntimeError(f"rank {rank} gives up")
                if failing_rank is not None and step == 3:
                    return
                with recorder.phase("backward"):
                    loss.backward()
                with recorder.phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
                recorder.log(loss=loss)
    dist.destroy_process_group()


def events(directory: Path, rank: int) -> dict[str, Any]:
    with gzip.open(trace_path(directory, 4, rank)) as file:
        trace: dict[str, Any] = json.load(file)
    return trace


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    directory = tmp_path_factory.mktemp("two_ranks")
    spawn(train, args=(directory, None), nprocs=WORLD)
    return read_recording(directory / "recording")


def test_both_ranks_are_complete(recorded: Recording) -> None:
    assert (recorded.missing_ranks, recorded.errors, recorded.failed_ranks) == ([], [], {})
    assert recorded.status is not None
    assert recorded.status.state == "complete"
    assert {rank: len(rows) for rank, rows in recorded.steps.items()} == {0: STEPS, 1: STEPS}
    assert recorded.manifest["mesh"] == {"dp_shard": [0, 1]}
    assert recorded.manifest["world_size"] == WORLD


def test_ranks_agree(recorded: Recording) -> None:
    for step in (1, 2):
        a, b = (recorded.steps[rank][step] for rank in (0, 1))
        # gloo lets go of a gathered weight when its thread gets to it, later on a busy machine.
        peaks = sorted((a["peak_allocated_bytes"], b["peak_allocated_bytes"]))
        assert peaks[1] - peaks[0] in (0, 4 * WIDTH * WIDTH)
        assert peaks[0] > 3 * 4 * WIDTH * WIDTH
        held = [{item["category"]: item["bytes"] for item in row["peak_composition"]} for row in (a, b)]
        for category in ("parameter", "optimizer_state"):
            assert held[0][category] == held[1][category] > 0


def test_trace_names_every_collective_of_the_mesh_axis(recorded: Recording) -> None:
    weight = 4 * WIDTH * WIDTH
    names = []
    for rank in range(WORLD):
        trace = events(recorded.directory, rank)
        assert trace["distributedInfo"]["rank"] == rank
        names.append([e["name"] for e in trace["traceEvents"] if str(e.get("name")).startswith("comm:")])
    # A step: each weight is gathered in the forward and again in the backward, and reduced once. The axis spans all
    # ranks, so its group is torch's own, whose description says no axis.
    without_seq = Counter((kind, group, int(size)) for _, kind, group, _, size in (n.split(":") for n in names[0]))
    steps = CONFIG.trace.steps
    assert without_seq == {
        ("all_gather", "default_pg", weight): 4 * steps,
        ("reduce_scatter", "default_pg", weight): 2 * steps,
    }
    assert sorted(names[0]) == sorted(names[1])
    assert sorted(int(n.split(":")[3]) for n in names[0]) == list(range(len(names[0])))


def test_first_failure_is_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException, match="rank 1 gives up"):
        spawn(train, args=(tmp_path, 1), nprocs=WORLD)
    read = read_recording(tmp_path / "recording")
    assert read.failed_ranks[1] == "RuntimeError: rank 1 gives up"
    assert read.status is not None
    assert (read.status.state, read.status.reason) == ("failed", "rank 1: RuntimeError: rank 1 gives up")
    assert len(read.steps[1]) == 3
