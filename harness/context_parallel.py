"""Which tokens of a sequence each context-parallel rank holds, and what its queries see. Free of torch.

Causal attention over a sequence that is split in order gives the last rank most of the work. Head-tail balancing (Llama
3, arXiv 2407.21783, section 3.3.2; torch's `_HeadTailLoadBalancer`) cuts it into two chunks a rank and pairs the k-th
with the k-th from the end, so that all ranks multiply equally many queries with keys.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

LoadBalance = Literal["head_tail", "none"]
Exchange = Literal["allgather", "ring"]


class Block(NamedTuple):
    """Queries of one rank that see keys of another; `causal`: each sees those up to its own place in the block."""

    queries: Literal["all", "tail"]
    keys: Literal["all", "head"]
    causal: bool


def chunks(rank: int, size: int, balance: LoadBalance) -> tuple[int, ...]:
    """Numbers of a rank's chunks of the sequence, in order; there are 2·size with head-tail balancing, else size."""
    return (rank, 2 * size - 1 - rank) if balance == "head_tail" else (rank,)


def positions(seq_len: int, rank: int, size: int, balance: LoadBalance) -> list[int]:
    """Where a rank's tokens are in the sequence, ascending: seq_len / size of them."""
    own = chunks(rank, size, balance)
    length = seq_len // size // len(own)
    return [place for chunk in own for place in range(chunk * length, (chunk + 1) * length)]


def visible(rank: int, source: int, balance: LoadBalance) -> Block | None:
    """What the queries of `rank` see of the keys of `source`; None: nothing.

    A head chunk before one's own leaves all of one's queries something to see, and the tail that goes with it nothing;
    of a rank after one's own both chunks lie between one's own two.
    """
    if source == rank:
        return Block("all", "all", True)
    if balance == "head_tail":
        return Block("all", "head", False) if source < rank else Block("tail", "all", False)
    return Block("all", "all", False) if source < rank else None


def sources(rank: int, size: int) -> list[int]:
    """Whose keys a rank attends to, its own first, in the order in which a ring brings them."""
    return [(rank - step) % size for step in range(size)]
