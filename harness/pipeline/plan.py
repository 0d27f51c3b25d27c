"""What a configuration's pipeline is: stages, their ranks, and every rank's actions."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config import Trainer
from harness.errors import UsageError
from harness.pipeline.actions import COMPUTE, Action, computation, each_step, read_table
from harness.pipeline.check import require_complete, require_peers, require_progress, stage_ranks
from harness.pipeline.config import Pipeline
from harness.pipeline.lowering import lower
from harness.pipeline.schedules import SCHEDULES, Schedule
from harness.pipeline.split import Part, even_parts, parts_of, placed

MOST_FORWARDS = 2**17
"""Of all stages in one pass of a schedule: 128 stages of 1,024 micro-batches. The whole table is made to predict a run,
every rank's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """`parts` of the model by stage, `rank_of` a stage; of each pipeline rank in order `computation` alone, and
    `actions` with the gathering, reducing and sending that torch's runtime is told to do."""

    name: str
    micro_batches: int
    parts: list[Part]
    rank_of: dict[int, int]
    computation: list[list[Action]]
    actions: list[list[Action]]

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def last_rank(self) -> int:
        """The rank that computes the loss."""
        return self.rank_of[len(self.parts) - 1]

    def other_end(self, rank: int) -> int | None:
        """The rank of the last stage for that of the first, and the other way round; None for ranks of neither, and of
        both."""
        first, last = self.rank_of[0], self.last_rank
        return {first: last, last: first}.get(rank) if first != last else None

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage in range(len(self.parts)) if self.rank_of[stage] == rank]


def plan(config: Trainer.Config) -> Plan:
    """Raises `UsageError` for a pipeline that cannot run, saying what to change."""
    pipeline, ranks = config.pipeline, config.parallelism.pp
    micro_batches = config.pipeline_micro_batches
    if pipeline.table is not None:
        return _from_table(config, pipeline.table)
    schedule = SCHEDULES[pipeline.schedule]
    stages = ranks * stages_per_rank(pipeline, schedule)
    _require_micro_batches(pipeline, schedule, ranks, stages, micro_batches)
    table = schedule.table(ranks, stages, micro_batches)
    rank_of = placed(schedule.placement, ranks, stages)
    return Plan(
        name=pipeline.schedule,
        micro_batches=micro_batches,
        parts=_parts(config, stages),
        rank_of=rank_of,
        computation=table,
        actions=lower(table, rank_of, micro_batches),
    )


def micro_batches(config: Trainer.Config) -> int:
    """What `pipeline.micro_batches` says, else the number of stages, of a table the number that it mentions."""
    pipeline = config.pipeline
    if pipeline.micro_batches is not None:
        return pipeline.micro_batches
    if pipeline.table is not None:
        numbers = [a.micro_batch or 0 for row in read_table(pipeline.table) for a in each_step(row)]
        return max(numbers, default=0) + 1
    return config.parallelism.pp * stages_per_rank(pipeline, SCHEDULES[pipeline.schedule])


def _from_table(config: Trainer.Config, text: str) -> Plan:
    micro_batches = config.pipeline_micro_batches
    table = read_table(text)
    if len(table) != config.parallelism.pp:
        raise UsageError(
            f"pipeline.csv has {len(table)} rows, parallelism.pp={config.parallelism.pp}: give one row per rank"
        )
    rank_of = stage_ranks(table, micro_batches)
    if len(rank_of) % len(table):
        raise UsageError(f"pipeline.csv has {len(rank_of)} stages, which do not divide over {len(table)} ranks")
    require_peers(table, rank_of)
    require_progress(table, rank_of)
    idle = [rank for rank in range(len(table)) if rank not in rank_of.values()]
    if idle:
        raise UsageError(f"pipeline.csv: row {idle[0] + 1} (rank {idle[0]}) computes nothing")
    says_all = any(action.kind not in COMPUTE for row in table for action in each_step(row))
    if says_all:
        require_complete(table, rank_of)
    return Plan(
        name="table",
        micro_batches=micro_batches,
        parts=_parts(config, len(rank_of)),
        rank_of=rank_of,
        computation=[computation(row) for row in table],
        actions=table if says_all else lower(table, rank_of, micro_batches),
    )


def stages_per_rank(pipeline: Pipeline.Config, schedule: Schedule) -> int:
    """What the configuration asks for, else what the schedule takes: 1, or 2 where it takes several."""
    wanted, takes = pipeline.stages_per_rank, schedule.stages_per_rank
    if takes is not None and wanted not in (None, takes):
        raise UsageError(f"pipeline.stages_per_rank={wanted}: {pipeline.schedule} takes {takes}; leave it out")
    return takes or wanted or 2


def _require_micro_batches(
    pipeline: Pipeline.Config, schedule: Schedule, ranks: int, stages: int, micro_batches: int
) -> None:
    asked = f"pipeline.micro_batches={micro_batches}"
    if pipeline.schedule in ("1F1B", "DualPipeV") and micro_batches < stages:
        raise UsageError(f"{asked}: {pipeline.schedule} needs at least as many as there are stages, {stages}")
    if stages * micro_batches > MOST_FORWARDS:
        raise UsageError(
            f"{asked} on {stages} stages are {stages * micro_batches:,} forwards: use at most "
            f"{max(1, MOST_FORWARDS // stages):,} micro-batches, or fewer stages (parallelism.pp, "
            "pipeline.stages_per_rank)"
        )
    rounds = max(1, micro_batches // ranks)
    if schedule.rounds and micro_batches % rounds:
        raise UsageError(
            f"{asked}: {pipeline.schedule} takes them in equal rounds of at least {ranks} (parallelism.pp): use "
            f"{micro_batches - micro_batches % rounds} or {ranks * (micro_batches // ranks + 1)}"
        )


def _parts(config: Trainer.Config, stages: int) -> list[Part]:
    pipeline, layers = config.pipeline, config.model.n_layers
    if pipeline.split is None:
        return even_parts(
            layers, stages, first_less=pipeline.first_stage_less_layers, last_less=pipeline.last_stage_less_layers
        )
    if len(pipeline.split) != stages:
        raise UsageError(f"pipeline.split has {len(pipeline.split)} stages, the schedule has {stages}: give as many")
    return parts_of(pipeline.split, layers)
