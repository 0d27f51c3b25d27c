"""The line that `meshscope run` shows of a step: each figure keeps its name and its meaning from step to step."""

import subprocess
import sys
import time

import pytest

from harness import recording
from harness.checkpoints import checkpoint_path
from harness.commands.run import progress_words
from harness.launch import StepFollower, _follow

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


WRITES_SLOWLY = """
import sys, time
for _ in range(20):
    with open(sys.argv[1], "ab") as file:
        file.write(b"more")
    time.sleep(0.1)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("then_s", "hung"), [(0, False), (60, True)])
def test_a_checkpoint_that_grows_is_progress(tmp_path, then_s, hung):
    recording.steps_path(tmp_path, 0).parent.mkdir()
    partial = checkpoint_path(tmp_path, 1).with_suffix(".partial")
    partial.mkdir(parents=True)
    file = partial / "__0_0.distcp"
    with subprocess.Popen([sys.executable, "-c", WRITES_SLOWLY, str(file), str(then_s)]) as process:
        while not file.exists():
            time.sleep(0.01)
        reason = _follow(process, tmp_path, StepFollower(tmp_path, [0]), [], 1.0, None)
        process.kill()
    assert (reason is not None) is hung
    assert not hung or reason.startswith("hung: no rank ended a step for 1 s")
