"""A rank without torch whose steps take as long, and end, as PROBED says: what an arm of an experiment does to it.
In arms that end in a collective ranks are real ones over gloo, of which the first waits for the second.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from harness import recording
from harness.worker import prepare

directory, rank = Path(sys.argv[1]), int(os.environ["RANK"])
probed = os.environ.get("PROBED", "unset")
trial = int(directory.name.split("-")[0])

prepare(directory, rank)
environment = {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "PROBED", "MESHSCOPE_"))}
if probed == "lies":
    environment["OMP_NUM_THREADS"] = "77"
document = {"rank": rank, "pid": os.getpid(), "environment_before": environment, "end_state": None}
recording.write_json(recording.rank_path(directory, rank), document)
if rank == 0:
    recording.merge_manifest(directory, {"versions": {"torch": "none"}})

if probed == "too much":
    raise MemoryError("CUDA out of memory: tried to allocate 2.00 GiB")
if probed == "raises" and rank == 1:
    raise ValueError("no such algorithm")
if probed == "waits" and trial == 1 and not (directory.parent.parent / "go").exists():
    time.sleep(600)
if probed in ("stops in a collective", "is killed in a collective", "runs out of memory in a collective"):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(8))
    if rank == 1 and probed.startswith("stops"):
        time.sleep(600)
    if rank == 1 and probed.startswith("is killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        torch.empty(2**60, dtype=torch.uint8)
    dist.all_reduce(torch.ones(8))

path = recording.steps_path(directory, rank)
path.parent.mkdir(parents=True, exist_ok=True)
steps = json.loads((directory / "config.json").read_text())["training"]["steps"]
with open(path, "w") as file:
    for step in range(steps):
        wall_ns = 2_000_000 if probed == "slow" else 1_000_000
        row = {"step": step, "started_unix_ns": time.time_ns(), "wall_ns": wall_ns + trial * 1000 + rank, "loss": 1.0}
        row |= {"memory_source": "cuda_allocator", "peak_allocated_bytes": 5 * 2**20, "tags": []}
        file.write(json.dumps(row) + "\n")
recording.write_json(recording.rank_path(directory, rank), {**document, "end_state": "complete"})
