"""Which parameters a rank holds, by FSDP unit, and the quantities that formulas are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.config import Trainer
from harness.ledger.sizes import Quantities
from harness.pipeline.split import Part, whole


@dataclass(frozen=True, slots=True)
class Parameter:
    """`elements` on this tensor-parallel rank; FSDP2 cuts `rows` as torch.chunk does."""

    name: str
    monomial: str
    rows: int
    columns: int

    def padded(self, shards: int) -> int:
        return -(-self.rows // shards) * shards * self.columns

    def local(self, shards: int, rank: int) -> int:
        """Elements of rank's shard; the last ones are shorter or empty."""
        part = -(-self.rows // shards)
        return max(0, min(part, self.rows - part * rank)) * self.columns


def unit_parameters(config: Trainer.Config, part: Part | None = None) -> dict[str, list[Parameter]]:
    """The parameters of an `embedding`, a `layer` and a `head` unit on one tensor-parallel rank, in module order; with
    `part`, of the units that this part of the model has.

    A tied embedding belongs to the head's unit, which then has one matrix; there is no `embedding` unit. In a pipeline
    both ends have the matrix. Where the head is another stage's, the last norm is a `norm` unit.
    """
    part = part or whole(config.model.n_layers)
    model, tp = config.model, config.parallelism.tp
    d, kv, f, vocabulary = model.dim, model.kv_dim, model.ffn_dim, model.vocab_size

    def norm(name: str) -> Parameter:
        return Parameter(name, "d", d, 1)

    embedding = Parameter("tok_embeddings", "V·d/t", vocabulary // tp, d)
    layer = [
        norm("attention_norm"),
        Parameter("wq", "d·d/t", d // tp, d),
        Parameter("wk", "kv·d/t", kv // tp, d),
        Parameter("wv", "kv·d/t", kv // tp, d),
        Parameter("wo", "d·d/t", d, d // tp),
        norm("ffn_norm"),
        Parameter("w1", "f·d/t", f // tp, d),
        Parameter("w2", "f·d/t", d, f // tp),
        Parameter("w3", "f·d/t", f // tp, d),
    ]
    if model.tied_embeddings and not config.tied_across_stages:
        return {"layer": layer, "head": [embedding, norm("norm")]}
    ends = [norm("norm")] if part.norm else []
    if part.head:
        ends.append(Parameter("lm_head", "V·d/t", vocabulary // tp, d))
    units = {"embedding": [embedding] if part.embedding else [], "layer": layer if part.layers else []}
    units["head" if part.head else "norm"] = ends
    return {unit: parameters for unit, parameters in units.items() if parameters}


def copies_of_unit(config: Trainer.Config, part: Part | None = None) -> dict[str, int]:
    layers = len((part or whole(config.model.n_layers)).layers)
    return {unit: layers if unit == "layer" else 1 for unit in unit_parameters(config, part)}


def checkpointed_layers(config: Trainer.Config) -> range:
    """Numbers of the layers that compute again what they did not keep."""
    checkpointing, layers = config.activation_checkpoint, config.model.n_layers
    keeps_all = checkpointing.mode == "none" or (
        checkpointing.mode == "memory_budget" and checkpointing.memory_budget == 1
    )
    return range(0) if keeps_all else range(checkpointing.every - 1, layers, checkpointing.every)


def within_a_budget(config: Trainer.Config) -> bool:
    """torch.compile chooses what layers keep, and that includes what they gather and reduce over tp,
    however small the budget."""
    checkpointing = config.activation_checkpoint
    return checkpointing.mode == "memory_budget" and 0 < checkpointing.memory_budget < 1


MEANINGS = {
    "T": "tokens of a rank and forward, B·S",
    "B": "sequences of a rank and forward",
    "S": "sequence length, of which a context-parallel rank has a part",
    "d": "model width",
    "f": "feed-forward width",
    "kv": "width of the keys",
    "hd": "head width",
    "H": "query heads",
    "K": "key heads",
    "V": "vocabulary",
    "L": "layers",
    "t": "tensor-parallel degree",
    "c": "context-parallel degree",
    "W": "FSDP shard degree, times that of context parallelism",
    "P": "parameters of this rank",
    "N_embedding": "parameters of the embedding, this tensor-parallel rank, rows padded to W",
    "N_layer": "same, of one layer",
    "N_head": "same, of the last norm and the head, which is the embedding too if tied",
    "N_norm": "same, of the last norm alone",
    "n": "micro-batches of a pass of the pipeline schedule",
    "N_lm_head": "same, of the head's matrix alone",
    "N_tok_embeddings": "same, of the matrix of embedding and head alone",
    "k": "chunks of the loss",
    "tensors": "parameter tensors",
    "handle": "cuBLAS handle",
}
"""What the names in formulas mean."""


def quantities(config: Trainer.Config, shard_rank: int, parts: Sequence[Part] | None = None) -> Quantities:
    """The names that formulas use, with their values for this configuration and rank of FSDP2's axis, which holds these
    parts of the model (by default all of it).

    A unit that the rank does not have has no quantity.
    """
    model, training = config.model, config.training
    shards = config.fsdp_shards
    seq_len = training.seq_len // config.parallelism.cp
    units: dict[str, list[Parameter]] = {}
    local = tensors = 0
    for part in parts or [whole(model.n_layers)]:
        copies = copies_of_unit(config, part)
        for unit, parameters in unit_parameters(config, part).items():
            units[unit] = parameters
            local += copies[unit] * sum(p.local(shards, shard_rank) for p in parameters)
            tensors += copies[unit] * len(parameters)
    return Quantities(
        {
            "1": 1,
            "handle": 1,
            "T": training.micro_batch_size * seq_len,
            "B": training.micro_batch_size,
            "S": seq_len,
            "d": model.dim,
            "f": model.ffn_dim,
            "kv": model.kv_dim,
            "hd": model.head_dim,
            "H": model.n_heads,
            "K": model.n_kv_heads,
            "V": model.vocab_size,
            "L": model.n_layers,
            "t": config.parallelism.tp,
            "c": config.parallelism.cp,
            "W": shards,
            "P": local,
            "tensors": tensors,
            "n": config.pipeline_micro_batches,
            "k": training.loss_chunks,
            **{f"N_{p.name}": p.padded(shards) for p in units.get("head", []) if training.loss_chunks > 1},
            **{f"N_{unit}": sum(p.padded(shards) for p in parameters) for unit, parameters in units.items()},
        }
    )
