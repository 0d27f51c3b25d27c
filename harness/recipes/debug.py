"""Runs of seconds on any machine, CPU included.

Everything is float32: CPUs without bfloat16 units emulate it slowly, and losses of different layouts then agree to
rounding.
"""

from __future__ import annotations

from harness.config import Data, Decoder, Optimizer, Parallelism, Recorder, Trainer, Training, Window


def _small(name: str, world_size: int, parallelism: Parallelism.Config) -> Trainer.Config:
    return Trainer.Config(
        name=name,
        world_size=world_size,
        model=Decoder.Config(vocab_size=1024, dim=128, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=384),
        parallelism=parallelism,
        training=Training.Config(steps=10, micro_batch_size=2, seq_len=128, mixed_precision_param="float32"),
        optimizer=Optimizer.Config(lr=3e-3),
        recorder=Recorder.Config(trace=Window(start=4, steps=2), memory=Window(start=2, steps=2)),
    )


def tiny() -> Trainer.Config:
    """FSDP2 × TP2 with sequence parallelism: 4 processes."""
    return _small("tiny", 4, Parallelism.Config(dp_shard=2, tp=2))


def tiny_fsdp4() -> Trainer.Config:
    """The same model, FSDP only: 4 processes."""
    return _small("tiny_fsdp4", 4, Parallelism.Config(dp_shard=4))


def single() -> Trainer.Config:
    """The same model in one process."""
    return _small("single", 1, Parallelism.Config(dp_shard=1))


def text() -> Trainer.Config:
    """FSDP2 × TP2 on documents of yours, byte by byte (`--data.path FILE`): 4 processes."""
    run = _small("text", 4, Parallelism.Config(dp_shard=2, tp=2))
    run.data = Data.Config(dataset="text")
    run.model.vocab_size = 320  # 258 tokens, and what makes it divide well
    run.training.steps = 300
    run.optimizer.warmup_steps, run.optimizer.schedule = 20, "cosine"
    return run
