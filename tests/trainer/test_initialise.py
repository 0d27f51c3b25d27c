"""Every layout must start from the same weights, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from harness.config import Decoder, Trainer
from harness.trainer.fully_sharded import fully_shard_decoder
from harness.trainer.initialise import _offset, initialise
from harness.trainer.model.decoder import Decoder as Model
from harness.trainer.model.decoder_sharding import shard_decoder
from harness.trainer.parallel_dims import ParallelDims, data_mesh

# 6 rows of norm-free matrices over 4 shards are uneven: torch.chunk gives 2, 2, 2, 0.
MODEL = Decoder.Config(vocab_size=30, dim=12, n_layers=2, n_heads=6, n_kv_heads=2, ffn_dim=22)


TIED = replace(MODEL, tied_embeddings=True)


def whole(seed: int = 3, shape: Decoder.Config = MODEL) -> Model:
    model = shape.build(seq_len=8)
    initialise(model, seed)
    return model


def sharded(dp_shard: int, tp: int, dp_replicate: int = 1, shape: Decoder.Config = MODEL, seed: int = 3) -> Model:
    config = Trainer.Config(world_size=dp_replicate * dp_shard * tp, model=shape)
    layout = config.parallelism
    layout.dp_shard, layout.tp, layout.dp_replicate = dp_shard, tp, dp_replicate
    mesh = ParallelDims.from_config(config).build_mesh("cpu")
    with torch.device("meta"):
        model = shape.build(seq_len=8)
    if tp > 1:
        shard_decoder(model, mesh["tp"], sequence_parallel=True)
    fully_shard_decoder(model, data_mesh(mesh), param_dtype=torch.float32, reduce_dtype=torch.float32, policy="default")
    model.to_empty(device="cpu")
    model.tie_embeddings()
    initialise(model, seed)
    return model


@pytest.mark.parametrize(
    ("dp_shard", "tp", "dp_replicate", "shape"),
    [(4, 1, 1, MODEL), (1, 2, 1, MODEL), (2, 2, 1, TIED), (4, 2, 1, MODEL), (3, 2, 1, TIED), (2, 1, 2, MODEL)],
)
def test_the_shards_of_all_ranks_are_the_single_process_weights(fake_world, dp_shard, tp, dp_replicate, shape):
    expected = {name: parameter.detach() for name, parameter in whole(shape=shape).named_parameters()}
    covered = {name: torch.zeros(p.shape, dtype=torch.int) for name, p in expected.items()}
    world_size = dp_replicate * dp_shard * tp
    for rank in range(world_size):
        with fake_world(rank, world_size):
            for name, parameter in sharded(dp_shard, tp, dp_replicate, shape).named_parameters():
                assert isinstance(parameter, DTensor)
                local = parameter.to_local()
                start = _offset(parameter)
                place = tuple(slice(s, s + n) for s, n in zip(start, local.shape, strict=False))
                assert torch.equal(local, expected[name][place]), (name, rank)
                covered[name][place] += 1
    for name, count in covered.items():
        assert count.min() >= 1, f"{name}: some element is on no rank"
        copies = dp_replicate * (tp if "norm" in name else 1)
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


def test_a_tied_head_is_the_embedding_through_sharding_and_materialising(fake_world):
    with fake_world(1, 4):
        model = sharded(2, 2, shape=TIED)
        assert model.lm_head.weight is model.tok_embeddings.weight
        names = [name for name, _ in model.named_parameters()]
        assert "tok_embeddings.weight" in names
        assert "lm_head.weight" not in names
        assert sum(p.numel() for p in model.parameters()) == TIED.params
