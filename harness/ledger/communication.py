"""Every collective of one optimizer step, counted from the configuration: exact, by mesh dimension and kind.

`bytes` is the full, unsharded side of each: all-gather output, reduce-scatter input, all-reduced tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from harness.config import DTYPE_BYTES, Trainer
from harness.ledger.layout import checkpointed_layers, copies_of_unit, unit_parameters

Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True, slots=True)
class Collective:
    """`count` collectives a step and rank that move `bytes` in all; `purpose` says for what."""

    dimension: str
    kind: Kind
    purpose: str
    count: int
    bytes: int


def collectives(config: Trainer.Config) -> list[Collective]:
    """One entry per purpose; axes of one rank communicate nothing."""
    degrees = {
        "dp_replicate": config.parallelism.dp_replicate,
        "dp_shard": config.dp_shard,
        "tp": config.parallelism.tp,
    }
    found = [*_data_parallel(config), *_tensor_parallel(config), *_scalars()]
    return [c for c in found if c.count and degrees[c.dimension] > 1]


def by_dimension_and_kind(found: list[Collective]) -> list[Collective]:
    """Sums over purposes."""

    def key(c: Collective) -> tuple[str, Kind]:
        return c.dimension, c.kind

    total = []
    for (dimension, kind), group in groupby(sorted(found, key=key), key=key):
        members = list(group)
        purpose = ", ".join(c.purpose for c in members)
        total.append(Collective(dimension, kind, purpose, sum(c.count for c in members), sum(c.bytes for c in members)))
    return total


def _data_parallel(config: Trainer.Config) -> Iterator[Collective]:
    """In each micro-batch every unit is gathered for its forward, again for its backward if it was freed in between,
    and its gradients are reduced once: over the shards, then what is left of them over the replicas. All in the
    dtypes of the mixed-precision policy, dim 0 padded to the shard count."""
    training, shards = config.training, config.dp_shard
    policy = config.parallelism.reshard_after_forward
    element, reduce_element = DTYPE_BYTES[training.mixed_precision_param], DTYPE_BYTES[training.mixed_precision_reduce]
    for unit, parameters in unit_parameters(config).items():
        padded = sum(p.padded(shards) for p in parameters)
        units = copies_of_unit(config)[unit] * training.accumulation_steps
        frees = policy == "always" or (policy == "default" and unit != "head")
        gathers = units * (2 if frees else 1)
        yield Collective("dp_shard", "all_gather", f"parameters of {unit}", gathers, gathers * element * padded)
        yield Collective("dp_shard", "reduce_scatter", f"gradients of {unit}", units, units * reduce_element * padded)
        part = reduce_element * padded // shards
        yield Collective("dp_replicate", "all_reduce", f"gradients of {unit}", units, units * part)


def _scalars() -> Iterator[Collective]:
    """Once a step, whatever the number of micro-batches."""
    for axis in ("dp_replicate", "dp_shard"):
        yield Collective(axis, "all_reduce", "valid tokens (int64)", 1, 8)
        yield Collective(axis, "all_reduce", "logged loss (float32)", 1, 4)
    for axis in ("dp_replicate", "dp_shard", "tp"):
        yield Collective(axis, "all_reduce", "gradient norm (float32)", 1, 4)


def _tensor_parallel(config: Trainer.Config) -> Iterator[Collective]:
    model, training = config.model, config.training
    element, micro_batches = DTYPE_BYTES[training.mixed_precision_param], training.accumulation_steps
    tokens = training.micro_batch_size * training.seq_len
    activation, layers = tokens * model.dim * element, model.n_layers
    # Two regions a layer; the embedding is only left, the head only entered.
    edges = micro_batches * (4 * layers + 2)
    # Both regions, entered and left.
    again = micro_batches * 2 * len(checkpointed_layers(config))
    keeps_scattered = config.activation_checkpoint.mode == "selective"
    if config.parallelism.sequence_parallel:
        # A region is entered by a gather and left by a scatter; backward mirrors it.
        yield Collective("tp", "all_gather", "activations", edges, edges * activation)
        yield Collective("tp", "reduce_scatter", "activations", edges, edges * activation)
        yield Collective("tp", "all_gather", "activations computed again", again, again * activation)
        scattered = 0 if keeps_scattered else again
        yield Collective("tp", "reduce_scatter", "activations computed again", scattered, scattered * activation)
        norms = micro_batches * (2 * layers + 1)
        yield Collective("tp", "all_reduce", "norm gradients", norms, norms * model.dim * element)
    else:
        # Forward where a region is left, backward where it is entered.
        yield Collective("tp", "all_reduce", "activations", edges, edges * activation)
        yield Collective("tp", "all_reduce", "activations computed again", again, again * activation)
    sums = 3 * micro_batches
    yield Collective("tp", "all_reduce", "cross-entropy: max, sum, target (float32)", sums, sums * tokens * 4)
