"""One rank's model on the meta device, as it trains: cut, sharded, wrapped, and not yet in any memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from harness import config
from harness.float8 import Outcome
from harness.pipeline.plan import Plan
from harness.trainer.activation_checkpoint import checkpoint_layers
from harness.trainer.compiled import Compiled
from harness.trainer.context_parallel import ContextParallel
from harness.trainer.float8 import convert_linears
from harness.trainer.fully_sharded import fully_shard_decoder, set_fsdp_communication
from harness.trainer.model.decoder import Decoder
from harness.trainer.model.decoder_sharding import shard_decoder
from harness.trainer.parallel_dims import data_mesh
from harness.trainer.pipeline import own_part, stage_modules

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """`model`: all of it, or of a pipeline what the rank holds; `roots`: what FSDP2 wraps, of a pipeline its stages,
    which share the modules of `model`. `float8`: what `convert_linears` says of itself."""

    model: Decoder
    roots: list[Decoder]
    compiled: Compiled
    float8: Outcome | None


def build_on_meta(
    config: config.Trainer.Config,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    plan: Plan | None = None,
    context: ContextParallel | None = None,
) -> Built:
    """The part of this rank in `mesh`, that will run on `device`; `plan` and `context` where its layout has them."""
    training, layout = config.training, config.parallelism
    with torch.device("meta"):
        model = config.model.build(seq_len=training.seq_len)
    if plan is not None:
        model = own_part(model, plan, mesh.get_local_rank("pp"))
    float8 = convert_linears(model, config, device)
    if layout.tp > 1:
        shard_decoder(model, mesh["tp"], sequence_parallel=layout.sequence_parallel, async_op=layout.tp_async)
    if context is not None:
        context.shard(model)
    checkpointed = checkpoint_layers(
        model, config.activation_checkpoint, keeps_attention=context is None, compiled=config.compile.blocks
    )
    compiled = Compiled(config, device)
    compiled.layers(model, checkpointed)
    roots = [model] if plan is None else stage_modules(model, plan, mesh.get_local_rank("pp"))
    for root in roots:
        fully_shard_decoder(
            root,
            data_mesh(mesh),
            param_dtype=DTYPES[training.mixed_precision_param],
            reduce_dtype=DTYPES[training.mixed_precision_reduce],
            # The schedule says what is gathered from one micro-batch to the next.
            policy=layout.reshard_after_forward if plan is None else "never",
            head_in_chunks=training.loss_chunks > 1,
            cpu_offload=training.cpu_offload,
        )
        set_fsdp_communication(root, data_mesh(mesh), layout)
    return Built(model=model, roots=roots, compiled=compiled, float8=float8)
