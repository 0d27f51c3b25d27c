"""A world of ranks in one process: the fake backend shards and shapes as a real one does and sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch.distributed as dist
from torch.distributed.tensor import debug

World = Callable[[int, int], AbstractContextManager[None]]


@pytest.fixture
def fake_world() -> World:
    @contextmanager
    def enter(rank: int, world_size: int) -> Iterator[None]:
        dist.init_process_group("fake", rank=rank, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()
            # DTensor caches the specs of results, with the mesh of the rank that this process was before.
            for clear in ("_clear_fast_path_sharding_prop_cache", "_clear_python_sharding_prop_cache"):
                getattr(debug, clear)()

    return enter
