"""Random programs on the allocator model, recorded as torch records: a snapshot with a history from the very start."""

from __future__ import annotations

import random
from typing import Any

from harness.allocator import Allocator, Block, Driver, OutOfMemoryError
from harness.allocator.conf import parse_conf

MIB = 1 << 20
SIZES = (700, 300_000, 3 * MIB + 5, 17 * MIB, 30 * MIB, 64 * MIB)


class RecordingDriver(Driver):
    def __init__(self, events: list[dict[str, Any]], frames: list[dict[str, Any]]) -> None:
        super().__init__(1 << 60)
        self.events, self.frames = events, frames

    def call(self, action: str, address: int, size: int, stream: int) -> None:
        event = {"action": action, "addr": address, "size": size, "stream": stream, "frames": list(self.frames)}
        self.events.append(event)

    def malloc(self, size: int, stream: int) -> int:
        address = super().malloc(size, stream)
        self.call("segment_alloc", address, size, stream)
        return address

    def free(self, address: int, size: int, stream: int) -> None:
        super().free(address, size, stream)
        self.call("segment_free", address, size, stream)

    def map(self, address: int, size: int, stream: int) -> None:
        super().map(address, size, stream)
        self.call("segment_map", address, size, stream)

    def unmap(self, address: int, size: int, stream: int) -> None:
        super().unmap(address, size, stream)
        self.call("segment_unmap", address, size, stream)


class Program:
    """What a process does with memory, one method a thing; `snapshot()` at any time."""

    def __init__(self, conf: str = "", limit_bytes: int | None = None) -> None:
        self.conf = conf
        self.events: list[dict[str, Any]] = []
        self._frames: list[dict[str, Any]] = []
        self.allocator = Allocator(parse_conf(conf), limit_bytes, RecordingDriver(self.events, self._frames))
        self.pending: list[Block] = []

    def alloc(self, size: int, stream: int = 0, line: int = 7) -> Block:
        frames = [{"name": "forward", "filename": "/home/me/train.py", "line": line}]
        try:
            block = self.allocator.malloc(size, stream)
        except OutOfMemoryError:
            self.events.append({"action": "oom", "device_free": 0, "size": size, "stream": stream, "frames": frames})
            raise
        self.record("alloc", block, frames)
        return block

    def record(self, action: str, block: Block, frames: list[dict[str, Any]] | None = None) -> None:
        event = {"action": action, "addr": block.address, "size": block.requested_bytes, "stream": block.stream}
        self.events.append({**event, "frames": frames or []})

    def free(self, block: Block, *, pending: bool = False) -> None:
        self.record("free_requested", block)
        self.allocator.request_free(block)
        if pending:
            self.pending.append(block)
        else:
            self.complete(block)

    def complete(self, block: Block) -> None:
        self.record("free_completed", block)
        self.allocator.complete_free(block)

    def empty_cache(self) -> None:
        for block in self.pending:
            self.complete(block)
        self.pending.clear()
        self._frames.append({"name": "empty_cache", "filename": "torch/cuda/memory.py", "line": 1})
        self.allocator.empty_cache()
        self._frames.clear()

    def snapshot(self, skip: int = 0) -> dict[str, Any]:
        """As torch writes it, without the first `skip` events."""
        segments = []
        for segment in self.allocator.segments():
            blocks = [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested_bytes,
                    "state": "active_allocated"
                    if block.allocated
                    else "active_pending_free"
                    if block.pending
                    else "inactive",
                    "frames": [],
                }
                for block in segment.blocks
            ]
            segments.append(
                {
                    "device": 0,
                    "address": segment.address,
                    "total_size": segment.size,
                    "stream": segment.stream,
                    "segment_type": "small" if segment.pool.small else "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": segment.blocks[0].expandable is not None,
                    "blocks": blocks,
                }
            )
        settings = {"PYTORCH_CUDA_ALLOC_CONF": self.conf}
        return {"segments": segments, "device_traces": [self.events[skip:]], "allocator_settings": settings}


def random_program(seed: int, conf: str, turns: int = 250) -> Program:
    """Requests on two streams, frees at once or waiting for a stream, now and then an emptied cache."""
    rng = random.Random(seed)
    program = Program(conf)
    live: list[Block] = []
    for turn in range(turns):
        choice = rng.random()
        if choice < 0.5 or not live:
            live.append(program.alloc(rng.choice(SIZES) + rng.randrange(3000), rng.choice([0, 0, 5]), turn))
        elif choice < 0.85:
            program.free(live.pop(rng.randrange(len(live))))
        elif choice < 0.93:
            program.free(live.pop(rng.randrange(len(live))), pending=True)
        elif choice < 0.98 and program.pending:
            program.complete(program.pending.pop(0))
        elif choice > 0.99:
            program.empty_cache()
    return program
