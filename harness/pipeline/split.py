"""Which modules form a stage, and which rank holds it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness.errors import UsageError
from harness.pipeline.schedules import Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A stretch of the model: consecutive layers, with the embedding before or the norm and the head after them."""

    layers: range
    embedding: bool
    norm: bool
    head: bool

    @property
    def names(self) -> list[str]:
        """Fully qualified names of its modules."""
        ends = (["tok_embeddings"] if self.embedding else []), (["norm"] if self.norm else [])
        return [*ends[0], *(f"layers.{i}" for i in self.layers), *ends[1], *(["lm_head"] if self.head else [])]


def whole(layers: int) -> Part:
    """The model in one piece."""
    return Part(layers=range(layers), embedding=True, norm=True, head=True)


def even_parts(layers: int, stages: int, *, first_less: int, last_less: int) -> list[Part]:
    """Layers spread evenly, `first_less` and `last_less` fewer where the embedding and the head are; what does not
    divide goes to the first stages (torchtitan/distributed/pipeline_parallel.py:generate_llm_fqn_per_model_part).

    Raises `UsageError` if a stage would get less than none.
    """
    if stages == 1:
        return [whole(layers)]
    weight = layers + first_less + last_less
    counts = [weight // stages + (stage < weight % stages) for stage in range(stages)]
    counts[0] -= first_less
    counts[-1] -= last_less
    if min(counts[0], counts[-1]) < 0 or min(counts[1:-1], default=1) < 1:
        raise UsageError(
            f"model.n_layers={layers} does not fill {stages} pipeline stages, the first {first_less} and the last "
            f"{last_less} layers shorter: use fewer stages (parallelism.pp, pipeline.stages_per_rank), smaller "
            "pipeline.first_stage_less_layers and last_stage_less_layers, or pipeline.split"
        )
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [
        Part(
            layers=range(start, start + count),
            embedding=stage == 0,
            norm=stage == stages - 1,
            head=stage == stages - 1,
        )
        for stage, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]


def parts_of(split: Sequence[Sequence[str]], layers: int) -> list[Part]:
    """The stages of `pipeline.split`, each a list of module names; raises `UsageError` unless together they are the
    model in its order, every module once."""
    wanted = whole(layers).names
    given = [name for stage in split for name in stage]
    for name in given:
        if name not in wanted:
            raise UsageError(f"pipeline.split: the model has no module {name}: it has {wanted[0]} … {wanted[-1]}")
    for place, (name, expected) in enumerate(zip(given, wanted, strict=False)):
        if name != expected:
            before = f" after {wanted[place - 1]}" if place else ""
            raise UsageError(f"pipeline.split: {name} comes where {expected} should{before}: stages are in model order")
    if len(given) < len(wanted):
        raise UsageError(f"pipeline.split: no stage has {wanted[len(given)]}")
    parts: list[Part] = []
    for stage, names in enumerate(split):
        if not names:
            raise UsageError(f"pipeline.split: stage {stage} is empty")
        numbers = [int(match[1]) for name in names if (match := re.fullmatch(r"layers\.(\d+)", name))]
        start = numbers[0] if numbers else (parts[-1].layers.stop if parts else 0)
        parts.append(
            Part(
                layers=range(start, start + len(numbers)),
                embedding="tok_embeddings" in names,
                norm="norm" in names,
                head="lm_head" in names,
            )
        )
    return parts


def placed(placement: Placement, ranks: int, stages: int) -> dict[int, int]:
    """Stage -> rank."""
    if placement == "v":
        return {stage: min(stage, stages - 1 - stage) for stage in range(stages)}
    return {stage: stage % ranks for stage in range(stages)}
