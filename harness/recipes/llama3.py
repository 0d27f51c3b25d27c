"""Llama 3 sizes on CUDA devices, one per rank.

The embedding and the head are not tied in this version, and rotary frequencies are not rescaled for long contexts:
`llama3_1b` has Llama 3.2 1B's shapes but 1,498,482,688 parameters where the tied original has 1,235,814,400.
Shapes: the `config.json` of meta-llama/Llama-3.2-1B and meta-llama/Llama-3.1-8B.
"""

from __future__ import annotations

from harness.config import Decoder, Parallelism, Trainer, Training


def _llama(name: str, model: Decoder.Config, parallelism: Parallelism.Config) -> Trainer.Config:
    return Trainer.Config(
        name=name,
        world_size=8,
        model=model,
        parallelism=parallelism,
        training=Training.Config(device="cuda", steps=10, micro_batch_size=1, seq_len=2048),
    )


def _model_1b() -> Decoder.Config:
    return Decoder.Config(vocab_size=128_256, dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192)


def llama3_1b() -> Trainer.Config:
    """TP2, FSDP over the ranks that leaves: FSDP4 × TP2 on the default 8, another degree with `--nproc`."""
    return _llama("llama3_1b", _model_1b(), Parallelism.Config(tp=2))


def llama3_1b_fsdp4_tp2() -> Trainer.Config:
    """FSDP4 × TP2, exactly: 8 ranks."""
    return _llama("llama3_1b_fsdp4_tp2", _model_1b(), Parallelism.Config(dp_shard=4, tp=2))


def llama3_8b() -> Trainer.Config:
    """TP2, FSDP over the ranks that leaves: FSDP4 × TP2 on the default 8."""
    model = Decoder.Config(vocab_size=128_256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336)
    return _llama("llama3_8b", model, Parallelism.Config(tp=2))
