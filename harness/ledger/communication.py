"""Every collective of one optimizer step, counted from the configuration: exact, by mesh dimension and kind.

`bytes` is the full, unsharded side of each: all-gather output, reduce-scatter input, all-reduced tensor, what is sent.
Ranks of different pipeline stages communicate differently: every figure then says whose it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, get_args

from harness.config import DTYPE_BYTES, Trainer
from harness.float8 import conversion, local_shape
from harness.ledger.float8 import all_reduced
from harness.ledger.layout import checkpointed_layers, copies_of_unit, unit_parameters, within_a_budget
from harness.pipeline.actions import Action, each_step
from harness.pipeline.lowering import sends_and_receives
from harness.pipeline.plan import Plan, plan
from harness.pipeline.split import Part, whole

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv"]


@dataclass(frozen=True, slots=True)
class Collective:
    """`count` collectives a step and rank that move `bytes` in all; `purpose` says for what, `pipeline_rank` of which
    ranks, None where all are alike."""

    dimension: str
    kind: Kind
    purpose: str
    count: int
    bytes: int
    pipeline_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A stretch of the model on a rank: how often it is gathered in a pass of the schedule, and whether gradients are
    added up in the dtype of the reduction (not those of W alone, which no post-backward follows)."""

    part: Part
    stage: int | None = None
    gathers: int | None = None
    widens: bool = True


@dataclass(frozen=True, slots=True)
class HostCopies:
    """What CPU offload copies a step and rank: each all-gather's shard to the device, each reduced one to the host, all
    of the shard's float32."""

    to_device_bytes: int
    to_host_bytes: int
    pipeline_rank: int | None = None


def collectives(config: Trainer.Config) -> list[Collective]:
    """One entry per purpose; axes of one rank communicate nothing."""
    degrees = {
        "dp_replicate": config.parallelism.dp_replicate,
        config.fsdp_axis: config.fsdp_shards,
        "cp": config.parallelism.cp,
        "tp": config.parallelism.tp,
        "pp": config.parallelism.pp,
    }
    found: list[Collective] = []
    for rank, held in _held_by_rank(config).items():
        own = _of_rank(config, held)
        if rank is not None:
            pipeline = plan(config)
            own += [*_transfers(config, pipeline.actions[rank]), *_tied_gradients(config, pipeline, rank)]
        found += [replace(c, pipeline_rank=rank) for c in own]
    return [c for c in found if c.count and degrees[c.dimension] > 1]


