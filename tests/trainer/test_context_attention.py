"""Attention put together from blocks against plain attention; whole runs over real groups are in test_end_to_end."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from harness.config import Decoder
from harness.context_parallel import Block, sources, visible
from harness.trainer.context_parallel import (
    ContextParallel,
    _attend,
    _Attended,
    _gradients,
    _kernel,
    _keys,
    _merged,
    _queries,
)
from harness.trainer.model.decoder import Decoder as Model
from harness.trainer.model.rope import rotary_table

BATCH, HEADS, KEY_HEADS, SEQUENCE, WIDTH = 2, 4, 2, 48, 16
WHOLE = Block("all", "all", causal=True)

DEVICES = [
    ("cpu", torch.float32, 2e-6),
    pytest.param(
        "cuda",
        torch.bfloat16,
        2e-2,
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ),
]


@pytest.mark.parametrize("balance", ["head_tail", "none"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
def test_merged_blocks_are_plain_attention_with_its_gradients(size, balance, device, dtype, tolerance):
    """The ranks one after the other, each with the shares of all."""
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(BATCH, SEQUENCE, heads, WIDTH, device=device).to(dtype)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    )
    leaves = [tensor.to(torch.float32, copy=True).requires_grad_() for tensor in (q, k, v)]
    by_heads = [leaf.transpose(1, 2) for leaf in leaves]
    expected = scaled_dot_product_attention(*by_heads, is_causal=True, enable_gqa=True).transpose(1, 2)
    to_q, *to_kv = torch.autograd.grad(expected, leaves, grad.float())

    places = [_positions(rank, size, balance).to(device) for rank in range(size)]
    shares = [torch.stack((k[:, own], v[:, own])) for own in places]
    to_shares = [torch.zeros_like(share, dtype=torch.float32) for share in shares]
    with torch.no_grad():
        for rank, own in enumerate(places):
            out, to_own = _attention_of(rank, size, balance, q[:, own], grad[:, own], shares, to_shares)
            _assert_close(out, expected[:, own], tolerance)
            _assert_close(to_own, to_q[:, own], tolerance)
    for own, found in zip(places, to_shares, strict=True):
        _assert_close(found, torch.stack(to_kv)[:, :, own], tolerance)


def _attention_of(rank, size, balance, q, grad, shares, to_shares):
    """One rank's output and gradient of its queries, [batch, tokens, heads, width]; adds to those of all shares."""
    q, grad = q.transpose(1, 2), grad.transpose(1, 2)
    kernel = _kernel(q, *_keys(WHOLE, shares[rank]))
    blocks = [(source, block) for source in sources(rank, size) if (block := visible(rank, source, balance))]
    total: _Attended | None = None
    for source, block in blocks:
        total = _merged(total, _attend(kernel, block, q, shares[source]), block)
    assert total is not None
    out, to_q = total.out.to(q.dtype), torch.zeros_like(total.out)
    for source, block in blocks:
        found, *to_kv = _gradients(kernel, block, grad, q, shares[source], out, total.lse, [*total.random])
        _queries(block, to_q).add_(found)
        for whole, part in zip(to_shares[source], to_kv, strict=True):
            _keys(block, whole).add_(part)
    return out.transpose(1, 2), to_q.transpose(1, 2)


@pytest.mark.parametrize("kernel", ["flash_attention", "cudnn_attention"])
@pytest.mark.parametrize("block", [WHOLE, Block("tail", "all", causal=False), Block("all", "head", causal=False)])
def test_calls_are_those_of_cuda_kernels(kernel, block):
    """Their shapes alone, on the meta device: what they compute is tested above where there is a GPU."""
    q = torch.empty(BATCH, SEQUENCE, HEADS, WIDTH, device="meta", dtype=torch.bfloat16).transpose(1, 2)
    kv = torch.empty(2, BATCH, SEQUENCE, KEY_HEADS, WIDTH, device="meta", dtype=torch.bfloat16)
    found = _attend(kernel, block, q, kv)
    assert found.out.shape == _queries(block, q).shape
    assert found.lse.shape == found.out.shape[:3]
    lse = torch.empty(q.shape[:3], device="meta")
    gradients = _gradients(kernel, block, q, q, kv, q, lse, [*found.random])
    assert [gradient.shape for gradient in gradients] == [found.out.shape, *(part.shape for part in _keys(block, kv))]


def _positions(rank: int, size: int, balance: str) -> torch.Tensor:
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        place = ContextParallel(group=dist.group.WORLD, exchange="ring", balance=balance)
        assert (place.rank, place.size) == (rank, size)
        return place.positions(SEQUENCE)
    finally:
        dist.destroy_process_group()


def _assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert (found.float() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("exchange", ["allgather", "ring"])
def test_shapes_and_layout_are_those_of_plain_attention(fake_world, exchange):
    """Nothing is copied around attention: outputs and gradients are laid out by tokens, as the projections are."""
    with fake_world(1, 4):
        place = ContextParallel(group=dist.group.WORLD, exchange=exchange, balance="head_tail")
        leaves = [torch.randn(BATCH, SEQUENCE, n, WIDTH, requires_grad=True) for n in (HEADS, KEY_HEADS, KEY_HEADS)]
        out = place.attend(*(leaf.transpose(1, 2) for leaf in leaves))
        gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert out.shape == (BATCH, HEADS, SEQUENCE, WIDTH)
    assert out.transpose(1, 2).is_contiguous()
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert gradient.shape == leaf.shape
        assert gradient.is_contiguous()


def test_positions_of_a_rank_decide_its_rotary_table(fake_world):
    with fake_world(1, 2):
        model = Model(Decoder.Config(vocab_size=32, dim=32, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=32), seq_len=8)
        ContextParallel(group=dist.group.WORLD, exchange="ring", balance="head_tail").shard(model)
        model.recompute_buffers()
    assert model.positions.tolist() == [2, 3, 4, 5]
    assert torch.equal(model.rotary, rotary_table(8, 16, model.config.rope_theta, "cpu")[2:6])
