"""Which ranks of a world to rehearse: by default one of each kind of rank, as the ledger tells them apart."""

from __future__ import annotations

from collections.abc import Sequence

from harness.config import Trainer
from harness.errors import UnavailableError, UsageError
from harness.ledger import predict
from harness.text import size


def parse_ranks(text: str) -> list[int]:
    """`0,3` as [0, 3]; raises `UsageError`."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise UsageError(f"--ranks {text}: give rank numbers with commas between them, such as 0,3")
    return list(dict.fromkeys(int(word) for word in words))


def ranks_to_rehearse(
    config: Trainer.Config, wanted: Sequence[int] | None, *, host_memory_bytes: int | None = None
) -> list[int]:
    """`wanted`, or the first of each kind of ranks that hold the same amount of memory (shards of uneven rows differ).

    Raises `UsageError` for a rank that the world does not have; with `host_memory_bytes`, where tensors live in the
    machine's own memory, `UnavailableError` for one whose predicted peak is beyond it: the kernel would end other
    processes to make room.
    """
    if outside := [rank for rank in wanted or () if rank >= config.world_size]:
        raise UsageError(f"--ranks: there is no rank {outside[0]} in world_size={config.world_size}, the first is 0")
    predicted = predict(config, "cuda" if host_memory_bytes is None else "cpu").ranks
    ranks = list(wanted) if wanted else [rank.rank for rank in predicted if rank.rank == rank.alike_rank]
    for rank in ranks:
        peak = predicted[rank].peak_allocated_bytes
        if host_memory_bytes is not None and peak > host_memory_bytes:
            raise UnavailableError(
                f"rank {rank} of {config.world_size} does not fit: its predicted peak is {size(peak)}, this machine "
                f"has {size(host_memory_bytes)} of memory (meshscope ledger predicts it without running)"
            )
    return ranks
