"""Splitting sequences over context-parallel ranks: every token once, equal work, and exactly what causality allows."""

from __future__ import annotations

import pytest

from harness.context_parallel import Block, LoadBalance, positions, sources, visible

SEQUENCE = 48
SPLITS = [(size, balance) for size in (2, 3, 4) for balance in ("head_tail", "none")]


def tokens(size: int, balance: LoadBalance) -> list[list[int]]:
    return [positions(SEQUENCE, rank, size, balance) for rank in range(size)]


def pairs(block: Block | None, queries: list[int], keys: list[int]) -> set[tuple[int, int]]:
    """The products of a block, as places in the sequence."""
    if block is None:
        return set()
    rows = queries if block.queries == "all" else queries[len(queries) // 2 :]
    columns = keys if block.keys == "all" else keys[: len(keys) // 2]
    return {(q, k) for i, q in enumerate(rows) for j, k in enumerate(columns) if not block.causal or j <= i}


@pytest.mark.parametrize(("size", "balance"), SPLITS)
def test_every_token_is_on_one_rank(size, balance):
    split = tokens(size, balance)

    assert sorted(place for rank in split for place in rank) == list(range(SEQUENCE))
    assert {len(rank) for rank in split} == {SEQUENCE // size}
    assert all(rank == sorted(rank) for rank in split)


@pytest.mark.parametrize(("size", "balance"), SPLITS)
def test_the_blocks_of_all_ranks_are_the_causal_mask(size, balance):
    split = tokens(size, balance)
    seen = [
        pair
        for rank in range(size)
        for source in sources(rank, size)
        for pair in pairs(visible(rank, source, balance), split[rank], split[source])
    ]

    assert len(seen) == len(set(seen)), "a product that two blocks make"
    assert set(seen) == {(q, k) for q in range(SEQUENCE) for k in range(q + 1)}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_head_and_tail_balance_the_products_and_one_piece_does_not(size):
    def products(balance: LoadBalance) -> list[int]:
        split = tokens(size, balance)
        return [sum(q + 1 for q in rank) for rank in split]

    balanced, in_order = products("head_tail"), products("none")
    assert len(set(balanced)) == 1
    assert sum(in_order) == sum(balanced)
    assert in_order[-1] > 1.4 * balanced[0], "2 - 1/size times"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_ring_brings_the_keys_of_every_rank_from_its_predecessor(size):
    for rank in range(size):
        order = sources(rank, size)
        assert order[0] == rank
        assert sorted(order) == list(range(size))
        assert order[1:] == sources((rank - 1) % size, size)[:-1], "what it passes on, one step earlier"
