"""What the CUDA caching allocator takes from the driver for a run: the tape's allocations, put through its model.

Blocks come from the pool of the stream that they were allocated on, and what is free there serves no other stream. So
what is reserved is decided by the order in which blocks come and go from the first parameter on. It stops growing after
a few steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from harness.config import Trainer
from harness.ledger.tape import Tape, stream_name

STEPS, GROWS = 5, 1.001
"""Steps replayed at most, until one reserves next to nothing more: by this factor. H200s took two or three."""
UNLIMITED = (
    "reserved bytes: predicted without a memory limit, so per_process_memory_fraction and garbage_collection_threshold "
    "change nothing (meshscope whatif --limit-gib replays a recording under one)"
)
GROWING = f"reserved bytes still grow after {STEPS} steps, and are those after {STEPS}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPool:
    """What is reserved for allocations on one stream (of a pipeline those of this kind of all stages), and how much of
    it is free when most is allocated in a step."""

    stream: str
    reserved_bytes: int
    unused_at_peak_bytes: int


def pools(tape: Tape) -> list[StreamPool]:
    """Those of a replayed step, largest first; none without an allocator."""
    if tape.allocator is None:
        return []
    reserved: Counter[str] = Counter()
    unused: Counter[str] = Counter()
    for segment in tape.allocator.segments():
        reserved[stream_name(segment.stream)] += segment.size
    for stream, allocated in tape.peak().streams.items():
        unused[stream_name(stream)] -= allocated
    unused += reserved
    return [
        StreamPool(stream=stream, reserved_bytes=size, unused_at_peak_bytes=unused[stream])
        for stream, size in reserved.most_common()
    ]


def not_predicted(config: Trainer.Config) -> str | None:
    """Why reserved bytes are not predicted for a configuration on GPUs, if so."""
    compiled = config.compile
    if compiled.blocks or (compiled.loss and compiled.backend == "inductor"):
        return "the buffers of compiled kernels, their order and their pools are inductor's to choose"
    if config.float8.recipe != "none":
        return "what float8 products allocate on GPUs besides their results was not measured"
    if config.training.collective_memory == "record_stream":
        return "when blocks marked by record_stream can be reused is a matter of time"
    return None