def host_copies(config: Trainer.Config) -> list[HostCopies]:
    """None without CPU offload. A rank whose rows are fewer than others' copies as many to the device, padded."""
    if not config.training.cpu_offload:
        return []
    training, found = config.training, []
    for rank, held in _held_by_rank(config).items():
        of_kind = {"all_gather": 0, "reduce_scatter": 0}
        for c in _data_parallel(config, held):
            if c.kind in of_kind:
                of_kind[c.kind] += c.bytes
        gathered = of_kind["all_gather"] // DTYPE_BYTES[training.mixed_precision_param]
        reduced = of_kind["reduce_scatter"] // DTYPE_BYTES[training.mixed_precision_reduce]
        found.append(HostCopies(4 * gathered // config.fsdp_shards, 4 * reduced // config.fsdp_shards, rank))
    return found


def _held_by_rank(config: Trainer.Config) -> dict[int | None, list[Held]]:
    """Of each pipeline rank; None where there is no pipeline."""
    if config.parallelism.pp == 1:
        return {None: [Held(whole(config.model.n_layers))]}
    pipeline = plan(config)
    return {
        rank: [_held(pipeline, stage, row) for stage in pipeline.stages_of(rank)]
        for rank, row in enumerate(pipeline.actions)
    }


def _of_rank(config: Trainer.Config, held: Sequence[Held]) -> list[Collective]:
    parallel = (_data_parallel, _context_parallel, _tensor_parallel, _float8_scales)
    return [*(c for of_dimension in parallel for c in of_dimension(config, held)), *_scalars(config)]


def _held(pipeline: Plan, stage: int, row: Sequence[Action]) -> Held:
    own = [action.kind for action in each_step(row) if action.stage == stage]
    # A post-backward widens what was added before it: any whole backward's own, or of an I after the first W.
    widens = stage == 0 or "B" in own or "I" in own[own.index("W") :]
    return Held(pipeline.parts[stage], stage, own.count("UNSHARD"), widens)


def _transfers(config: Trainer.Config, row: Sequence[Action]) -> Iterator[Collective]:
    """Each pass sends what crosses to a stage of another rank: a micro-batch's residual stream, and its gradient."""
    training, layout = config.training, config.parallelism
    tokens = training.micro_batch_size * training.seq_len // layout.cp // (layout.tp if layout.sequence_parallel else 1)
    size = tokens * config.model.dim * DTYPE_BYTES[training.mixed_precision_param]
    of_pass = sends_and_receives(row)
    for action, what in (("F", "activations"), ("B", "activation gradients")):
        for kind in get_args(Literal["send", "recv"]):
            count = training.accumulation_steps * of_pass[f"{kind.upper()}_{action}"]
            yield Collective("pp", kind, what, count, count * size)


def _tied_gradients(config: Trainer.Config, pipeline: Plan, rank: int) -> Iterator[Collective]:
    """The ends of a pipeline tell each other the gradients of the matrix that both have, once a step."""
    if config.tied_across_stages and pipeline.other_end(rank) is not None:
        size = 4 * config.model.vocab_size * config.model.dim // (config.parallelism.tp * config.fsdp_shards)
        for kind in get_args(Literal["send", "recv"]):
            yield Collective("pp", kind, "tied embedding gradients (float32)", 1, size)


def by_dimension_and_kind(found: list[Collective]) -> list[Collective]:
    """Sums over purposes."""

    def key(c: Collective) -> tuple[int, str, Kind]:
        return c.pipeline_rank or 0, c.dimension, c.kind

    total = []
    for (_, dimension, kind), group in groupby(sorted(found, key=key), key=key):
        members = list(group)
        purpose = ", ".join(dict.fromkeys(c.purpose for c in members))
        count, size = sum(c.count for c in members), sum(c.bytes for c in members)
        total.append(Collective(dimension, kind, purpose, count, size, members[0].pipeline_rank))
    return total


def _data_parallel(config: Trainer.Config, held: Sequence[Held]) -> Iterator[Collective]:
    """In each micro-batch every unit is gathered for its forward, again for its backward if it was freed in between,
    and its gradients are reduced once: over the shards, then what is left of them over the replicas. All in the
    dtypes of the mixed-precision policy, dim 0 padded to the shard count. A pipeline's schedule says when a stage is
    gathered; it is reduced once a pass. With a loss in chunks the head is gathered for the norm, for all chunks, and
    for the norm's backward."""
    training, shards, axis = config.training, config.fsdp_shards, config.fsdp_axis
    policy = config.parallelism.reshard_after_forward
    element, reduce_element = DTYPE_BYTES[training.mixed_precision_param], DTYPE_BYTES[training.mixed_precision_reduce]
    for one, (unit, parameters) in [(h, item) for h in held for item in unit_parameters(config, h.part).items()]:
        padded = sum(p.padded(shards) for p in parameters)
        copies = copies_of_unit(config, one.part)[unit]
        in_chunks = unit == "head" and training.loss_chunks > 1
        frees = policy == "always" or (policy == "default" and (unit != "head" or in_chunks))
        in_micro_batch = one.gathers if one.gathers is not None else 1 if not frees else 3 if in_chunks else 2
        gathers = copies * training.accumulation_steps * in_micro_batch
        of = unit if one.stage is None else f"{unit}, stage {one.stage}"
        yield Collective(axis, "all_gather", f"parameters of {of}", gathers, gathers * element * padded)
        reduced = [p.padded(shards) for p in parameters]
        at_once = _in_chunks(config, reduced) if in_chunks else {f"gradients of {of}": padded}
        units = copies * _reductions(config)
        for what, elements in at_once.items():
            size = units * reduce_element * elements
            yield Collective(axis, "reduce_scatter", what, units, size)
            yield Collective("dp_replicate", "all_reduce", what, units, size // shards)


def _reductions(config: Trainer.Config) -> int:
    """How often a step reduces the gradients of a unit."""
    return config.training.accumulation_steps if config.training.reduce_every_micro_batch else 1


def _in_chunks(config: Trainer.Config, padded: list[int]) -> dict[str, int]:
    """Elements of the two reductions of the head's unit: the matrix with the last chunk, and with it what earlier
    micro-batches left of the norm; then the norm, and the matrix again if the embedding is tied to it."""
    training, tied = config.training, config.model.tied_embeddings
    matrix, norm = padded if tied else padded[::-1]
    leaves = training.accumulation_steps > 1 and not training.reduce_every_micro_batch
    return {
        "gradients of head, with the last chunk": matrix + norm if leaves else matrix,
        "gradients of head, with the norm": matrix + norm if tied else norm,
    }


def _scalars(config: Trainer.Config) -> Iterator[Collective]:
    """Once a step, whatever the number of micro-batches; only the last stage of a pipeline has a loss."""
    yield Collective("pp", "all_reduce", "logged loss (float32)", 1, 4)
    for axis in ("dp_replicate", config.fsdp_axis):
        yield Collective(axis, "all_reduce", "valid tokens (int64)", 1, 8)
        yield Collective(axis, "all_reduce", "logged loss (float32)", 1, 4)
    for axis in ("dp_replicate", config.fsdp_axis, "tp", "pp"):
        yield Collective(axis, "all_reduce", "gradient norm (float32)", 1, 4)


def _context_parallel(config: Trainer.Config, held: Sequence[Held]) -> Iterator[Collective]:
    """Keys and values of every layer, gathered once in forward and, where it is computed again, once more, with their
    gradients reduce-scattered; or passed on c-1 times in forward, as often in backward, where their float32 gradients
    follow c times."""
    training, layout = config.training, config.parallelism
    micro_batches = training.accumulation_steps * config.pipeline_micro_batches
    layers = micro_batches * sum(len(one.part.layers) for one in held)
    again = micro_batches * sum(i in checkpointed_layers(config) for one in held for i in one.part.layers)
    elements = 2 * training.micro_batch_size * training.seq_len * config.model.kv_dim // layout.tp  # of all ranks
    gathered = DTYPE_BYTES[training.mixed_precision_param] * elements
    if layout.cp_attention == "allgather":
        yield Collective("cp", "all_gather", "keys and values", layers, layers * gathered)
        yield Collective("cp", "all_gather", "keys and values again", again, again * gathered)
        yield Collective("cp", "reduce_scatter", "gradients of keys and values", layers, layers * gathered)
        return
    for what, passes in (("keys and values", 2 * layers), ("keys and values again", again)):
        hops = passes * (layout.cp - 1)
        yield Collective("cp", "all_to_all", what, hops, hops * gathered // layout.cp)
    hops = layers * layout.cp
    yield Collective("cp", "all_to_all", "gradients of keys and values (float32)", hops, layers * 4 * elements)


def _float8_scales(config: Trainer.Config, held: Sequence[Held]) -> Iterator[Collective]:
    """The largest absolute values (float64) behind the scales of operands that are sharded."""
    if config.float8.recipe == "none":
        return
    layers = [i for one in held for i in one.part.layers]
    micro_batches = config.training.accumulation_steps * config.pipeline_micro_batches
    again = sum(i in checkpointed_layers(config) for i in layers)
    tokens = config.training.micro_batch_size * config.training.seq_len // config.parallelism.cp
    totals: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name in conversion(config).converted:
        rows, columns = local_shape(config, name)
        elements = {"": 1, "T": tokens, "N": rows, "K": columns}
        forward, backward = all_reduced(config.float8.recipe, name)
        for what, scales, times in (
            ("float8 scales", (*forward, *backward), len(layers)),
            ("float8 scales computed again", forward, again),
        ):
            counts[what] += micro_batches * times * len(scales)
            totals[what] += micro_batches * times * 8 * sum(elements[one] for one in scales)
    for what, count in counts.items():
        yield Collective("tp", "all_reduce", f"{what} (float64)", count, totals[what])


def _tensor_parallel(config: Trainer.Config, held: Sequence[Held]) -> Iterator[Collective]:
    model, training = config.model, config.training
    element = DTYPE_BYTES[training.mixed_precision_param]
    micro_batches = training.accumulation_steps * config.pipeline_micro_batches
    tokens = training.micro_batch_size * training.seq_len // config.parallelism.cp
    activation = tokens * model.dim * element
    parts = [one.part for one in held]
    # Two regions a layer; the embedding is only left, the head only entered, in as many parts as the loss has chunks.
    chunks = training.loss_chunks
    edges = micro_batches * sum(4 * len(part.layers) + part.embedding + chunks * part.head for part in parts)
    size = micro_batches * sum(4 * len(part.layers) + part.embedding + part.head for part in parts) * activation
    # Both regions, entered and left.
    again = micro_batches * 2 * sum(i in checkpointed_layers(config) for part in parts for i in part.layers)
    budgeted = within_a_budget(config)
    keeps_scattered = config.activation_checkpoint.mode == "selective"
    # A compiled layer computes again what backward needs, and that is not what leaves its last region.
    left = again // 2 if config.compile.blocks else again
    again, left = (0, 0) if budgeted else (again, left)
    if config.parallelism.sequence_parallel:
        # A region is entered by a gather and left by a scatter; backward mirrors it.
        yield Collective("tp", "all_gather", "activations", edges, size)
        yield Collective("tp", "reduce_scatter", "activations", edges, size)
        yield Collective("tp", "all_gather", "activations computed again", again, again * activation)
        scattered = 0 if keeps_scattered else left
        yield Collective("tp", "reduce_scatter", "activations computed again", scattered, scattered * activation)
        adds_up = not training.reduce_every_micro_batch
        for one in held:
            norms = _reductions(config) * (2 * len(one.part.layers) + one.part.norm)
            wide = adds_up or (config.parallelism.pp > 1 and one.widens)
            norm = model.dim * (DTYPE_BYTES[training.mixed_precision_reduce] if wide else element)
            yield Collective("tp", "all_reduce", "norm gradients", norms, norms * norm)
            once_more = int(adds_up and chunks > 1)  # the last norm's, see `_in_chunks`
            yield Collective("tp", "all_reduce", "norm gradients", once_more, once_more * model.dim * element)
    else:
        # Forward where a region is left, backward where it is entered.
        yield Collective("tp", "all_reduce", "activations", edges, size)
        yield Collective("tp", "all_reduce", "activations computed again", left, left * activation)
    sums = 3 * micro_batches * sum(part.head for part in parts)
    what = "cross-entropy: max, sum, target (float32)"
    yield Collective("tp", "all_reduce", what, chunks * sums, sums * tokens * 4)
