"""CUDA's multi-process service (MPS) for one run: with it the kernels of several processes run on a GPU at once.

Without it the processes get the GPU in turns, and a collective waits for whole time slices: an all-gather of 8 MiB on
each of 8 ranks took 75 ms on an H200 and 0.5 ms with it. Source: NVIDIA's Multi-Process Service documentation.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from harness.errors import UnavailableError

CONTROL = "nvidia-cuda-mps-control"
NOT_INSTALLED = (
    f"{CONTROL} is not on PATH: it comes with NVIDIA's driver (in a container: "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
)
GUARD = Path(__file__).with_name("mps_guard.py")


@contextmanager
def mps(environment: Mapping[str, str] = os.environ) -> Iterator[dict[str, str]]:
    """A daemon of this run alone; yields what its clients need in their environment, CUDA_VISIBLE_DEVICES not among
    it.

    Its folders are temporary and its own, so that a daemon that somebody else runs is left alone. A process beside
    this one ends it and removes them: at the end of the block, and when this process dies. Raises `UnavailableError`
    where there is none or it does not start.
    """
    program = shutil.which(CONTROL, path=environment.get("PATH"))
    if program is None:
        raise UnavailableError(NOT_INSTALLED)
    with subprocess.Popen(
        [sys.executable, "-P", str(GUARD), program],
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that no signal of a terminal reaches it
    ) as guard:
        assert guard.stdin is not None
        assert guard.stdout is not None
        try:
            facts = _answer(guard.stdout)
            if "pipe" not in facts:
                raise UnavailableError(f"MPS did not start: {facts.get('error', 'its guard ended')}")
            yield {"CUDA_MPS_PIPE_DIRECTORY": facts["pipe"], "CUDA_MPS_LOG_DIRECTORY": facts["log"]}
        finally:
            guard.stdin.close()
            guard.wait()


def _answer(output: IO[str]) -> dict[str, str]:
    """What the guard says up to whether the daemon runs."""
    facts: dict[str, str] = {}
    for line in output:
        facts |= json.loads(line)
        if "pipe" in facts or "error" in facts:
            break
    return facts
