"""Which call each gloo work belongs to, by hand."""

from __future__ import annotations

import random

import pytest

from harness.trace.gloo import Call, Work, link

MAIN, FIRST, SECOND, THIRD = range(4)


def call(start: int, kind: str, group: str | None = "dp", dur: int = 2) -> Call:
    return Call(start, start + dur, MAIN, kind, group)


def work(start: int, kind: str, thread: int = FIRST) -> Work:
    return Work(start, thread, kind)


def test_a_work_may_start_long_after_its_call() -> None:
    calls = [call(0, "all_gather"), call(10, "all_gather"), call(20, "all_reduce")]
    works = [work(1, "all_gather"), work(50, "all_gather"), work(60, "all_reduce")]
    assert link(calls, works) == [0, 1, 2]
    assert link(calls, works[::-1]) == [2, 1, 0]


def test_gloo_runs_a_reduce_scatter_as_all_reduce() -> None:
    calls = [call(0, "reduce_scatter"), call(10, "all_reduce")]
    assert link(calls, [work(1, "all_reduce"), work(11, "all_reduce")]) == [0, 1]
    assert link([call(0, "all_reduce")], [work(1, "reduce_scatter")]) == [None]


def test_two_groups_in_flight_and_two_threads_each() -> None:
    """The second work of dp starts between those of tp, on a thread of its own."""
    calls = [
        call(0, "all_gather", "dp"),
        call(5, "all_gather", "dp"),
        call(6, "all_reduce", "tp"),
        call(9, "all_reduce", "tp"),
    ]
    works = [
        work(1, "all_gather", FIRST),
        work(7, "all_reduce", THIRD),
        work(8, "all_gather", SECOND),
        work(10, "all_reduce", THIRD),
    ]
    assert link(calls, works) == [0, 2, 1, 3]


@pytest.mark.parametrize("late", ["all_reduce", "all_gather"])
def test_a_later_work_decides_between_two_groups(late: str) -> None:
    """dp called first, but the thread that starts first later runs what only tp called: it is tp's."""
    calls = [call(0, "all_gather", "dp"), call(1, "all_gather", "tp"), call(20, late, "tp")]
    works = [work(5, "all_gather", FIRST), work(6, "all_gather", SECOND), work(21, late, FIRST)]
    assert link(calls, works) == [1, 0, 2]


def test_without_a_contradiction_the_first_call_goes_first() -> None:
    calls = [call(0, "all_gather", "dp"), call(1, "all_gather", "tp")]
    works = [work(5, "all_gather", FIRST), work(6, "all_gather", SECOND)]
    assert link(calls, works) == [0, 1]


def test_two_threads_of_a_group_may_start_in_the_other_order() -> None:
    calls = [call(0, "all_gather"), call(1, "all_reduce"), call(20, "all_gather")]
    works = [work(5, "all_reduce", FIRST), work(6, "all_gather", SECOND), work(21, "all_gather", FIRST)]
    assert link(calls, works) == [1, 0, 2]


def test_sends_open_within_their_call_on_its_thread() -> None:
    """The main thread sends for every group: containment decides, whatever the thread's other works."""
    calls = [call(0, "send", "pp"), call(10, "send_recv", "cp"), call(20, "all_reduce", "pp")]
    works = [work(1, "send", MAIN), work(10, "send", MAIN), work(11, "recv", MAIN), work(21, "all_reduce")]
    assert link(calls, works) == [0, 1, 1, 2]


def test_what_was_under_way_at_the_edges_of_a_capture() -> None:
    """The first work was called before the capture, the last call's work starts after it."""
    calls = [call(10, "all_gather"), call(20, "all_reduce"), call(30, "all_gather")]
    works = [work(5, "all_reduce"), work(11, "all_gather"), work(21, "all_reduce")]
    assert link(calls, works) == [None, 0, 1]


def test_a_call_without_a_work_is_passed_over() -> None:
    calls = [call(0, "all_gather"), call(10, "barrier"), call(20, "all_gather")]
    assert link(calls, [work(1, "all_gather"), work(21, "all_gather")]) == [0, 2]


def test_a_contradictory_capture_is_not_linked() -> None:
    assert link([], [work(1, "all_gather")]) == [None]
    assert link([call(0, "all_gather")], []) == []
    # Three works of a thread for one call: which one is the call's is not known.
    assert link([call(0, "all_gather")], [work(at, "all_gather") for at in (1, 2, 3)]) == [None] * 3
    calls = [call(10 * at, "broadcast") for at in range(5)]
    assert link(calls, [work(10 * at + 1, "all_reduce") for at in range(5)]) == [None] * 5


@pytest.mark.parametrize("seed", range(20))
def test_simulated_queues(seed: int) -> None:
    """Three groups with two workers each: a free worker takes the next call of its group."""
    rng = random.Random(seed)
    kinds = {
        "dp": ["all_gather", "reduce_scatter"],
        "tp": ["all_reduce", "all_gather"],
        "world": ["all_reduce", "broadcast"],
    }
    calls, works, now = [], [], 0
    free = {(group, worker): 0 for group in kinds for worker in range(2)}
    for _ in range(200):
        now += rng.randint(10, 60)
        group = rng.choice(list(kinds))
        kind = rng.choice(kinds[group])
        calls.append(call(now, kind, group))
        worker = min((key for key in free if key[0] == group), key=lambda key: free[key])
        start = max(now + rng.randint(1, 9), free[worker])
        free[worker] = start + rng.randint(5, 150)
        name = "all_reduce" if kind == "reduce_scatter" else kind
        works.append(work(start, name, 1 + list(free).index(worker)))
    assert link(calls, works) == list(range(200))


def test_a_long_capture() -> None:
    calls = [call(10 * at, "all_gather", f"group{at % 4}") for at in range(20_000)]
    works = [work(10 * at + 1, "all_gather", at % 8) for at in range(20_000)]
    assert link(calls, works) == list(range(20_000))
