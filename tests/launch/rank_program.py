"""A rank without torch: ends steps, and then behaves as SCENARIO says."""

import json
import os
import signal
import sys
import time
from pathlib import Path

if os.environ["SCENARIO"] == "fails before anything":
    raise ImportError("no module of that name")

from harness import recording
from harness.worker import EXIT_TERMINATED, prepare

directory, rank = Path(sys.argv[1]), int(os.environ["RANK"])
scenario = os.environ["SCENARIO"]


def end_step(step: int) -> None:
    path = recording.steps_path(directory, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps({"step": step}) + "\n")


def wait_for_ever() -> None:
    while True:
        time.sleep(0.05)


prepare(directory, rank)
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_TERMINATED))  # as the recorder does
recording.write_json(recording.rank_path(directory, rank), {"rank": rank, "pid": os.getpid(), "end_state": None})
try:
    if pipe := os.environ.get("CUDA_MPS_PIPE_DIRECTORY"):
        print(f"MPS at {pipe}")
    print(f"out of rank {rank}")
    print(f"err of rank {rank}", file=sys.stderr)
    end_step(0)
    if scenario == "completes":
        end_step(1)
    elif scenario == "rank 1 raises":
        if rank == 1:
            raise ValueError("the reason\nand a second line")
        wait_for_ever()
    elif scenario == "rank 1 fails and stays":
        if rank == 1:
            failed = {"end_state": "failed", "exception": "ValueError: the reason", "failed_unix_ns": time.time_ns()}
            recording.write_json(recording.rank_path(directory, rank), {"rank": rank, "pid": os.getpid(), **failed})
        wait_for_ever()
    elif scenario == "rank 1 is killed":
        if rank == 1:
            while not recording.steps_path(directory, 0).exists():  # else the other may never begin
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_ever()
    elif scenario == "rank 1 gives up":
        if rank == 1:
            print("nothing left to do")
            sys.exit(7)
        wait_for_ever()
    elif scenario == "rank 1 hangs":
        if rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            end_step(1)
        wait_for_ever()
    elif scenario == "runs on":
        wait_for_ever()
finally:
    (directory / f"unwound{rank}").touch()
