"""One set of worker processes for all distributed tests: torch is imported once, a layout costs its steps.

`python tests/pool.py RANK` is a worker: it reads jobs as JSON lines, trains as that rank, and answers each with a line.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any

from harness.config import Trainer
from harness.config_json import from_dict, to_dict

REPOSITORY = Path(__file__).parent.parent


class Pool:
    """Up to `size` ranks. A job that fails or hangs ends the workers; the next one starts new ones."""

    def __init__(self, size: int, logs: Path) -> None:
        self.size, self.logs = size, logs
        self.workers: list[subprocess.Popen[str]] = []

    def train(
        self,
        config: Trainer.Config,
        directory: Path,
        timeout_s: float = 120,
        *,
        stands_still: bool = False,
        cpu_offload: bool = False,
    ) -> None:
        """Trains `config` into a recording at `directory`; raises RuntimeError with the first rank's traceback.

        stands_still: its steps do nothing, so that a checkpoint is of what was there before them.
        cpu_offload: although the run is on CPUs, which refuse it since there it changes no figure.
        """
        if not self.workers:
            self._start()
        job = {
            "config": to_dict(config),
            "directory": str(directory),
            "world_size": config.world_size,
            "port": free_port(),
            "stands_still": stands_still,
            "cpu_offload": cpu_offload,
        }
        ranks = self.workers[: config.world_size]
        for worker in ranks:
            stdin: IO[str] | None = worker.stdin
            assert stdin is not None
            stdin.write(json.dumps(job) + "\n")
            stdin.flush()
        failures = self._answers(ranks, time.monotonic() + timeout_s)
        if failures:
            self.close()
            raise RuntimeError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    pipe.close()
        self.workers = []

    def _start(self) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUNBUFFERED": "1",
        }
        for rank in range(self.size):
            with open(self.logs / f"worker{rank}.log", "ab") as log:
                self.workers.append(
                    subprocess.Popen(
                        [sys.executable, __file__, str(rank)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        env=environment,
                        text=True,
                    )
                )

    def _answers(self, ranks: list[subprocess.Popen[str]], deadline: float) -> dict[int, str]:
        """What went wrong, by rank; waits for all ranks, or until one fails, since the others then wait for it."""
        failures: dict[int, str] = {}
        with selectors.DefaultSelector() as waiting:
            for rank, worker in enumerate(ranks):
                assert worker.stdout is not None
                waiting.register(worker.stdout, selectors.EVENT_READ, rank)
            while waiting.get_map() and not failures:
                ready = waiting.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    return {key.data: "no answer in time" for key in waiting.get_map().values()}
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    waiting.unregister(key.fileobj)
                    answer: dict[str, Any] = json.loads(line) if line else {"error": f"died, see {self.logs}"}
                    if answer["error"] is not None:
                        failures[key.data] = answer["error"]
        return failures


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def work(rank: int) -> None:
    """The worker: one job after the other, each in a process group of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not answer
    import torch
    from torch.distributed.tensor import debug

    import harness.trainer.trainer  # noqa: F401, so that no job looks through what it imports for what is garbage

    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job["world_size"]),
            "LOCAL_WORLD_SIZE": str(job["world_size"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(job["port"]),
        }
        error = None
        try:
            trainer: Any = from_dict(job["config"]).build(Path(job["directory"]))
            if job["cpu_offload"]:
                trainer.config.training.cpu_offload = True
            if job["stands_still"]:
                trainer._step = lambda *_: torch.zeros(())
            trainer.train()
        except Exception:  # whatever a test's run raises is the test's to judge
            error = traceback.format_exc()
        # DTensor keeps plans for the meshes, and so the groups, of the job before.
        debug._clear_fast_path_sharding_prop_cache()
        debug._clear_python_sharding_prop_cache()
        print(json.dumps({"error": error}), file=answers, flush=True)


if __name__ == "__main__":
    work(int(sys.argv[1]))
