"""Small chrome traces written by hand: times in µs as torch writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def complete(cat: str, name: str, ts: Any, dur: Any, **more: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 100, "tid": 100, "ts": ts, "dur": dur} | more


def kernel(name: str, ts: Any, dur: Any, *, stream: int = 7, correlation: int | None = None, **args: Any) -> Event:
    numbers = {"device": 0, "stream": stream} | ({} if correlation is None else {"correlation": correlation})
    return complete("kernel", name, ts, dur, pid=0, tid=stream, args=numbers | args)


def nccl(kind: str, ts: Any, dur: Any, *, stream: int = 20, correlation: int | None = None, **args: Any) -> Event:
    return kernel(f"ncclDevKernel_{kind}_RING_LL(x)", ts, dur, stream=stream, correlation=correlation, **args)


def group(name: str, description: str | None, ranks: list[int], collective: str = "allreduce", **more: Any) -> Event:
    found = {"Collective name": collective, "Process Group Name": name, "Process Group Ranks": str(ranks)} | more
    return found if description is None else found | {"Process Group Description": description}


def launch(ts: Any, correlation: int, **more: Any) -> Event:
    return complete("cuda_runtime", "cudaLaunchKernel", ts, 2, args={"correlation": correlation}) | more


def step(number: int, ts: Any, dur: Any, **more: Any) -> Event:
    return complete("user_annotation", f"ProfilerStep#{number}", ts, dur) | more


def annotation(name: str, ts: Any, dur: Any, tid: int = 100) -> Event:
    return complete("user_annotation", name, ts, dur, tid=tid)


def operator(name: str, ts: Any, dur: Any, tid: int = 100) -> Event:
    return complete("cpu_op", name, ts, dur, tid=tid)


def write(path: Path, events: list[Any], *, rank: int | None = 0, world_size: int = 2, **header: Any) -> Path:
    info = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size}}
    if "pg_config" in header:
        info["distributedInfo"]["pg_config"] = header.pop("pg_config")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 1, **info, **header, "traceEvents": events}))
    return path


def pg(name: str, description: str, ranks: list[int]) -> Event:
    return {"pg_name": name, "pg_desc": description, "pg_size": len(ranks), "ranks": ranks}
