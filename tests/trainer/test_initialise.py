"""Every layout must start from the same weights, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from harness.config import Decoder, Trainer
from harness.trainer.fully_sharded import fully_shard_decoder
from harness.trainer.initialise import _offset, initialise
from harness.trainer.model.decoder import Decoder as Model
from harness.trainer.model.decoder_sharding import shard_decoder
from harness.trainer.parallel_dims import ParallelDims

# 6 rows of norm-free matrices over 4 shards are uneven: torch.chunk gives 2, 2, 2, 0.
MODEL = Decoder.Config(vocab_size=30, dim=12, n_layers=2, n_heads=6, n_kv_heads=2, ffn_dim=22)


def whole(seed: int = 3) -> Model:
    model = MODEL.build(seq_len=8)
    initialise(model, seed)
    return model


def sharded(dp_shard: int, tp: int, seed: int = 3) -> Model:
    config = Trainer.Config(world_size=dp_shard * tp, model=MODEL)
    config.parallelism.dp_shard, config.parallelism.tp = dp_shard, tp
    mesh = ParallelDims.from_config(config).build_mesh("cpu")
    with torch.device("meta"):
        model = MODEL.build(seq_len=8)
    if tp > 1:
        shard_decoder(model, mesh["tp"], sequence_parallel=True)
    fully_shard_decoder(
        model, mesh["dp_shard"], param_dtype=torch.float32, reduce_dtype=torch.float32, policy="default"
    )
    model.to_empty(device="cpu")
    initialise(model, seed)
    return model


@pytest.mark.parametrize(("dp_shard", "tp"), [(4, 1), (1, 2), (2, 2), (4, 2), (3, 2)])
def test_the_shards_of_all_ranks_are_the_single_process_weights(fake_world, dp_shard, tp):
    expected = {name: parameter.detach() for name, parameter in whole().named_parameters()}
    covered = {name: torch.zeros(p.shape, dtype=torch.int) for name, p in expected.items()}
    for rank in range(dp_shard * tp):
        with fake_world(rank, dp_shard * tp):
            for name, parameter in sharded(dp_shard, tp).named_parameters():
                assert isinstance(parameter, DTensor)
                local = parameter.to_local()
                start = _offset(parameter)
                place = tuple(slice(s, s + n) for s, n in zip(start, local.shape, strict=False))
                assert torch.equal(local, expected[name][place]), (name, rank)
                covered[name][place] += 1
    for name, count in covered.items():
        assert count.min() >= 1, f"{name}: some element is on no rank"
        copies = 1 if "norm" not in name else tp
        assert count.max() == copies, name


def test_weights_are_standard_normal_scaled_and_depend_on_seed_and_name():
    config = Decoder.Config(vocab_size=512, dim=256, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=512)
    model, other = config.build(seq_len=8), config.build(seq_len=8)
    initialise(model, 0)
    initialise(other, 1)
    weights = dict(model.named_parameters())
    for name, std in {"tok_embeddings.weight": 0.02, "layers.0.feed_forward.w2.weight": 0.01}.items():
        w = weights[name].detach()
        assert w.mean().abs() < 5 * std / w.numel() ** 0.5
        assert w.std() == pytest.approx(std, rel=0.02)
        # Kurtosis of a normal is 3; a uniform would give 1.8.
        assert ((w / w.std()) ** 4).mean() == pytest.approx(3, abs=0.15)
    assert not torch.equal(weights["layers.0.attention.wq.weight"], weights["layers.0.attention.wo.weight"])
    first, second = weights["layers.0.attention.wk.weight"], weights["layers.1.attention.wk.weight"]
    assert torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1].abs() < 0.02
    assert not torch.equal(weights["lm_head.weight"], dict(other.named_parameters())["lm_head.weight"])
    assert torch.equal(weights["norm.weight"], torch.ones(256))


def test_the_rotary_table_survives_to_empty():
    with torch.device("meta"):
        model = MODEL.build(seq_len=8)
    model.to_empty(device="cpu")
    initialise(model, 0)
    assert torch.equal(model.rotary, whole().rotary)
    assert "rotary" not in model.state_dict()
