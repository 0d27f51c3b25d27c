"""Ranks to be killed: forked from one process that has imported torch, so that new ones do not import it again.

`python tests/trainer/forked_ranks.py` reads jobs as JSON lines. It answers each with the process ids of its ranks, and
once all have ended with a second line.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from pool import REPOSITORY, free_port

from harness.config import Trainer
from harness.config_json import from_dict, to_dict


class ForkedRanks:
    """Starts the ranks of one run after the other; within `with`."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def __enter__(self) -> ForkedRanks:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "tests"))),
            "CUDA_VISIBLE_DEVICES": "",
        }
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def start(self, config: Trainer.Config, directory: Path) -> list[int]:
        """Has `config` trained into a recording at `directory`; returns the process ids, by rank."""
        assert self._process.stdin is not None
        job = {"config": to_dict(config), "directory": str(directory), "port": free_port()}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        pids: list[int] = self._answer()
        return pids

    def wait(self) -> None:
        """Until all ranks have ended, however they did."""
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def work() -> None:
    import harness.trainer.trainer  # noqa: F401, before the ranks are forked

    gc.freeze()  # nor does each of them look through it for what is garbage
    for line in sys.stdin:
        job = json.loads(line)
        config = from_dict(job["config"])
        pids = [_forked(config, Path(job["directory"]), rank, job["port"]) for rank in range(config.world_size)]
        print(json.dumps(pids), flush=True)
        for pid in pids:
            os.waitpid(pid, 0)
        print(json.dumps("ended"), flush=True)


def _forked(config: Trainer.Config, directory: Path, rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.dup2(2, 1)  # whatever prints must not answer
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(config.world_size),
        "LOCAL_WORLD_SIZE": str(config.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        config.build(directory).train()
    except Exception:  # the recording says why, and a test judges it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    work()
