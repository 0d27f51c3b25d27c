"""What the ledger says about a configuration, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

from harness.allocator import Settings
from harness.config import Trainer
from harness.errors import UsageError
from harness.garbage import no_garbage_collection
from harness.ledger.communication import (
    Collective,
    HostCopies,
    by_dimension_and_kind,
    collectives,
    host_copies,
)
from harness.ledger.compiled import compilation_notes
from harness.ledger.layout import MEANINGS, quantities
from harness.ledger.operators import Target
from harness.ledger.pipeline import PipelineStep
from harness.ledger.reserved import GROWING, GROWS, STEPS, UNLIMITED, StreamPool, not_predicted, pools
from harness.ledger.step import Implementation, Step
from harness.ledger.tape import Instant, Line
from harness.ledger.time import Time
from harness.pipeline.plan import plan
from harness.validation import require_offload_on

SCHEMA_VERSION = 1


@dataclass(kw_only=True, slots=True)
class Entry:
    """A named line: the most its category holds at any time of a step and the formula of that, what it holds at the
    rank's peak, and, if compared, what was measured there."""

    category: str
    formula: str
    bytes: int
    at_peak_bytes: int
    measured_bytes: int | None = None
    error_pct: float | None = None


@dataclass(kw_only=True, slots=True)
class Sum:
    """Lines that were measured together: their bytes at the predicted peak, and those of the categories that they were
    measured as at the measured one; `error_pct` = 100·(predicted − measured)/measured, None where nothing was."""

    lines: list[str]
    measured_as: list[str]
    predicted_bytes: int
    measured_bytes: int
    error_pct: float | None


@dataclass(kw_only=True, slots=True)
class RankMemory:
    """Memory of one rank in steady state, which is every step from the second on.

    `resident_bytes` is what stays between steps (gradients included). `first_step_peak_allocated_bytes` has no
    optimizer states before its own update. Reserved bytes are those of the CUDA allocator once they have stopped
    growing, and None where there is none or they are not predicted.
    """

    rank: int
    alike_rank: int
    """The first rank that these figures are equal to."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    at: str
    first_step_peak_allocated_bytes: int
    first_step_at: str
    resident_bytes: int
    entries: list[Entry]
    timeline: list[Instant]
    quantities: dict[str, int]
    host_bytes: int = 0
    """The most that CPU offload keeps in host memory; without it 0, though a run has other things there."""
    host_entries: list[Line] = field(default_factory=list)
    """What that consists of."""
    reserved_grows: bool = False
    """They had not stopped after as many steps as are replayed."""
    pools: list[StreamPool] = field(default_factory=list)
    """What `peak_reserved_bytes` consist of."""
    measured_peak_allocated_bytes: int | None = None
    error_pct: float | None = None
    measured_peak_reserved_bytes: int | None = None
    reserved_error_pct: float | None = None
    sums: list[Sum] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Prediction:
    """`ranks` in order; `communication` per mesh dimension and kind, a step and rank, of a pipeline for each of its
    ranks."""

    target: Target
    world_size: int
    ranks: list[RankMemory]
    communication: list[Collective]
    collectives: list[Collective]
    """The same, by purpose."""
    host_copies: list[HostCopies] = field(default_factory=list)
    """With CPU offload; of a pipeline for each of its ranks."""
    notes: list[str] = field(default_factory=list)
    """What of it is approximate, a line each."""
    time: Time = field(default_factory=Time)

    def to_json(self) -> dict[str, Any]:
        """The object of `meshscope ledger --json` without `--against`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "mode": "predicted",
            "target": self.target,
            "world_size": self.world_size,
            "ranks": [_rank_json(rank) for rank in self.ranks],
            "communication": [_collective_json(c, ("dimension", "kind", "count", "bytes")) for c in self.communication],
            "collectives": [
                _collective_json(c, ("dimension", "kind", "purpose", "count", "bytes")) for c in self.collectives
            ],
            "host_copies": [_without_none(asdict(copies)) for copies in self.host_copies],
            "time": self.time.to_json(),
            "quantities": MEANINGS,
            "notes": self.notes,
            "errors": [],
        }


def _collective_json(collective: Collective, names: tuple[str, ...]) -> dict[str, Any]:
    return _without_none({name: getattr(collective, name) for name in (*names, "pipeline_rank")})


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    """`pipeline_rank` only where ranks differ by it."""
    return {name: value for name, value in fields.items() if value is not None}


def _rank_json(rank: RankMemory) -> dict[str, Any]:
    """The composition of every instant goes with the first of the ranks that are alike."""
    fields: dict[str, Any] = {name: getattr(rank, name) for name in rank.__dataclass_fields__}
    fields["entries"] = [asdict(entry) for entry in rank.entries]
    fields["pools"] = [asdict(pool) for pool in rank.pools]
    fields["sums"] = [asdict(one) for one in rank.sums]
    fields["host_entries"] = [asdict(line) for line in rank.host_entries]
    fields["timeline"] = [{"at": instant.name, "bytes": instant.bytes} for instant in rank.timeline]
    if rank.rank == rank.alike_rank:
        for item, instant in zip(fields["timeline"], rank.timeline, strict=True):
            item["categories"] = {category: size for category, size in instant.categories.items() if size}
    return fields


