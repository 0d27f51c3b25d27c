"""The real trainer, one rank of each case on the fake process group; `main` prints its figures.

Runs as a process of its own, single-threaded, so that it can fork.
"""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch

from harness.compilation import Compile
from harness.config import ActivationCheckpoint, Decoder, Parallelism, Pipeline, Recorder, Trainer, Training
from harness.config_json import field_names
from harness.float8 import INSTALL, Float8
from harness.recording import MODE_VARIABLE
from harness.trainer import trainer

from .live import Live

MODEL = Decoder.Config(vocab_size=512, dim=128, n_layers=3, n_heads=8, n_kv_heads=4, ffn_dim=384)
TIED = replace(MODEL, tied_embeddings=True)
WIDE_TIED = replace(TIED, vocab_size=4096)
"""The end of backward, where the two gradients of the matrix are added and reduced, is the peak."""
WIDE = replace(MODEL, vocab_size=4096)
UNEVEN = Decoder.Config(vocab_size=514, dim=96, n_layers=2, n_heads=6, n_kv_heads=2, ffn_dim=250)


def layout(
    dp_shard: int, tp: int, *, model: Decoder.Config = MODEL, batch: int = 2, seq_len: int = 64, **options: Any
) -> Trainer.Config:
    parallelism = {name: options.pop(name) for name in field_names(Parallelism.Config) if name in options}
    float8 = {name: options.pop(name) for name in field_names(Float8.Config) if name in options}
    checkpointing = {
        field: options.pop(name)
        for name, field in (("checkpointing", "mode"), ("every", "every"), ("memory_budget", "memory_budget"))
        if name in options
    }
    compiled = {part: part in options.pop("compiled", ()) for part in ("blocks", "loss")}
    pipeline = {name: options.pop(name) for name in field_names(Pipeline.Config) if name in options}
    config = Trainer.Config(
        world_size=dp_shard * tp * math.prod(parallelism.get(axis, 1) for axis in ("dp_replicate", "cp", "pp")),
        model=model,
        parallelism=Parallelism.Config(dp_shard=dp_shard, tp=tp, **parallelism),
        pipeline=Pipeline.Config(**pipeline),
        activation_checkpoint=ActivationCheckpoint.Config(**checkpointing),
        compile=Compile.Config(backend="aot_eager", **compiled) if any(compiled.values()) else Compile.Config(),
        float8=Float8.Config(**float8),
        training=Training.Config(micro_batch_size=batch, seq_len=seq_len, device="cpu", **options),
    )
    config.validate()
    return config


ATTENTIVE = Decoder.Config(vocab_size=64, dim=128, n_layers=2, n_heads=8, n_kv_heads=8, ffn_dim=32)
"""Attention of long sequences is the peak of forward, backward or both."""
DEEP = replace(MODEL, n_layers=8)
DEEP_WIDE = replace(WIDE, n_layers=4)
LAYERS = ("blocks",)
FRONT, ENDS = ["tok_embeddings", "layers.0", "layers.1"], ["norm", "lm_head"]

