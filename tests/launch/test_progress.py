"""The line that `meshscope run` shows of a step: each figure keeps its name and its meaning from step to step."""

import pytest

from harness.commands.run import progress_words

GIB = 2**30
CPU = {"loss": 2.5, "tokens_per_s": 1234.5, "peak_rss_bytes": GIB, "peak_allocated_bytes": None, "memory_source": "rss"}
TRACKED = CPU | {"peak_allocated_bytes": GIB // 4, "memory_source": "tensor_storages"}
CUDA = CPU | {"peak_allocated_bytes": 3 * GIB, "memory_source": "cuda_allocator"}


@pytest.mark.parametrize(
    ("row", "memory"),
    [
        (CPU, "peak resident GiB 1.0000"),
        (TRACKED, "peak resident GiB 1.0000  of which tracked tensors 0.2500"),
        (CUDA, "peak allocated GiB 3.0000"),
        (CUDA | {"peak_allocated_bytes": None}, "peak allocated GiB n/a"),
    ],
)
def test_memory_of_a_step(row, memory):
    assert progress_words(row) == f"loss 2.5000  tokens/s per device 1,234  {memory}"


def test_what_is_not_known():
    assert progress_words({}) == "loss n/a  tokens/s per device n/a  peak resident GiB n/a"
