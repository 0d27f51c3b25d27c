"""Builds small snapshots that are consistent with themselves, as an allocator would write them."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

MIB = 1 << 20


def frame(name: str, filename: str = "/home/me/train.py", line: int = 7) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


class Allocator:
    """Records events the way the caching allocator does; every block gets a place of its own in one segment."""

    def __init__(self, device: int = 0, *, expandable: bool = False, capacity: int = 1 << 34) -> None:
        self.device = device
        self.expandable = expandable
        self.capacity = capacity
        self.events: list[dict[str, Any]] = []
        self.blocks: dict[int, dict[str, Any]] = {}
        self.mapped = 0
        self.clock_us = 1_000_000
        self._next = (device + 1) << 40

    def record(self, action: str, **fields: Any) -> None:
        self.clock_us += 10
        event = {"action": action, "stream": 0, "time_us": self.clock_us, "frames": []}
        self.events.append(event | fields)

    def segment(self, size: int, action: str = "segment_alloc") -> None:
        self.mapped += size if action in ("segment_alloc", "segment_map") else -size
        self.record(action, addr=(self.device + 1) << 40, size=size)

    def alloc(
        self,
        size: int,
        *frames: dict[str, Any],
        stream: int = 0,
        metadata: str | None = None,
    ) -> int:
        address, self._next = self._next, self._next + -(-size // 512) * 512
        more = {} if metadata is None else {"user_metadata": metadata}
        self.record("alloc", addr=address, size=size, stream=stream, frames=list(frames), **more)
        self.blocks[address] = {"requested_size": size, "state": "active_allocated", "stream": stream}
        return address

    def request(self, address: int) -> None:
        block = self.blocks[address]
        self.record("free_requested", addr=address, size=block["requested_size"], stream=block["stream"])
        block["state"] = "active_pending_free"

    def complete(self, address: int) -> None:
        block = self.blocks.pop(address)
        self.record("free_completed", addr=address, size=block["requested_size"], stream=block["stream"])

    def free(self, address: int) -> None:
        self.request(address)
        self.complete(address)

    def segments(self) -> list[dict[str, Any]]:
        blocks = [
            {
                "address": address,
                "size": -(-block["requested_size"] // 512) * 512,
                "requested_size": block["requested_size"],
                "state": block["state"],
                "frames": [],
            }
            for address, block in self.blocks.items()
        ]
        if not (blocks or self.mapped):
            return []
        allocated = sum(b["size"] for b in blocks if b["state"] == "active_allocated")
        return [
            {
                "device": self.device,
                "address": (self.device + 1) << 40,
                "total_size": self.mapped,
                "allocated_size": allocated,
                "active_size": sum(b["size"] for b in blocks),
                "requested_size": sum(b["requested_size"] for b in blocks),
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": self.expandable,
                "frames": [],
                "blocks": blocks,
            }
        ]


def snapshot_of(*allocators: Allocator, annotations: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    traces: list[list[dict[str, Any]]] = [[] for _ in range(1 + max((a.device for a in allocators), default=0))]
    for allocator in allocators:
        traces[allocator.device] = list(allocator.events)
    return {
        "segments": [segment for allocator in allocators for segment in allocator.segments()],
        "device_traces": traces,
        "external_annotations": annotations or [],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""},
    }


def write(path: Path, content: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


def random_allocator(seed: int, events: int = 400, device: int = 0) -> Allocator:
    """A random history: immediate frees, frees that wait for a stream, segments that come and go."""
    rng = random.Random(seed)
    allocator = Allocator(device)
    pending: list[int] = []
    for _ in range(events):
        live = [address for address, block in allocator.blocks.items() if block["state"] == "active_allocated"]
        choice = rng.random()
        if choice < 0.5 or not live:
            size = rng.choice([512, 4096, 1_000_001, 64 * MIB])
            site = frame(rng.choice(["forward", "all_gather", "other"]), line=rng.randrange(3))
            allocator.alloc(size, site, stream=rng.choice([0, 0, 7]))
        elif choice < 0.7:
            allocator.free(rng.choice(live))
        elif choice < 0.85:
            address = rng.choice(live)
            allocator.request(address)
            pending.append(address)
        elif choice < 0.95 and pending:
            allocator.complete(pending.pop(rng.randrange(len(pending))))
        elif choice < 0.97 or allocator.mapped == 0:
            allocator.segment(128 * MIB)
        else:
            allocator.segment(64 * MIB, "segment_unmap")
    return allocator