@no_garbage_collection()
def predict(
    config: Trainer.Config,
    target: Target = "cuda",
    implementation: Implementation | None = None,
    settings: Settings | None = None,
) -> Prediction:
    """Predicts memory and communication of every rank; `implementation` describes a trainer other than harness's,
    `settings` a CUDA allocator other than torch's default.

    Ranks are numbered with `pp` outermost, then `dp_replicate`, and `tp` innermost. Raises `UsageError` as
    `Trainer.Config.validate` does, and for a workload that is no training.
    """
    config.validate()
    require_offload_on(config, target)
    if config.compile.blocks and config.float8.recipe != "none":
        raise UsageError("the ledger does not know what compiled layers (compile.blocks) keep of float8 products")
    if config.workload != "training":
        raise UsageError(f"the ledger predicts trainings; {config.workload} is a workload that trains nothing")
    implementation = implementation or Implementation()
    pp, cp, tp = config.parallelism.pp, config.parallelism.cp, config.parallelism.tp
    of_stage = config.world_size // pp
    unknown = not_predicted(config) if target == "cuda" else None
    reserved = target == "cuda" and unknown is None
    alike: dict[tuple[int, int, int], RankMemory] = {}
    kinds: dict[tuple[int, int], RankMemory] = {}
    pipeline = plan(config) if pp > 1 else None
    for stage, shard_rank in product(range(pp), range(config.fsdp_shards)):
        parts = [pipeline.parts[number] for number in pipeline.stages_of(stage)] if pipeline else None
        # Ranks of a stage differ by what is left of uneven rows, and by which keys their queries see.
        kind = stage, quantities(config, shard_rank, parts).values["P"], shard_rank % cp
        if kind not in alike:
            step: Step | PipelineStep = (
                Step(config, target=target, shard_rank=shard_rank, implementation=implementation, settings=settings)
                if pp == 1
                else PipelineStep(
                    config,
                    target=target,
                    pipeline_rank=stage,
                    shard_rank=shard_rank,
                    implementation=implementation,
                    settings=settings,
                )
            )
            memory = _memory(step, stage * of_stage + shard_rank * tp, reserved=reserved)
            alike[kind] = next((known for known in alike.values() if _is_alike(known, memory)), memory)
        kinds[stage, shard_rank] = alike[kind]
    ranks = []
    for rank in range(config.world_size):
        memory = kinds[rank // of_stage, rank // tp % config.fsdp_shards]
        ranks.append(replace(memory, rank=rank, entries=[replace(entry) for entry in memory.entries], sums=[]))
    found = collectives(config)
    growing = [GROWING] if any(rank.reserved_grows for rank in ranks) else []
    has_limit = settings is not None and (settings.memory_fraction != 1 or settings.garbage_collection_threshold > 0)
    unlimited = [UNLIMITED] if reserved and has_limit else []
    return Prediction(
        target=target,
        world_size=config.world_size,
        ranks=ranks,
        communication=by_dimension_and_kind(found),
        collectives=found,
        host_copies=host_copies(config),
        notes=compilation_notes(config, target)
        + ([f"reserved bytes: {unknown}"] if unknown else [])
        + growing
        + unlimited,
    )


def _is_alike(one: RankMemory, other: RankMemory) -> bool:
    return one == replace(other, rank=one.rank, alike_rank=one.alike_rank)


def _memory(step: Step | PipelineStep, rank: int, *, reserved: bool) -> RankMemory:
    step.run()
    first = step.tape.peak()
    for _ in range(1, STEPS):
        before = step.tape.reserved_bytes
        step.run()
        grows = reserved and step.tape.reserved_bytes > GROWS * before
        if not grows:
            break
    peak = step.tape.peak()
    entries = [
        Entry(
            category=line.category,
            formula=line.formula,
            bytes=line.bytes,
            at_peak_bytes=peak.categories.get(line.category, 0),
        )
        for line in step.tape.lines()
    ]
    return RankMemory(
        rank=rank,
        alike_rank=rank,
        peak_allocated_bytes=peak.bytes,
        peak_reserved_bytes=step.tape.reserved_bytes if reserved else None,
        at=peak.name,
        first_step_peak_allocated_bytes=first.bytes,
        first_step_at=first.name,
        resident_bytes=step.tape.total,
        entries=sorted(entries, key=lambda entry: -entry.at_peak_bytes),
        timeline=step.tape.instants,
        host_bytes=step.host.peak().bytes,
        host_entries=step.host.lines(),
        reserved_grows=grows,
        pools=pools(step.tape) if reserved else [],
        quantities={name: step.quantities.values[name] for name in MEANINGS if name in step.quantities.values},
    )
