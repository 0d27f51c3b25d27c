"""Overlap by brute force: every elementary interval between two boundaries is looked at once. Shares no code with
the package: stdlib json with decimals, integers, no interval algebra."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

NCCL = re.compile(r"(?i)(?<![a-z])(nccl|rccl)")


def ns(microseconds: Any) -> int:
    return int((Decimal(microseconds) * 1000).to_integral_value())


def load(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    document: dict[str, Any] = json.loads(raw.decode("utf-8-sig"), parse_float=Decimal)
    return document


class Brute:
    def __init__(self, path: Path) -> None:
        document = load(path)
        events = [e for e in document["traceEvents"] if e.get("ph") == "X" and "dur" in e and e["dur"] >= 0]
        config = (document.get("distributedInfo") or {}).get("pg_config") or []
        self.world_axis = next(
            (
                g["pg_desc"]
                for g in config
                if g["pg_desc"] != "default_pg" and len(g["ranks"]) == document["distributedInfo"]["world_size"]
            ),
            "world",
        )
        self.launch: dict[int, int] = {}
        self.steps: dict[int, tuple[int, int]] = {}
        # (start, end, role, dimension, kind) with role comm, compute or memory
        self.gpu: list[tuple[int, int, str, str, str, int | None]] = []
        for e in events:
            cat, name, args = str(e.get("cat")).lower(), e["name"], e.get("args") or {}
            start = ns(e["ts"])
            if cat in ("cuda_runtime", "cuda_driver", "runtime") and "correlation" in args:
                key = args["correlation"]
                self.launch[key] = min(start, self.launch.get(key, start))
            elif name.startswith("ProfilerStep#") and cat != "gpu_user_annotation":
                number = int(name.split("#")[1])
                old = self.steps.get(number, (start, start))
                self.steps[number] = (min(old[0], start), max(old[1], start + ns(e["dur"])))
            elif cat in ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"):
                role = "memory" if cat != "kernel" else "comm" if NCCL.search(name) else "compute"
                row = (role, self.dimension(args), self.kind(name), args.get("correlation"))
                self.gpu.append((start, start + ns(e["dur"]), *row))

    def dimension(self, args: dict[str, Any]) -> str:
        description = args.get("Process Group Description")
        if description is None:
            return "no group data"
        return self.world_axis if description == "default_pg" else str(description)

    @staticmethod
    def kind(name: str) -> str:
        found = re.search(r"AllGather|ReduceScatter|AllReduce|SendRecv|Broadcast", name)
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", found[0]).lower() if found else "other"

    def of_step(self, number: int) -> list[Any]:
        low, high = self.steps[number]
        return [e for e in self.gpu if e[5] in self.launch and low <= self.launch[e[5]] < high]

    def clipped(self, number: int) -> list[Any]:
        low, high = self.steps[number]
        cut = [(max(e[0], low), min(e[1], high), *e[2:]) for e in self.gpu]
        return [e for e in cut if e[1] > e[0]]


def count(events: list[Any], window: tuple[int, int] | None = None) -> dict[str, Any]:
    """The contract's figures, and per dimension and kind (communication, overlapped)."""
    changes: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for start, end, role, dimension, kind, _ in events:
        keys = [role] if role != "comm" else [role, f"dim {dimension}", f"kind {kind}"]
        for key in keys:
            changes[start].append((1, key))
            changes[end].append((-1, key))
    active: Counter[str] = Counter()
    total: Counter[str] = Counter()
    previous = None
    for moment in sorted(changes):
        length = 0 if previous is None else moment - previous
        running = {key for key, n in active.items() if n > 0}
        for key in running:
            total[key] += length
            if "compute" in running:
                total[f"overlapped {key}"] += length
        total["busy"] += length if running else 0
        total["memory alone"] += length if running == {"memory"} else 0
        for change, key in changes[moment]:
            active[key] += change
        previous = moment
    if window is None:
        window = (min((e[0] for e in events), default=0), max((e[1] for e in events), default=0))
    span = window[1] - window[0]
    comm, overlap = total["comm"], total["overlapped comm"]
    figures: dict[str, Any] = {
        "comm_ns": comm,
        "compute_ns": total["compute"],
        "memory_ns": total["memory"],
        "overlap_ns": overlap,
        "exposed_ns": comm - overlap,
        "idle_ns": span - total["busy"],
        "span_ns": span,
        "overlap_pct": 100 * overlap / comm if comm else None,
    }
    parts = {
        key: (value, total[f"overlapped {key}"]) for key, value in total.items() if key.startswith(("dim ", "kind "))
    }
    return {"figures": figures, "parts": parts, "memory_alone": total["memory alone"]}
