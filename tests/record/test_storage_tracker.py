"""The tracker counts every live storage to the byte, on programs small enough to work out by hand."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.record.storages import StorageTracker

KB = 1000


@pytest.fixture
def tracker() -> Iterator[StorageTracker]:
    """One that has seen nothing yet, so that every byte it counts is the test's."""
    gc.collect()
    tracker = StorageTracker()
    yield tracker
    tracker.close()


def live(tracker: StorageTracker) -> int | None:
    return tracker.read().current[0]


def peak(tracker: StorageTracker) -> int | None:
    return tracker.read().peak[0]


def test_operators_views_and_frees(tracker: StorageTracker) -> None:
    with tracker:
        a = torch.ones(KB)
        assert live(tracker) == 4 * KB
        b = a * 2
        view = b[1:].view(-1)
        assert live(tracker) == 8 * KB
        b.add_(1)
        assert live(tracker) == 8 * KB
        del b
        assert live(tracker) == 8 * KB  # the view holds it
        del view
        assert live(tracker) == 4 * KB
        del a
        assert live(tracker) == 0


def test_peak_is_the_most_that_lived_at_once_since_the_last_reading(tracker: StorageTracker) -> None:
    with tracker:
        a = torch.ones(KB)
        for _ in range(3):
            b = a + 1
            del b
        assert peak(tracker) == 8 * KB
        assert peak(tracker) == 4 * KB
    reading = tracker.read()
    assert reading.current == (4 * KB, 4 * KB, None, None)  # reserved and requested are an allocator's


def test_tensors_saved_for_backward_live_until_it_ran(tracker: StorageTracker) -> None:
    with tracker:
        x = torch.ones(KB, requires_grad=True)
        y = x.exp()  # saves its result
        loss = y.sum()
        del y
        assert live(tracker) == 4 * KB + 4 * KB + 4
        loss.backward()
        assert x.grad is not None
        # saved y is gone, the gradient of x came
        assert live(tracker) == 4 * KB + 4 * KB + 4
        x.grad = None
        assert live(tracker) == 4 * KB + 4


def test_resized_storages_keep_their_category(tracker: StorageTracker) -> None:
    with tracker:
        tracker.category = "parameter"
        a = torch.ones(KB)
        tracker.category = "activation"
        tracker.start_step()
        a.untyped_storage().resize_(0)
        assert live(tracker) == 0
        a.untyped_storage().resize_(8 * KB)
        assert live(tracker) == 8 * KB
        assert tracker.peak_composition() == [{"category": "parameter", "bytes": 8 * KB}]
    a.untyped_storage().resize_(0)
    assert live(tracker) == 8 * KB  # the patch ends with the mode


def test_resize_of_a_tensor(tracker: StorageTracker) -> None:
    with tracker:
        a = torch.ones(KB)
        a.resize_(3 * KB)
        assert live(tracker) == 12 * KB


def test_nothing_is_kept_alive(tracker: StorageTracker) -> None:
    with tracker:
        a = torch.ones(KB)
        b = a * 2
        watched = weakref.ref(b)
        storage = weakref.ref(b.untyped_storage())
        del b
        assert watched() is None
        assert storage() is None
    del a


def test_storages_freed_or_met_outside_the_mode(tracker: StorageTracker) -> None:
    with tracker:
        a = torch.ones(KB)
    del a
    assert live(tracker) == 0
    b = torch.ones(KB)
    assert live(tracker) == 0
    with tracker:
        b.sum()
        assert live(tracker) == 4 * KB


def test_existing_storages_by_what_holds_them(tracker: StorageTracker) -> None:
    gc.collect()
    model = nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 100)).sum().backward()
    optimizer.step()
    before = StorageTracker()
    before.adopt_existing()
    before.start_step()
    size = 4 * 100 * 10
    found = {item["category"]: item["bytes"] for item in before.peak_composition()}
    before.close()
    assert found["parameter"] >= size
    # Only this test holds a model, gradients and momentum.
    assert (found["parameter"], found["gradient"], found["optimizer_state"]) == (size, size, size)


def test_training_step_to_the_byte(tracker: StorageTracker) -> None:
    batch, width = 64, 256
    activation = 4 * batch * width
    weights = 4 * width * width
    with tracker:
        tracker.category = "parameter"
        layers = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
        assert live(tracker) == 2 * weights
        tracker.start_step()
        tracker.category = "activation"
        loss = layers(torch.randn(batch, width)).square().mean()
        # input, two outputs (all saved), the squares while their mean (4 bytes) is taken
        assert tracker.read().peak[0] == 2 * weights + 4 * activation + 4
        assert live(tracker) == 2 * weights + 3 * activation + 4
        tracker.category = "gradient"
        loss.backward()
        assert live(tracker) == 4 * weights + 4
        tracker.start_step()
        assert tracker.peak_composition() == [
            {"category": "gradient", "bytes": 2 * weights},
            {"category": "parameter", "bytes": 2 * weights},
            {"category": "activation", "bytes": 4},
        ]


def test_composition_adds_up_to_the_peak(tracker: StorageTracker) -> None:
    with tracker:
        tracker.start_step()
        tracker.category = "activation"
        a = torch.ones(KB)
        tracker.category = "gradient"
        b = torch.ones(2 * KB)
        del a
        tracker.category = "optimizer_state"
        c = torch.ones(100)
    assert tracker.peak_composition() == [
        {"category": "gradient", "bytes": 8 * KB},
        {"category": "activation", "bytes": 4 * KB},
    ]
    assert tracker.read().peak[0] == 12 * KB
    del b, c


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def reachable_bytes() -> int:
    """Every storage that Python can reach, each once: what the tracker must agree with when no graph is alive."""
    gc.collect()
    sizes = {}
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor) and not hasattr(value, "__tensor_flatten__"):
            storage = value.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


@pytest.mark.usefixtures("fake_group")
def test_fsdp2_shards_gathers_and_frees(tracker: StorageTracker) -> None:
    width, world = 64, 4
    before = reachable_bytes()  # left by other tests
    weight = 4 * width * width
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(2)])
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shards = 2 * weight // world
    activation = 4 * 2 * width
    fixed = before + 4 * world + shards  # the mesh holds the numbers of its ranks
    states = 0
    for _ in range(3):
        tracker.adopt_existing()
        with tracker:
            tracker.start_step()
            loss = model(torch.ones(2, width)).sum()
            forward, composition = tracker.read(), tracker.peak_composition()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del loss
        # When the second weight is copied out: it, its all-gather's output and still that of the first, with the
        # input and the first output, both saved.
        assert forward.peak[0] == fixed + states + 3 * weight + 2 * activation
        states = 2 * shards + 2 * 4  # and a step count of 4 bytes per parameter
        assert live(tracker) == fixed + states == reachable_bytes()
    held = {item["category"]: item["bytes"] for item in composition}
    # Of the two gathered weights one at a time is a parameter; the rest are all-gather outputs.
    assert (held["parameter"], held["optimizer_state"]) == (shards + weight, 2 * shards + 2 * 4)
