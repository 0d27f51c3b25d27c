"""The order of trials."""

import pytest

from probes.plan import order


def arms(pairs: int, seed: int) -> str:
    return "".join(trial.arm for trial in order(pairs, seed))


@pytest.mark.parametrize("pairs", [1, 2, 3, 7, 8])
def test_every_pair_has_both_arms_next_to_each_other(pairs: int) -> None:
    trials = order(pairs, seed=5)
    assert [trial.index for trial in trials] == list(range(2 * pairs))
    for pair in range(pairs):
        members = trials[2 * pair : 2 * pair + 2]
        assert [trial.pair for trial in members] == [pair, pair]
        assert {trial.arm for trial in members} == {"A", "B"}


@pytest.mark.parametrize("seed", range(20))
def test_blocks_of_two_pairs_balance_the_arms_positions(seed: int) -> None:
    found = order(8, seed)
    assert {arms(8, seed)[start : start + 4] for start in range(0, 16, 4)} <= {"ABBA", "BAAB"}
    positions = {arm: sum(trial.index for trial in found if trial.arm == arm) for arm in "AB"}
    assert positions["A"] == positions["B"], "a linear drift would look like an effect"


def test_the_seed_decides() -> None:
    assert arms(9, 3) == arms(9, 3)
    assert len({arms(8, seed) for seed in range(200)}) == 2**4, "not every order of four blocks comes up"
    assert {arms(1, seed) for seed in range(20)} == {"AB", "BA"}


def test_less_than_one_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="pairs is 0"):
        order(0, 1)
