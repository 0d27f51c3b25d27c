"""Models and optimizers are known by the storages they hold, and are not kept alive."""

import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.config import Window
from harness.errors import UsageError
from harness.record import Recorder
from harness.record.held import Watched
from harness.recording import read_recording


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 5, bias=False)
        self.tied = nn.Linear(10, 5, bias=False)
        self.tied.weight = self.layer.weight
        self.register_buffer("scale", torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = (self.layer(x) + self.tied(x)) * self.scale.sum()
        return y


def trained() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_every_holder_once_with_its_name() -> None:
    model, optimizer = trained()
    watched = Watched()
    watched.add(model, optimizer)
    assert [(item.category, item.name, item.storage.nbytes()) for item in watched.held()] == [
        ("parameter", "layer.weight", 200),
        ("optimizer_state", "layer.weight.step", 4),
        ("optimizer_state", "layer.weight.exp_avg", 200),
        ("optimizer_state", "layer.weight.exp_avg_sq", 200),
        ("gradient", "layer.weight", 200),
        ("buffer", "scale", 28),
    ]
    labels = watched.labels("cpu")
    assert labels[0] == {
        "device": 0,
        "address": model.layer.weight.data_ptr(),
        "size": 200,
        "category": "parameter",
        "name": "layer.weight",
    }
    assert watched.labels("cuda") == []
    assert pickle.loads(pickle.dumps(labels, protocol=4)) == labels


def test_an_optimizer_alone_names_its_parameters_by_position() -> None:
    model, optimizer = trained()
    watched = Watched()
    watched.add(None, optimizer)
    names = [(item.category, item.name) for item in watched.held()]
    assert names[:2] == [("parameter", "param_groups.0.0"), ("optimizer_state", "param_groups.0.0.step")]
    assert ("gradient", "param_groups.0.0") in names
    assert not any(category == "buffer" for category, _ in names)
    del model


def test_what_is_gone_is_not_held() -> None:
    model, optimizer = trained()
    watched = Watched()
    watched.add(model, optimizer)
    alive = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.layer.weight)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in alive] == [None, None, None]
    assert list(watched.held()) == []


def test_unmaterialised_memory_is_left_out() -> None:
    with torch.device("meta"):
        model: nn.Module = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3))
    watched = Watched()
    watched.add(model, None)
    assert list(watched.held()) == []


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_group")
def test_fsdp2_shards_are_parameters_even_while_gathered() -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",)), reshard_after_forward=False)
    watched = Watched()
    watched.add(model, None)
    expected = [("parameter", "0.weight", 4 * 16 * 16 // 4)]
    assert [(item.category, item.name, item.storage.nbytes()) for item in watched.held()] == expected
    loss = model(torch.ones(2, 16)).sum()
    assert model[0].weight.numel() == 16 * 16  # gathered, in another tensor
    assert [(item.category, item.name, item.storage.nbytes()) for item in watched.held()] == expected
    loss.backward()
    assert [item.category for item in watched.held()] == ["parameter", "gradient"]


def test_the_tracker_knows_a_buffer_by_its_holder(tmp_path: Path) -> None:
    model, optimizer = trained()
    config = Recorder.Config(trace=Window(), memory=Window(start=0, steps=1))
    with Recorder(tmp_path, config=config, device="cpu") as recorder:
        recorder.watch(model, optimizer)
        with recorder.step():
            pass
    (row,) = read_recording(tmp_path).steps[0]
    composition = {item["category"]: item["bytes"] for item in row["peak_composition"]}
    assert composition["buffer"] == 28
    assert composition["parameter"] >= 200
    assert composition["optimizer_state"] >= 404


def test_anything_else_is_refused(tmp_path: Path) -> None:
    with Recorder(tmp_path, device="cpu") as recorder:
        with pytest.raises(UsageError, match=r"watch\(model=…\) takes a torch.nn.Module, got a list"):
            recorder.watch([nn.Linear(1, 1)])  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"watch\(optimizer=…\) takes a torch.optim.Optimizer, got a Linear"):
            recorder.watch(None, nn.Linear(1, 1))  # type: ignore[arg-type]
