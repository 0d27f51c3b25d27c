"""Which collectives are seen, and with which tensors, by what keeps their memory alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed.tensor import debug

from harness.config import Decoder, Parallelism, Recorder, Trainer, Training, Window
from harness.errors import UsageError
from harness.ledger.communication import by_dimension_and_kind, collectives
from harness.record.collectives import OPERATORS
from harness.recording import MODE_VARIABLE
from harness.trainer.collectives import all_gather_single, reduce_scatter_single
from harness.trainer.legacy_streams import Issued, RecordStreams, after_collectives, collective_memory


@pytest.fixture
def group() -> Iterator[None]:
    """A real gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def storages(tensors: object) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


X = torch.arange(4.0)
c10d_functional = torch.ops._c10d_functional


def functional_gather() -> list[torch.Tensor]:
    return [X, funcol.wait_tensor(c10d_functional.all_gather_into_tensor(X, 1, dist.group.WORLD.group_name))]


def functional_scatter() -> list[torch.Tensor]:
    return [X, funcol.wait_tensor(c10d_functional.reduce_scatter_tensor(X, "sum", 1, dist.group.WORLD.group_name))]


def gather(async_op: bool) -> list[torch.Tensor]:
    output = torch.empty(4)
    work = all_gather_single(output, X, async_op=async_op)
    assert (work is not None) == async_op
    if async_op:
        work.wait()
    return [X, output]


def scatter() -> list[torch.Tensor]:
    output = torch.empty(4)
    reduce_scatter_single(output, X)
    return [X, output]


def in_place() -> list[torch.Tensor]:
    output = X.clone()
    dist.all_reduce(output)
    return [output]


def nested() -> list[torch.Tensor]:
    output = torch.empty(4)
    dist.all_gather([output], X)
    return [X, output]


CALLS = [functional_gather, functional_scatter, lambda: gather(True), lambda: gather(False), scatter, in_place, nested]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("call", CALLS)
def test_each_collective_is_seen_with_inputs_and_outputs_and_gives_what_it_gave(call: Callable[[], list[torch.Tensor]]):
    seen: list[Issued] = []
    with after_collectives(seen.append):
        tensors = call()

    assert all(torch.equal(tensor, X) for tensor in tensors), "one rank: every result is the input"
    (issued,) = seen
    assert storages(issued.tensors) == storages(tensors)
    assert issued.group.group_name == dist.group.WORLD.group_name
    assert issued.work is not None, "gloo has a work for synchronous calls, too"
    call()
    assert len(seen) == 1, "seen after the end"


@pytest.mark.usefixtures("group")
def test_collective_of_a_backward_is_seen_without_a_grad_mode_and_in_inference():
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return functional_gather()[1]

    seen: list[Issued] = []
    with after_collectives(seen.append):
        leaf = X.clone().requires_grad_()
        Gather.apply(leaf).sum().backward()
        with torch.inference_mode():
            in_place()

    assert len(seen) == 2
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, X)


@pytest.mark.usefixtures("group")
def test_synchronous_calls_that_torch_spared_are_spared():
    seen: list[Issued] = []
    with after_collectives(seen.append, spare_synchronous=True):
        for call in CALLS:
            call()

    assert len(seen) == len(CALLS) - 2, "all but the synchronous all-gather and reduce-scatter of one tensor"


@pytest.mark.usefixtures("group")
def test_policies_see_nothing_on_cpus():
    with collective_memory("references"), collective_memory("record_stream"):
        assert torch.equal(gather(False)[1], X)
    RecordStreams()(Issued(operator="allreduce_", group=dist.group.WORLD, tensors=[X], work=None))


@pytest.mark.usefixtures("group")
def test_error_of_a_collective_is_its_own():
    seen: list[Issued] = []
    with after_collectives(seen.append), pytest.raises((RuntimeError, ValueError), match="invalid tensor size"):
        all_gather_single(torch.empty(3), X)
    assert seen == []


LAYOUTS = {
    "sequence parallel": Parallelism.Config(dp_shard=2, tp=2),
    "replicated": Parallelism.Config(dp_replicate=2, dp_shard=2, tp=2, sequence_parallel=False),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_collective_of_a_training_is_seen_with_all_its_bytes(tmp_path, monkeypatch, layout):
    """FSDP2 or HSDP × TP on ranks that are not there: count and bytes of the ledger, which recordings confirm."""
    world_size = layout.dp_replicate * layout.dp_shard * layout.tp
    config = Trainer.Config(
        world_size=world_size,
        model=Decoder.Config(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=64),
        parallelism=layout,
        training=Training.Config(device="cpu", steps=1, seq_len=16, mixed_precision_param="float32"),
        recorder=Recorder.Config(trace=Window(), memory=Window()),
    )
    for name, value in {"RANK": 0, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, MODE_VARIABLE: "rehearsal"}.items():
        monkeypatch.setenv(name, str(value))
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()

    def count(issued: Issued) -> None:
        kind, _ = OPERATORS[f"c10d::{issued.operator}"]
        key = issued.group.group_desc.removeprefix("mesh_"), kind
        counts[key] += 1
        sizes[key] += max(tensor.numel() * tensor.element_size() for tensor in issued.tensors)

    try:
        with after_collectives(count):
            config.build(tmp_path).train()
    finally:
        debug._clear_fast_path_sharding_prop_cache()
        debug._clear_python_sharding_prop_cache()

    predicted = by_dimension_and_kind(collectives(config))
    assert counts == {(c.dimension, c.kind): c.count for c in predicted}
    assert sizes == {(c.dimension, c.kind): c.bytes for c in predicted}


def test_legacy_memory_needs_cuda_and_other_ranks(tmp_path, monkeypatch):
    config = Trainer.Config(training=Training.Config(device="cpu", collective_memory="record_stream"))
    with pytest.raises(UsageError, match=r"training\.collective_memory=record_stream needs CUDA"):
        config.build(tmp_path)
    monkeypatch.setenv(MODE_VARIABLE, "rehearsal")
    config.training.collective_memory = "references"
    config.workload = "collectives"
    with pytest.raises(UsageError, match=r"workload=collectives: mode rehearsal sends nothing"):
        config.build(tmp_path)
