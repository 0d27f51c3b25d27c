"""Llama 3.1 and 3.2 on CUDA devices, one rank each.

Shapes: the `config.json` of meta-llama/Llama-3.2-1B and -3B (tied embeddings), Llama-3.1-8B, -70B and -405B.
Rotary frequencies are not rescaled for long contexts, which changes no size and no time.
"""

from __future__ import annotations

from harness.config import Decoder, Optimizer, Parallelism, Trainer, Training


def llama3_1b() -> Trainer.Config:
    """TP2, FSDP over the ranks that leaves: FSDP4 × TP2 on the default 8, another degree with `--nproc`."""
    return _run("llama3_1b", _model_1b(), Parallelism.Config(tp=2))


def llama3_1b_fsdp4_tp2() -> Trainer.Config:
    """FSDP4 × TP2, exactly: 8 ranks."""
    return _run("llama3_1b_fsdp4_tp2", _model_1b(), Parallelism.Config(dp_shard=4, tp=2))


def llama3_1b_untied_fsdp4_tp2() -> Trainer.Config:
    """The same with a head of its own: 1,498,482,688 parameters instead of 1,235,814,400."""
    config = llama3_1b_fsdp4_tp2()
    config.name, config.model.tied_embeddings = "llama3_1b_untied_fsdp4_tp2", False
    return config


def llama3_1b_hsdp() -> Trainer.Config:
    """HSDP: two replicas of FSDP2 × TP2 on 8 ranks."""
    return _run("llama3_1b_hsdp", _model_1b(), Parallelism.Config(dp_replicate=2, dp_shard=2, tp=2))


def llama3_3b() -> Trainer.Config:
    """FSDP over all ranks."""
    model = Decoder.Config(
        vocab_size=128_256, dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, ffn_dim=8192, tied_embeddings=True
    )
    return _run("llama3_3b", model, Parallelism.Config())


def llama3_8b() -> Trainer.Config:
    """TP2, FSDP over the ranks that leaves: FSDP4 × TP2 on the default 8."""
    model = Decoder.Config(vocab_size=128_256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336)
    return _run("llama3_8b", model, Parallelism.Config(tp=2))


def llama3_70b() -> Trainer.Config:
    """TP8 inside a node, FSDP over 8 nodes: 64 ranks."""
    model = Decoder.Config(vocab_size=128_256, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28_672)
    return _run("llama3_70b", model, Parallelism.Config(tp=8), world_size=64)


def llama3_405b() -> Trainer.Config:
    """TP8 inside a node, FSDP over 64 nodes: 512 ranks."""
    model = Decoder.Config(vocab_size=128_256, dim=16_384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim=53_248)
    return _run("llama3_405b", model, Parallelism.Config(tp=8), world_size=512)


def _run(name: str, model: Decoder.Config, parallelism: Parallelism.Config, *, world_size: int = 8) -> Trainer.Config:
    return Trainer.Config(
        name=name,
        world_size=world_size,
        model=model,
        parallelism=parallelism,
        training=Training.Config(device="cuda", steps=10, micro_batch_size=1, seq_len=2048),
        optimizer=Optimizer.Config(warmup_steps=2, schedule="cosine"),
    )


def _model_1b() -> Decoder.Config:
    return Decoder.Config(
        vocab_size=128_256, dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192, tied_embeddings=True
    )
