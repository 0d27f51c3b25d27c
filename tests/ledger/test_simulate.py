"""The simulator against timelines worked out by hand; times are nanoseconds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from harness.config import Decoder, Parallelism, Trainer, Training
from harness.ledger.simulate import (
    ALL_GATHER,
    COMPUTE,
    REDUCE_SCATTER,
    TRANSFER,
    Collective,
    DeadlockError,
    Item,
    Kernel,
    Record,
    Synchronise,
    Timeline,
    Wait,
    Work,
    overlap_ns,
    simulate,
    total_ns,
    union,
)
from harness.pipeline.config import Pipeline
from harness.pipeline.plan import Plan, plan


def kernel(ns: int, *, host_ns: int = 0, stream: str = COMPUTE, fills: bool = False) -> Kernel:
    return Kernel(stream, ns, host_ns, 0, fills)


def collective(
    ns: int, stream: str = ALL_GATHER, *, communicator: str = "dp", peers: tuple[int, ...] = (0,), name: object = ""
) -> Collective:
    return Collective(stream, ns, 0, 0, "dp", communicator, (communicator, name), peers)


def alone(*items: Item) -> Timeline:
    (timeline,) = simulate([items])
    return timeline


def spans(timeline: Timeline) -> list[tuple[int, int]]:
    return [(start, end) for start, end, *_ in timeline.collectives]


def exposed_ns(timeline: Timeline) -> int:
    communicates = union(spans(timeline))
    return total_ns(communicates) - overlap_ns(communicates, timeline.compute)


def test_a_kernel_starts_once_it_is_issued_and_its_stream_is_free() -> None:
    assert alone(kernel(10, host_ns=3), kernel(10, host_ns=3)).compute == [(3, 23)]  # the device decides
    assert alone(kernel(3, host_ns=10), kernel(3, host_ns=10)).compute == [(10, 13), (20, 23)]  # the host does


def test_the_host_waits_where_it_synchronises_and_works_while_the_device_does() -> None:
    timeline = alone(kernel(100), Work(30), Synchronise(COMPUTE), Work(30), kernel(10))
    assert timeline.compute == [(0, 100), (130, 140)]
    assert (timeline.host_end, timeline.end) == (130, 140)


def test_a_stream_goes_on_when_what_it_waits_for_is_done() -> None:
    timeline = alone(collective(50), Record(ALL_GATHER, 1), kernel(20), Wait(COMPUTE, 1), kernel(5))
    assert timeline.compute == [(0, 20), (50, 55)]
    assert exposed_ns(timeline) == 30


@pytest.mark.parametrize("gather_ns", [40, 100, 160])
def test_prefetched_all_gathers_are_exposed_by_what_forward_does_not_cover(gather_ns: int) -> None:
    """FSDP2 in forward: while unit i computes, unit i+1 is gathered, and exposed for max(0, t_AG(i+1) - t_fwd(i));
    the first wholly."""
    forward_ns = [100, 80, 120, 90]
    items: list[Item] = [collective(gather_ns, name=0), Record(ALL_GATHER, 0)]
    for unit, ns in enumerate(forward_ns):
        items += [Wait(COMPUTE, unit), Record(COMPUTE, 100 + unit), kernel(ns)]
        items += [Wait(ALL_GATHER, 100 + unit), collective(gather_ns, name=unit + 1), Record(ALL_GATHER, unit + 1)]
    timeline = alone(*items[:-2])
    expected = gather_ns + sum(max(0, gather_ns - ns) for ns in forward_ns[:-1])
    assert exposed_ns(timeline) == expected
    assert timeline.end == sum(forward_ns) + expected


def test_what_shares_a_communicator_goes_one_after_the_other() -> None:
    both = collective(30, REDUCE_SCATTER, name="reduce"), collective(20, ALL_GATHER, name="gather")
    assert spans(alone(*both)) == [(0, 30), (30, 50)]
    assert spans(alone(both[0], replace(both[1], communicator="other"))) == [(0, 30), (0, 20)]


def test_nothing_starts_beside_a_kernel_that_fills_the_device() -> None:
    assert spans(alone(kernel(70, fills=True), kernel(30), collective(10))) == [(70, 80)]
    assert spans(alone(kernel(70), kernel(30), collective(10))) == [(0, 10)]
    on_compute = alone(kernel(70, fills=True), collective(10, COMPUTE))
    assert spans(on_compute) == [(70, 80)]


def test_company_takes_longer() -> None:
    """Of 100 ns of computation 25 are done in the 50 that a collective lasts, at half the speed."""
    slow = replace(collective(50), compute_factor=2.0)
    assert alone(slow, kernel(100)).compute == [(0, 125)]
    # 80 of its 100 ns have company: 100 + 0.5·80; the kernel itself is not slowed.
    later = replace(collective(100), collective_factor=1.5)
    (span,) = spans(alone(later, kernel(80)))
    assert 120 < span[1] <= 140
    assert spans(alone(later, kernel(500))) == [(0, 150)]


def test_a_device_that_rests_little_slows_down() -> None:
    """By half of what it would lose without a rest, where it computes half of the time."""
    busy, resting = kernel(100), Work(100)
    (timeline,) = simulate([[busy, Synchronise(COMPUTE), resting]], lambda share: 1 + 0.1 * share)
    assert timeline.end == pytest.approx(100 * 1.05 + 100, rel=0.01)
    (never,) = simulate([[busy]], lambda share: 1 + 0.1 * share)
    assert never.end == 110


def test_memory_operations_compute_nothing() -> None:
    copies = Kernel(COMPUTE, 10, 0, 0, is_copy=True)
    assert alone(copies, kernel(5)).compute == [(10, 15)]


def test_kernels_beside_the_compute_stream_take_half_of_the_memory() -> None:
    timeline = alone(kernel(40, stream="copies"), kernel(100))
    assert timeline.compute == [(0, 120)]


def test_the_rank_that_comes_last_decides() -> None:
    meets = collective(10, COMPUTE, peers=(0, 1))
    first, second = simulate([[kernel(5), meets, kernel(1)], [kernel(50), meets, kernel(1)]])
    assert spans(first) == [(5, 60)]
    assert spans(second) == [(50, 60)]
    assert (first.end, second.end) == (61, 61)


def test_ranks_that_wait_for_each_other_are_said() -> None:
    one, other = collective(1, name=1, peers=(0, 1)), collective(1, name=2, peers=(0, 1))
    with pytest.raises(DeadlockError, match=r"simulated ranks \[0, 1\] wait for each other"):
        simulate([[one, other], [other, one]])


def test_nothing_takes_no_time() -> None:
    assert alone().end == 0
    assert simulate([]) == []


def test_spans() -> None:
    assert union([(5, 9), (0, 3), (2, 4), (9, 10), (7, 7)]) == [(0, 4), (5, 10)]
    assert total_ns([(0, 4), (5, 10)]) == 9
    assert overlap_ns([(0, 4), (5, 10)], [(3, 6), (8, 20)]) == 1 + 1 + 2
    assert overlap_ns([(0, 4)], []) == 0


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 4)])
def test_1f1b_idles_by_its_bubble(ranks: int, micro_batches: int) -> None:
    """(P-1)/(m+P-1) of the time (arXiv 2104.04473, section 2.2), where a backward takes two forwards and nothing is
    sent in no time."""
    pipeline = plan(
        Trainer.Config(
            world_size=ranks,
            model=Decoder.Config(n_layers=4),
            parallelism=Parallelism.Config(pp=ranks),
            training=Training.Config(),
            pipeline=Pipeline.Config(
                schedule="1F1B", micro_batches=micro_batches, first_stage_less_layers=0, last_stage_less_layers=0
            ),
        )
    )
    timelines = simulate([issued(pipeline, rank) for rank in range(ranks)])
    span = max(timeline.end for timeline in timelines)
    for timeline in timelines:
        idle = span - total_ns(timeline.compute)
        assert idle / span == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


def issued(pipeline: Plan, rank: int) -> list[Item]:
    """A rank's actions: forwards of 10 ns, backwards of 20, and what they send and wait for."""
    items: list[Item] = []
    arrived: dict[tuple[int, str, int | None], int] = {}
    for event, action in enumerate(pipeline.actions[rank]):
        stage, kind, number = action.stage, action.kind, action.micro_batch
        if kind in ("F", "B"):
            if (stage, kind, number) in arrived:
                items.append(Wait(COMPUTE, arrived[stage, kind, number]))
            items.append(kernel(10 if kind == "F" else 20))
        elif kind.startswith(("SEND", "RECV")):
            sends, of = kind.startswith("SEND"), kind[-1]
            other = stage + (1 if of == "F" else -1) * (1 if sends else -1)
            source, to = (stage, other) if sends else (other, stage)
            name = (of, source, number)
            items += [Record(COMPUTE, 2 * event), Wait(TRANSFER, 2 * event)]
            items.append(collective(0, TRANSFER, communicator="pp", peers=(source, to), name=name))
            items.append(Record(TRANSFER, 2 * event + 1))
            if not sends:
                arrived[stage, of, number] = 2 * event + 1
    return items


def test_pairs_of_spans_stay_disjoint() -> None:
    timeline = alone(*(kernel(10, host_ns=gap) for gap in (0, 5, 30, 10, 9)))
    assert all(one[1] < other[0] for one, other in pairwise(timeline.compute))
