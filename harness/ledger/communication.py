"""Every collective of one optimizer step, counted from the configuration: exact, by mesh dimension and kind.

`bytes` is the full, unsharded side of each: all-gather output, reduce-scatter input, all-reduced tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from harness.config import DTYPE_BYTES, Trainer
from harness.ledger.layout import copies_of_unit, unit_parameters

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
    """One entry per purpose, in the order of dimensions; axes of one rank communicate nothing."""
    found: list[Collective] = []
    if config.dp_shard > 1:
        found += _fully_sharded(config)
    if config.parallelism.tp > 1:
        found += _tensor_parallel(config)
    return [c for c in found if c.count]


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


def _fully_sharded(config: Trainer.Config) -> Iterator[Collective]:
    """Every unit is gathered for its forward, again for its backward if it was freed in between, and its gradients
    are reduced once; each in the dtypes of the mixed-precision policy, dim 0 padded to the shard count."""
    training, shards = config.training, config.dp_shard
    policy = config.parallelism.reshard_after_forward
    element, reduce_element = DTYPE_BYTES[training.mixed_precision_param], DTYPE_BYTES[training.mixed_precision_reduce]
    for unit, parameters in unit_parameters(config).items():
        padded = sum(p.padded(shards) for p in parameters)
        units = copies_of_unit(config)[unit]
        frees = policy == "always" or (policy == "default" and unit != "head")
        gathers = units * (2 if frees else 1)
        yield Collective("dp_shard", "all_gather", f"parameters of {unit}", gathers, gathers * element * padded)
        yield Collective("dp_shard", "reduce_scatter", f"gradients of {unit}", units, units * reduce_element * padded)
    yield Collective("dp_shard", "all_reduce", "valid tokens (int64)", 1, 8)
    yield Collective("dp_shard", "all_reduce", "logged loss (float32)", 1, 4)
    yield Collective("dp_shard", "all_reduce", "gradient norm (float32)", 1, 4)


def _tensor_parallel(config: Trainer.Config) -> Iterator[Collective]:
    model, training = config.model, config.training
    element = DTYPE_BYTES[training.mixed_precision_param]
    tokens = training.micro_batch_size * training.seq_len
    activation, layers = tokens * model.dim * element, model.n_layers
    if config.parallelism.sequence_parallel:
        # Two regions a layer, each entered by a gather and left by a scatter; backward mirrors it. The embedding
        # is only left, the head only entered.
        edges = 4 * layers + 2
        yield Collective("tp", "all_gather", "activations", edges, edges * activation)
        yield Collective("tp", "reduce_scatter", "activations", edges, edges * activation)
        norms = 2 * layers + 1
        yield Collective("tp", "all_reduce", "norm gradients", norms, norms * model.dim * element)
    else:
        # Forward where a region is left, backward where it is entered.
        edges = 4 * layers + 2
        yield Collective("tp", "all_reduce", "activations", edges, edges * activation)
    yield Collective("tp", "all_reduce", "cross-entropy: max, sum, target (float32)", 3, 3 * tokens * 4)
    yield Collective("tp", "all_reduce", "gradient norm (float32)", 1, 4)