CASES = {
    "fsdp2": (layout(2, 1), 0),
    "fsdp4_fp32": (layout(4, 1, mixed_precision_param="float32"), 0),
    "fsdp2_always": (layout(2, 1, reshard_after_forward="always"), 0),
    "fsdp2_never": (layout(2, 1, reshard_after_forward="never"), 0),
    "fsdp2_reduce_bf16": (layout(2, 1, mixed_precision_reduce="bfloat16"), 0),
    "tp2": (layout(1, 2), 0),
    "fsdp2_tp2": (layout(2, 2), 0),
    "fsdp2_tp2_fp32": (layout(2, 2, mixed_precision_param="float32"), 0),
    "fsdp2_tp2_one_sequence": (layout(2, 2, batch=1, seq_len=256), 0),
    "fsdp2_tp4_never": (layout(2, 4, reshard_after_forward="never", model=replace(MODEL, vocab_size=64)), 0),
    "fsdp2_tp2_replicated": (layout(2, 2, sequence_parallel=False), 0),
    "fsdp5_uneven": (layout(5, 1, model=UNEVEN), 0),
    "fsdp3_uneven_last_rank": (layout(3, 1, model=UNEVEN), 2),
    "fsdp6_tp2_uneven": (layout(6, 2, model=UNEVEN, seq_len=32), 0),
    "fsdp7_tp2_empty_last_rank": (layout(7, 2, model=UNEVEN, seq_len=32), 13),
    "single": (layout(1, 1), 0),
    "fsdp2_tp4_wide": (layout(2, 4, model=WIDE, seq_len=16), 0),
    "fsdp2_tp2_wide_replicated": (layout(2, 2, model=WIDE, seq_len=16, sequence_parallel=False), 0),
    "hsdp2x2": (layout(2, 1, dp_replicate=2), 0),
    "hsdp3x2_tp2_last_rank": (layout(2, 2, dp_replicate=3), 11),
    "hsdp2x3_reduce_bf16": (layout(3, 1, dp_replicate=2, mixed_precision_reduce="bfloat16", model=UNEVEN), 3),
    "hsdp2x1": (layout(1, 1, dp_replicate=2), 1),
    "hsdp3x1_tp2": (layout(1, 2, dp_replicate=3), 4),
    "hsdp2x2_always": (layout(2, 1, dp_replicate=2, reshard_after_forward="always"), 0),
    "tied2": (layout(2, 1, model=TIED), 0),
    "tied_single": (layout(1, 1, model=TIED), 0),
    "tied2_always": (layout(2, 1, model=TIED, reshard_after_forward="always"), 0),
    "tied2_never": (layout(2, 1, model=TIED, reshard_after_forward="never"), 0),
    "tied2_tp2": (layout(2, 2, model=TIED), 0),
    "tied2_tp4_wide": (layout(2, 4, model=WIDE_TIED, seq_len=16), 0),
    "tied4_wide": (layout(4, 1, model=WIDE_TIED, batch=1, seq_len=16), 0),
    "tied4_wide_fp32": (layout(4, 1, model=WIDE_TIED, batch=1, seq_len=16, mixed_precision_param="float32"), 0),
    "tied3_uneven": (layout(3, 1, model=replace(UNEVEN, tied_embeddings=True)), 2),
    "accumulate2": (layout(2, 1, accumulation_steps=2), 0),
    "accumulate3_never": (layout(4, 1, accumulation_steps=3, reshard_after_forward="never"), 0),
    "accumulate2_tp2": (layout(2, 2, accumulation_steps=2), 0),
    "accumulate2_tp2_replicated": (layout(2, 2, accumulation_steps=2, sequence_parallel=False), 0),
    "accumulate2_wide": (layout(2, 1, accumulation_steps=2, model=WIDE, batch=1, seq_len=16), 0),
    "accumulate2_reduce_bf16": (layout(3, 1, accumulation_steps=2, mixed_precision_reduce="bfloat16"), 0),
    "accumulate2_hsdp2x2_wide": (
        layout(2, 1, dp_replicate=2, accumulation_steps=2, model=WIDE, batch=1, seq_len=16),
        0,
    ),
    "prefetch0": (layout(2, 1, fsdp_prefetch=0), 0),
    "prefetch2_short": (layout(4, 1, fsdp_prefetch=2, batch=1, seq_len=16), 0),
    "prefetch9_tied_short": (layout(2, 1, fsdp_prefetch=9, model=TIED, batch=1, seq_len=16), 0),
    "prefetch1_tied_always_short": (
        layout(2, 1, fsdp_prefetch=1, model=TIED, batch=1, seq_len=16, reshard_after_forward="always"),
        0,
    ),
    "prefetch3_accumulate2_tp2_short": (
        layout(2, 2, fsdp_prefetch=3, accumulation_steps=2, batch=1, seq_len=16),
        0,
    ),
    "async_unshard_short": (layout(4, 1, fsdp_async_unshard=True, batch=1, seq_len=16), 0),
    "async_unshard_prefetch2_short": (
        layout(4, 1, fsdp_async_unshard=True, fsdp_prefetch=2, batch=1, seq_len=16),
        0,
    ),
    "reduce_scatter_group_hsdp": (layout(2, 1, dp_replicate=2, fsdp_reduce_scatter_group="separate"), 0),
    "tp_async": (layout(2, 2, tp_async=True), 0),
    "tp_async_one_sequence": (layout(1, 2, tp_async=True, batch=1, seq_len=256), 0),
    "tp_async_replicated": (layout(2, 2, tp_async=True, sequence_parallel=False), 0),
    "full_tp2": (layout(2, 2, seq_len=256, checkpointing="full"), 0),
    "full_every_second_tp2_replicated": (
        layout(2, 2, seq_len=256, checkpointing="full", every=2, sequence_parallel=False),
        0,
    ),
    "selective_fp32": (layout(2, 1, seq_len=256, checkpointing="selective", mixed_precision_param="float32"), 0),
    "selective_tp2": (layout(2, 2, seq_len=256, checkpointing="selective", accumulation_steps=2), 0),
    "selective_tp_async": (layout(2, 2, seq_len=256, checkpointing="selective", tp_async=True), 0),
    "accumulate3_whole_tp2_fp32": (
        layout(
            *(2, 2), accumulation_steps=3, reduce_every_micro_batch=False, mixed_precision_param="float32", seq_len=16
        ),
        0,
    ),
    "accumulate3_whole_tied_hsdp2x2": (
        layout(2, 1, dp_replicate=2, model=WIDE_TIED, accumulation_steps=3, reduce_every_micro_batch=False, seq_len=16),
        0,
    ),
    "chunks4_single": (layout(1, 1, loss_chunks=4, model=WIDE), 0),
    "chunks4_fp32": (layout(2, 1, loss_chunks=4, model=WIDE, mixed_precision_param="float32"), 0),
    "chunks4_tp2_replicated_one_sequence": (
        layout(2, 2, loss_chunks=4, model=WIDE, batch=1, sequence_parallel=False),
        0,
    ),
    "chunks4_never": (layout(2, 1, loss_chunks=4, model=WIDE, reshard_after_forward="never"), 0),
    "chunks8_tied_hsdp2x2_tp2_reduce_bf16": (
        layout(2, 2, dp_replicate=2, loss_chunks=8, model=WIDE_TIED, mixed_precision_reduce="bfloat16"),
        0,
    ),
    "chunks4_accumulate3_whole_tied_tp2": (
        layout(2, 2, loss_chunks=4, model=WIDE_TIED, accumulation_steps=3, reduce_every_micro_batch=False),
        0,
    ),
    "chunks4_selective_tp2": (layout(2, 2, loss_chunks=4, seq_len=256, checkpointing="selective"), 0),
    "everything": (
        layout(3, 2, dp_replicate=2, accumulation_steps=2, model=WIDE_TIED, seq_len=16, reshard_after_forward="always"),
        11,
    ),
    "everything_reduce_bf16": (
        layout(
            2, 2, dp_replicate=3, accumulation_steps=3, model=WIDE_TIED, seq_len=16, mixed_precision_reduce="bfloat16"
        ),
        0,
    ),
    "pp2_1f1b_fsdp2": (layout(2, 1, pp=2, micro_batches=4), 1),
    "pp2_1f1b_last_fp32": (layout(1, 1, pp=2, mixed_precision_param="float32"), 1),
    "pp2_accumulate2_hsdp2x2": (layout(2, 1, dp_replicate=2, pp=2, accumulation_steps=2), 0),
    "pp2_tied_fsdp2_last": (layout(2, 1, pp=2, model=WIDE_TIED, batch=1, seq_len=16), 3),
    "pp2_tied_zbv_tp2": (layout(1, 2, pp=2, schedule="ZBVZeroBubble", model=replace(DEEP, tied_embeddings=True)), 0),
    "pp2_gpipe_fsdp3_uneven": (layout(3, 1, pp=2, schedule="GPipe", model=UNEVEN), 5),
    "pp2_interleaved_tp2": (
        layout(1, 2, pp=2, schedule="Interleaved1F1B", model=DEEP, mixed_precision_param="float32"),
        0,
    ),
    # Reductions, of two stages with micro-batches of their own, are the peak.
    "pp2_interleaved_cp2": (layout(1, 1, cp=2, pp=2, schedule="Interleaved1F1B", model=DEEP_WIDE, seq_len=16), 3),
    "pp3_bfs_reduce_bf16": (
        layout(2, 1, pp=3, schedule="LoopedBFS", model=DEEP, mixed_precision_reduce="bfloat16"),
        2,
    ),
    "pp2_bfs_frees_stages": (layout(2, 1, pp=2, schedule="LoopedBFS", stages_per_rank=4, model=DEEP), 1),
    "pp4_zero_bubble": (layout(1, 1, pp=4, schedule="InterleavedZeroBubble", micro_batches=8, model=DEEP), 1),
    "pp3_zero_bubble_last_never_widens": (
        layout(1, 2, pp=3, schedule="InterleavedZeroBubble", micro_batches=2, model=DEEP),
        4,
    ),
    "pp2_zbv_tp2": (layout(1, 2, pp=2, schedule="ZBVZeroBubble", micro_batches=6, model=DEEP), 0),
    "pp2_zbv_tp2_replicated": (
        layout(1, 2, pp=2, schedule="ZBVZeroBubble", model=DEEP, sequence_parallel=False),
        2,
    ),
    "pp4_dualpipev_fp32": (
        layout(1, 1, pp=4, schedule="DualPipeV", model=DEEP, mixed_precision_param="float32"),
        1,
    ),
    "pp3_split": (layout(2, 1, pp=3, split=[["tok_embeddings"], ["layers.0", "layers.1", "layers.2"], ENDS]), 4),
    "pp2_embedding_alone_tp2": (
        layout(
            1,
            2,
            pp=2,
            batch=1,
            seq_len=16,
            model=WIDE,
            mixed_precision_param="float32",
            split=[FRONT[:1], ["layers.0", "layers.1", "layers.2", *ENDS]],
            micro_batches=4,
        ),
        0,
    ),
    "pp3_split_norm_apart": (layout(1, 2, pp=3, split=[[*FRONT, "layers.2"], ["norm"], ["lm_head"]]), 2),
    "cp2": (layout(1, 1, cp=2), 0),
    "cp2_fsdp2_ring": (layout(2, 1, cp=2, cp_attention="ring"), 3),
    "cp2_tp2_fp32": (layout(1, 2, cp=2, mixed_precision_param="float32"), 2),
    "cp4_ring_tp2_replicated": (layout(1, 2, cp=4, cp_attention="ring", sequence_parallel=False), 5),
    "hsdp2_cp2_in_order_accumulate2": (
        layout(1, 1, dp_replicate=2, cp=2, cp_load_balance="none", accumulation_steps=2),
        1,
    ),
    "cp3_fsdp2_uneven": (layout(2, 1, cp=3, model=UNEVEN, seq_len=48), 5),
    "cp2_long": (layout(1, 1, cp=2, model=ATTENTIVE, seq_len=512, mixed_precision_param="float32"), 1),
    "cp4_ring_long": (layout(1, 1, cp=4, cp_attention="ring", model=ATTENTIVE, seq_len=1024), 2),
    "cp4_ring_long_in_order": (
        layout(1, 1, cp=4, cp_attention="ring", cp_load_balance="none", model=ATTENTIVE, seq_len=1024),
        3,
    ),
    "cp2_ring_checkpointed": (
        layout(1, 1, cp=2, cp_attention="ring", checkpointing="full", model=ATTENTIVE, seq_len=512),
        1,
    ),
    "cp2_ring_selective_tp2": (layout(1, 2, cp=2, cp_attention="ring", checkpointing="selective"), 2),
    "float8_tensorwise_selective_tp2_fp32": (
        layout(*(2, 2), recipe="tensorwise", emulate=True, checkpointing="selective", mixed_precision_param="float32"),
        0,
    ),
    "float8_rowwise_tp2": (layout(2, 2, recipe="rowwise", emulate=True), 0),
    "float8_rowwise_full_tp2_replicated": (
        layout(2, 2, recipe="rowwise", emulate=True, checkpointing="full", sequence_parallel=False),
        0,
    ),
    "float8_rowwise_some_uneven": (layout(3, 1, recipe="rowwise", emulate=True, model=UNEVEN), 2),
    "float8_rowwise_gw_pp2_cp2": (layout(1, 1, pp=2, cp=2, recipe="rowwise_with_gw_hp", emulate=True), 1),
    # The products that GPUs make, which torch's CPU has too.
    "float8_kernels_tensorwise_tp2": (layout(2, 2, recipe="tensorwise"), 0),
    "float8_kernels_rowwise_fp32": (layout(2, 1, recipe="rowwise", mixed_precision_param="float32"), 0),
    "float8_kernels_rowwise_gw_tp2": (layout(2, 2, recipe="rowwise_with_gw_hp"), 0),
    "cp2_pp2_ring_zbv": (layout(1, 1, cp=2, pp=2, cp_attention="ring", schedule="ZBVZeroBubble", model=DEEP), 1),
    "compiled_fp32": (layout(1, 1, compiled=LAYERS, seq_len=256, mixed_precision_param="float32"), 0),
    "compiled_tp2": (layout(2, 2, compiled=LAYERS, seq_len=256), 0),
    "compiled_selective_tp2": (layout(2, 2, compiled=LAYERS, seq_len=256, checkpointing="selective"), 0),
    "compiled_selective_hsdp2x2_fp32": (
        layout(
            *(2, 1),
            dp_replicate=2,
            compiled=LAYERS,
            seq_len=256,
            checkpointing="selective",
            mixed_precision_param="float32",
        ),
        0,
    ),
    "compiled_full_every2": (layout(2, 1, compiled=LAYERS, seq_len=256, checkpointing="full", every=2), 0),
    "compiled_budget": (
        layout(1, 2, compiled=LAYERS, seq_len=256, checkpointing="memory_budget", memory_budget=0.5),
        0,
    ),
    "compiled_pp2": (layout(1, 1, pp=2, micro_batches=4, compiled=LAYERS, seq_len=256), 0),
    "compiled_loss_tp2_chunks4": (layout(1, 2, compiled=("loss",), loss_chunks=4, model=WIDE), 0),
}
"""Name -> (configuration, rank). The last rank has what is left of uneven rows, or none of them."""


