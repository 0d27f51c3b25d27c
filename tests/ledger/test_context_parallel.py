"""One context-parallel attention on the CPU, byte by byte, and the closed forms of what it keeps and sends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from harness.config import Decoder, Parallelism, Trainer, Training
from harness.ledger import predict
from harness.ledger.context_parallel import KEYS
from harness.ledger.context_parallel import ContextParallel as Table
from harness.trainer.context_parallel import ContextParallel

from .test_operators import HD, VALUES, B, H, K, S, agree, leaf, measured, predicted

SIZE = 4


def layout(**options: object) -> Trainer.Config:
    return Trainer.Config(world_size=SIZE, parallelism=Parallelism.Config(cp=SIZE, **options))  # type: ignore[arg-type]


@pytest.fixture(params=range(SIZE))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", rank=request.param, world_size=SIZE)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("exchange", ["allgather", "ring"])
@pytest.mark.parametrize("balance", ["head_tail", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_attention(dtype: torch.dtype, balance: str, exchange: str, rank: int) -> None:
    config = layout(cp_attention=exchange, cp_load_balance=balance)
    place = ContextParallel.of(config, dist.distributed_c10d._get_default_group())

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return place.attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).flatten(2)

    real = measured(attention, leaf(dtype, B, S, H, HD), leaf(dtype, B, S, K, HD), leaf(dtype, B, S, K, HD))
    table = predicted(
        dtype.itemsize,
        lambda ops, i: Table(ops, config, rank).attention("attention", *i),
        ["T·d", "T·kv", "T·kv"],
        "T·d",
        values=VALUES | {"c": SIZE},
    )
    agree(table, real)


def long_run(cp: int, tp: int, exchange: str) -> Trainer.Config:
    """Llama 3 8B's layers on sequences of 8,192 tokens a rank."""
    return Trainer.Config(
        world_size=cp * tp,
        model=Decoder.Config(vocab_size=128_256, dim=4096, n_layers=2, n_heads=32, n_kv_heads=8, ffn_dim=14_336),
        parallelism=Parallelism.Config(cp=cp, tp=tp, cp_attention=exchange),  # type: ignore[arg-type]
        training=Training.Config(seq_len=8192 * cp),
    )


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [2, 8])
def test_what_is_kept_for_backward(cp: int, tp: int) -> None:
    """Keys and values of the whole sequence where they are gathered, else of the rank's own tokens: 4·T·kv/t bytes in
    bfloat16."""
    own = 4 * 8192 * 1024 // tp
    for exchange, kept in (("allgather", cp * own), ("ring", own)):
        (loss,) = [
            i for i in predict(long_run(cp, tp, exchange), "cuda").ranks[0].timeline if i.name == "forward: loss"
        ]
        assert loss.categories[KEYS] == 2 * kept


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_what_is_sent(checkpointing: str) -> None:
    cp, tp, layers = 4, 2, 2
    again = layers if checkpointing != "none" else 0
    whole = 4 * cp * 8192 * 1024 // tp

    def sent(exchange: str) -> dict[str, tuple[int, int]]:
        config = long_run(cp, tp, exchange)
        config.activation_checkpoint.mode = checkpointing  # type: ignore[assignment]
        return {c.kind: (c.count, c.bytes) for c in predict(config, "cpu").communication if c.dimension == "cp"}

    gathers = layers + again
    assert sent("allgather") == {
        "all_gather": (gathers, gathers * whole),
        "reduce_scatter": (layers, layers * whole),
    }
    hops, home = (2 * layers + again) * (cp - 1), layers * cp
    assert sent("ring") == {"all_to_all": (hops + home, hops * whole // cp + home * 2 * whole // cp)}


def test_ranks_that_see_different_blocks_are_told_apart() -> None:
    """Each is the first of its kind, or alike one that is; all have the same parameters."""
    ranks = predict(long_run(8, 1, "ring"), "cpu").ranks
    assert all(ranks[rank.alike_rank].alike_rank == rank.alike_rank <= rank.rank for rank in ranks)
    assert 1 < len({rank.alike_rank for rank in ranks}) < 8
