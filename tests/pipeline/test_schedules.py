"""Tables of schedules, held against torch's own and against what the papers promise."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import get_schedule_class

from harness.config import Decoder, Parallelism, Pipeline, Trainer
from harness.pipeline.plan import Plan, plan
from harness.pipeline.timeline import bubbles, planned

RANKS = (2, 3, 4)


def of(schedule: str, pp: int, micro_batches: int | None = None, **pipeline: Any) -> Plan:
    options: Any = {"schedule": schedule, "micro_batches": micro_batches, **pipeline}
    config = Trainer.Config(
        world_size=pp,
        model=Decoder.Config(n_layers=30),
        parallelism=Parallelism.Config(pp=pp),
        pipeline=Pipeline.Config(**options),
    )
    config.validate()
    return plan(config)


@pytest.fixture
def torch_schedule(monkeypatch) -> Iterator[Any]:
    """torch's schedule object of rank 0 of a group that is not there."""
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.ERROR)

    def build(plan: Plan, name: str) -> Any:
        dist.init_process_group("fake", rank=0, world_size=plan.ranks)
        module = torch.nn.Identity()
        stages = [PipelineStage(module, stage, len(plan.parts), torch.device("cpu")) for stage in plan.stages_of(0)]
        one = name in ("GPipe", "1F1B")
        return get_schedule_class(name)(stages[0] if one else stages, plan.micro_batches, loss_fn=torch.sum)

    yield build
    dist.destroy_process_group()


CASES = [
    ("GPipe", 3, 5, {}),
    ("Interleaved1F1B", 2, 4, {}),
    ("Interleaved1F1B", 4, 8, {"stages_per_rank": 3}),
    ("Interleaved1F1B", 4, 10, {}),
    ("Interleaved1F1B", 4, 3, {}),
    ("LoopedBFS", 3, 4, {"stages_per_rank": 5}),
    ("InterleavedZeroBubble", 4, 8, {}),
    ("InterleavedZeroBubble", 2, 6, {"stages_per_rank": 4}),
    ("ZBVZeroBubble", 2, 4, {}),
    ("ZBVZeroBubble", 4, 3, {}),
    ("ZBVZeroBubble", 4, 12, {}),
    ("DualPipeV", 2, 4, {}),
    ("DualPipeV", 3, 9, {}),
    ("DualPipeV", 4, 11, {}),
]


@pytest.mark.parametrize(("name", "ranks", "micro_batches", "options"), CASES)
def test_tables_are_torchs(torch_schedule, name, ranks, micro_batches, options):
    mine = of(name, ranks, micro_batches, **options)
    theirs = torch_schedule(mine, name)

    order = {rank: [str(a) for a in row if a is not None] for rank, row in theirs.pipeline_order.items()}
    compute = {rank: [text for text in row if "REDUCE_GRAD" not in text] for rank, row in order.items()}
    assert {rank: list(map(str, row)) for rank, row in enumerate(mine.computation)} == compute
    if name != "GPipe":  # whose class lowers nothing
        lowered = {rank: list(map(str, row)) for rank, row in theirs.pipeline_order_with_comms.items()}
        assert {rank: list(map(str, row)) for rank, row in enumerate(mine.actions)} == lowered
    assert mine.rank_of == dict(theirs.stage_index_to_group_rank if name != "GPipe" else enumerate(range(ranks)))


@pytest.mark.parametrize("ranks", RANKS)
def test_torch_lowers_1f1b_the_same_way(torch_schedule, ranks):
    """torch's runtime takes our 1F1B, checks it and would add the same communication."""
    mine = of("1F1B", ranks, 2 * ranks)
    single = torch_schedule(mine, "GPipe")
    runtime = schedules._PipelineScheduleRuntime([single._stage], mine.micro_batches, loss_fn=torch.sum)
    runtime._prepare_schedule_with_comms(
        {rank: [schedules._Action.from_str(str(a)) for a in row] for rank, row in enumerate(mine.computation)}
    )
    lowered = {rank: list(map(str, row)) for rank, row in runtime.pipeline_order_with_comms.items()}
    assert {rank: list(map(str, row)) for rank, row in enumerate(mine.actions)} == lowered


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 8), (3, 7)])
def test_the_bubble_of_gpipe_and_1f1b_is_the_papers(name, ranks, micro_batches):
    """(p - 1) / (m + p - 1), whatever forward and backward cost."""
    for costs in ({"F": 1, "B": 2}, {"F": 5, "B": 3}):
        timeline = planned(of(name, ranks, micro_batches), costs)
        for bubble in bubbles(timeline):
            assert bubble.pct == pytest.approx(100 * (ranks - 1) / (micro_batches + ranks - 1))


@pytest.mark.parametrize(("ranks", "micro_batches", "per_rank"), [(2, 4, 2), (4, 8, 2), (4, 8, 4)])
def test_interleaving_divides_the_bubble(ranks, micro_batches, per_rank):
    """arXiv 2104.04473: bubble over ideal time = (p - 1) / (v·m)."""
    timeline = planned(of("Interleaved1F1B", ranks, micro_batches, stages_per_rank=per_rank))
    for bubble in bubbles(timeline):
        assert (bubble.span - bubble.busy) / bubble.busy == pytest.approx((ranks - 1) / (per_rank * micro_batches))


def test_zero_bubble_has_only_the_ramps():
    """arXiv 2401.10241: equal F, I and W leave ranks of ZBV idle at the two ends only, p - 1 units of 6·m."""
    bubble = bubbles(planned(of("ZBVZeroBubble", 4, 12)))
    assert {b.busy for b in bubble} == {72}
    assert {b.span - b.busy for b in bubble} == {3}


def test_a_transfer_delays_and_keeps_nobody_busy():
    here, there = (bubbles(planned(of("1F1B", 2, 4), transfer=cost)) for cost in (0, 10))
    assert [b.busy for b in here] == [b.busy for b in there]
    assert there[0].span > here[0].span


def test_a_stage_that_costs_more_makes_the_others_wait():
    """Two stages, the second twice as dear: the first computes half of the time that the second does."""
    plan = of("1F1B", 2, 8)
    costs = {"F": 10, "B": 20}
    dear = {(1, "F"): 20, (1, "B"): 40}

    timeline = planned(plan, costs, stage_costs=dear)

    first, second = bubbles(timeline)
    assert (first.busy, second.busy) == (8 * 30, 8 * 60)
    assert first.span == second.span == 10 + 8 * 60 + 20  # only the first forward and the last backward stand alone
    assert bubbles(planned(plan, costs, stage_costs={})) == bubbles(planned(plan, costs))
