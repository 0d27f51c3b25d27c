"""How FSDP2's units communicate, with what torch has and with what stands in for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from harness.config import Decoder, Parallelism
from harness.record.collectives import OPERATORS, group_label, group_of
from harness.trainer.fully_sharded import (
    REDUCE_SCATTER_GROUP,
    fully_shard_decoder,
    reduce_scatter_groups,
    set_fsdp_communication,
)

LAYERS = 3


class Sent(TorchDispatchMode):
    """Counts collectives by kind and description of their group."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in OPERATORS:
            names = [argument.name for argument in func._schema.arguments]
            arguments = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            self.calls[OPERATORS[name][0], group_label(group_of(arguments))] += 1
        return func(*args, **(kwargs or {}))


def one_step(mesh: DeviceMesh, layout: Parallelism.Config) -> Counter[tuple[str, str]]:
    config = Decoder.Config(vocab_size=32, dim=16, n_layers=LAYERS, n_heads=2, n_kv_heads=2, ffn_dim=32)
    model = config.build(seq_len=4)
    fully_shard_decoder(
        model, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32, policy=layout.reshard_after_forward
    )
    set_fsdp_communication(model, mesh, layout)
    with Sent() as sent:
        model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    return sent.calls


@pytest.mark.parametrize("native", [True, False])
def test_a_separate_group_carries_every_reduce_scatter_and_no_all_gather(fake_world, monkeypatch, native):
    if native and not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
        # The other case, for torch 2.11 and 2.12, runs on every torch.
        pytest.skip("torch before 2.13 has no group of its own for reduce-scatters")
    if not native:
        monkeypatch.delattr(FSDPModule, "set_separate_reduce_scatter_group", raising=False)
    with fake_world(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        sent = one_step(mesh, Parallelism.Config(dp_replicate=2, fsdp_reduce_scatter_group="separate"))
        assert {kind: count for (kind, group), count in sent.items() if group == REDUCE_SCATTER_GROUP} == {
            "reduce_scatter": LAYERS + 2
        }
        assert ("reduce_scatter", "mesh_dp_shard") not in sent
        (group,) = reduce_scatter_groups()
        assert group.size() == 2


def test_without_one_nothing_is_made(fake_world):
    with fake_world(0, 2):
        sent = one_step(init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)), Parallelism.Config())
        assert reduce_scatter_groups() == []
        assert sum(count for (kind, _), count in sent.items() if kind == "reduce_scatter") == LAYERS + 2