def lacks(config: Trainer.Config) -> str | None:
    """What is missing here to run a case."""
    float8 = config.float8
    if float8.recipe == "none":
        return None
    if find_spec("torchao") is None:
        return f"torchao is not installed: {INSTALL}"
    ones, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        if not float8.emulate:
            torch._scaled_mm(ones, ones.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError as error:
        return f"this torch has no float8 products on the CPU: {error}"
    return None


class PhasePeaks:
    """A recorder of the most bytes alive in each phase of every step, over all its micro-batches."""

    def __init__(self) -> None:
        self.live = Live()
        self.peaks: list[dict[str, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to write."""

    @contextmanager
    def category(self, name: str) -> Iterator[None]:
        with self.live:
            yield

    @contextmanager
    def step(self, tags: Sequence[str] = ()) -> Iterator[None]:
        self.peaks.append({})
        self.live.restart()
        with self.live:
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        peaks = self.peaks[-1]
        self.live.peak = 0
        yield
        peaks[name] = max(peaks.get(name, 0), self.live.peak)

    def log(self, **values: object) -> None:
        """Losses are not looked at here."""

    def about(self, **facts: object) -> None:
        """What the program is like is known here."""

    def watch(self, model: object, optimizer: object) -> None:
        """What was allocated before the first step is known already."""


def figures(config: Trainer.Config, rank: int) -> dict[str, Any]:
    """Peaks in bytes of each phase of two steps of the trainer, and what the second sent as [group size, kind, count,
    bytes]."""
    recorder = PhasePeaks()

    class PeaksOnly(Recorder.Config):
        def build(self, directory: Path, **runtime: Any) -> Any:
            return recorder

    trainer.validate_device = lambda config, device: None  # GPUs' float8 products are the CPU's for as long
    os.environ |= {MODE_VARIABLE: "rehearsal", "RANK": str(rank), "WORLD_SIZE": str(config.world_size)}
    training = replace(config.training, steps=2)
    replace(config, training=training, recorder=PeaksOnly()).build(Path()).train()
    sent = recorder.live.sent
    counts = [[size, kind, n["count"], n["bytes"]] for (size, kind), n in sorted(sent.items())]
    return {"peaks": recorder.peaks, "sent": counts}


def main() -> None:
    """Every case in a fork: DTensor caches plans by mesh, and would hand a group of one case to another."""
    torch.set_num_threads(1)
    # Of torch.compile itself, which looks at tensors of a graph and means to ignore it.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    if any(not lacks(config) and config.float8.recipe != "none" for config, _ in CASES.values()):
        import_module("torchao.float8")  # once, for all forks
    gc.freeze()  # nor does each of them look through all that was imported for what is garbage
    context = multiprocessing.get_context("fork")
    found = {}
    for name, (config, rank) in CASES.items():
        if lacks(config):
            continue
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=lambda: send.send(figures(config, rank)))  # noqa: B023, it runs within the turn
        child.start()
        send.close()
        try:
            found[name] = receive.recv()
        except EOFError:
            sys.exit(f"case {name} failed")
        child.join()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
