"""Where the decoder's states and activations live on the `tp` axis (torchtitan's plan, Megatron's scheme
arXiv 1909.08053 with the sequence parallelism of arXiv 2205.05198)."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from harness.trainer.model.decoder import Decoder, DecoderLayer
from harness.trainer.sharding import ShardingConfig, shard_module

SEQUENCE = 1
"""Dimension of the sequence in [batch, seq, dim]."""


def shard_decoder(model: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool, async_op: bool = False) -> None:
    """Distributes every state of `model` over `mesh` and installs the redistributions around its modules; `async_op`
    as of `shard_module`."""
    between: Placement = Shard(SEQUENCE) if sequence_parallel else Replicate()
    norm = ShardingConfig(states={"weight": Replicate()}, in_src=between, out_dst=between)
    gather = ShardingConfig(in_src=between, in_dst=Replicate())
    column = ShardingConfig(states={"weight": Shard(0)}, out_dst=Shard(2))
    row = ShardingConfig(states={"weight": Shard(1)}, in_src=Shard(2), out_src=Partial(), out_dst=between)

    def shard(module: nn.Module, config: ShardingConfig) -> None:
        shard_module(module, config, mesh, async_op=async_op)

    if model.tok_embeddings is not None:
        embedding = ShardingConfig(states={"weight": Shard(0)}, in_src=Replicate(), out_src=Partial(), out_dst=between)
        shard(model.tok_embeddings, embedding)
    for layer in model.layers.values():
        assert isinstance(layer, DecoderLayer)
        shard(layer.attention_norm, norm)
        shard(layer.ffn_norm, norm)
        # One gather feeds the three (two) projections; their input gradients are summed before they are scattered.
        shard(layer.attention, gather)
        shard(layer.feed_forward, gather)
        attention, feed_forward = layer.attention, layer.feed_forward
        for linear in (attention.wq, attention.wk, attention.wv, feed_forward.w1, feed_forward.w3):
            shard(linear, column)
        for linear in (attention.wo, feed_forward.w2):
            shard(linear, row)
    if model.norm is not None:
        shard(model.norm, norm)
    if model.lm_head is not None:
        head = ShardingConfig(states={"weight": Shard(0)}, in_src=between, in_dst=Replicate(), out_dst=Shard(2))
        shard(model.lm_head, head)
    model.tie_embeddings()
