"""Parameters of one FSDP unit: their names, and shapes in the model, on a tensor-parallel rank and in a shard."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from harness.config import Trainer
from harness.ledger.layout import Parameter, unit_parameters
from harness.pipeline.split import Part

# Where a parameter of a layer is (harness/trainer/model/decoder.py).
MODULES = {"wq": "attention", "wk": "attention", "wv": "attention", "wo": "attention"}
MODULES |= {"w1": "feed_forward", "w2": "feed_forward", "w3": "feed_forward"}
# Tensor parallelism cuts these by columns, matrices otherwise by rows (harness/trainer/model/decoder_sharding.py).
CUT_BY_COLUMNS = frozenset({"wo", "w2"})
LAYER = re.compile(r"^layers\.(\d+)$")

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShapes:
    """`whole` as in the model, `gathered` as a rank computes with it (its part under tensor parallelism), `shard` what
    FSDP2 leaves the rank of it, without padding. `padded_elements`: what the shard has with it."""

    name: str
    whole: Shape
    gathered: Shape
    shard: Shape
    padded_elements: int

    @property
    def gathered_elements(self) -> int:
        return prod(self.gathered)


def shapes_of(config: Trainer.Config, unit: str, rank: int) -> list[ParameterShapes]:
    """Those of a unit by the name that FSDP2 gives it (`layers.3`, `norm, lm_head`), on a global rank; empty for a
    unit that this configuration does not have."""
    layer = LAYER.match(unit)
    if layer is None:
        modules = set(unit.split(", "))
        part = Part(
            layers=range(0),
            embedding="tok_embeddings" in modules,
            norm="norm" in modules,
            head="lm_head" in modules,
        )
        known = modules <= set(part.names)
    else:
        number = int(layer[1])
        part = Part(layers=range(number, number + 1), embedding=False, norm=False, head=False)
        known = number < config.model.n_layers
    parameters = unit_parameters(config, part).get(_kind(config, part), []) if known else []
    shards, tp = config.fsdp_shards, config.parallelism.tp
    return [_shapes(unit, one, tp, shards, rank // tp % shards) for one in parameters]


def _kind(config: Trainer.Config, part: Part) -> str:
    """The unit of `unit_parameters` that a part is."""
    if part.layers:
        return "layer"
    if part.head or (config.model.tied_embeddings and not config.tied_across_stages):
        return "head"
    return "norm" if part.norm else "embedding"


def _shapes(unit: str, parameter: Parameter, tp: int, shards: int, shard_rank: int) -> ParameterShapes:
    name, rows, columns = parameter.name, parameter.rows, parameter.columns
    prefix = [unit, *([MODULES[name]] if name in MODULES else [])] if LAYER.match(unit) else []
    local = parameter.local(shards, shard_rank) // columns
    flat = name.endswith("norm")
    by_columns = name in CUT_BY_COLUMNS
    return ParameterShapes(
        name=".".join([*prefix, name, "weight"]),
        whole=(rows,) if flat else (rows, columns * tp) if by_columns else (rows * tp, columns),
        gathered=(rows,) if flat else (rows, columns),
        shard=(local,) if flat else (local, columns),
        padded_elements=parameter.padded(shards) // shards,
    )
