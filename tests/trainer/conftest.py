"""A world of ranks in one process: the fake backend shards and shapes as a real one does and sends nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

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


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of text to train on."""
    file = tmp_path_factory.mktemp("text") / "documents.jsonl"
    texts = [f"The square of {i} is {i * i}. " * (i % 7) for i in range(60)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file
