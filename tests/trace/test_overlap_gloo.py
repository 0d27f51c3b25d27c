"""Two real gloo processes that compute while two groups communicate, recorded and analysed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from harness.config import Window
from harness.record import Recorder
from harness.sources import find_sources
from harness.trace import analyse, collective_counts, read_captures

pytestmark = pytest.mark.distributed

WORLD = 2
NUMEL = 1 << 21
CONFIG = Recorder.Config(trace=Window(start=1, steps=2))


def communicate(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=WORLD)
    dp, tp = (dist.new_group(group_desc=name) for name in ("mesh_dp_shard", "mesh_tp"))
    part, full, matrix = torch.ones(NUMEL), torch.ones(WORLD * NUMEL), torch.ones(64, 64)
    axes = {"dp_shard": list(range(WORLD))}
    with Recorder(directory / "recording", config=CONFIG, device="cpu", mesh=axes, tokens_per_step=1) as recorder:
        for _ in range(4):
            with recorder.step():
                gather = dist.all_gather_into_tensor(full, part, group=dp, async_op=True)
                reduce = dist.all_reduce(torch.ones(NUMEL), group=tp, async_op=True)
                while not (gather.is_completed() and reduce.is_completed()):
                    matrix @ matrix
                gather.wait()
                reduce.wait()
                dist.reduce_scatter_tensor(part, full, group=dp)
                if rank == 0:
                    dist.send(part, group=tp, dst=1)
                else:
                    dist.recv(part, group=tp, src=0)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two_groups")
    spawn(communicate, args=(directory,), nprocs=WORLD)
    return directory / "recording"


def test_every_work_is_of_its_group(recording: Path) -> None:
    result = analyse(find_sources(recording))
    assert result["errors"] == []
    assert len(result["ranks"]) == WORLD
    for entry in result["ranks"]:
        dimensions: dict[str, Any] = {d["dimension"]: d for d in entry["dimensions"]}
        assert set(dimensions) == {"mesh_dp_shard", "mesh_tp"}
        assert all(d["overlap_ns"] > 0 for d in dimensions.values())
        overlapped = {c["kind"]: c["overlap_ns"] for c in entry["collectives"]}
        assert overlapped["all_gather"] > 0
        assert overlapped["all_reduce"] > 0
        # dist.reduce_scatter_tensor waits for itself.
        assert overlapped["reduce_scatter"] == 0
        assert not any("no recorded call" in note for note in entry["notes"])


def test_calls_are_counted_once_and_last_as_long_as_their_works(recording: Path) -> None:
    captures, _ = read_captures(find_sources(recording))
    for capture, sent in zip(captures, ("send", "recv"), strict=True):
        records = capture.records()
        assert all(record.raw_kind.startswith("gloo:") for record in records)
        counts = {(c["step"], c["dimension"], c["kind"]): (c["count"], c["bytes"]) for c in collective_counts(records)}
        size = 4 * NUMEL
        assert counts == {
            (number, *key): value
            for number in (1, 2)
            for key, value in {
                ("mesh_dp_shard", "all_gather"): (1, WORLD * size),
                ("mesh_dp_shard", "reduce_scatter"): (1, WORLD * size),
                ("mesh_tp", "all_reduce"): (1, size),
                ("mesh_tp", sent): (1, size),
            }.items()
        }


def test_ranks_match_with_their_works(recording: Path) -> None:
    across = analyse(find_sources(recording))["cross_rank"]
    kinds = [found["kind"] for found in across["collectives"] if found["kind"] in ("all_gather", "all_reduce")]
    assert sorted(kinds) == ["all_gather"] * 2 + ["all_reduce"] * 2
    # 8 MiB take longer than to hand the work to gloo.
    assert all(found["transfer_ns"] > 500_000 for found in across["collectives"])
    assert not any("those of the calls" in note for note in across["notes"])
