"""What is allocated when: named lines in closed form, their sum over the instants of a step, and the peak.

A `Storage` gives its bytes back when the last reference to it goes (CPython counts references, as torch counts those
of its storages), so code that holds its tensors as the trainer holds them has the trainer's lifetimes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.allocator import Allocator, Block
from harness.ledger.sizes import Size, as_formula

COMPUTE, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = range(4)
"""Streams: that on which an allocation is made has the pool that serves it and takes it back. The last three are
FSDP2's (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py:FSDPCommContext; all-gather: its copy-in stream), and
every root has its own (`of_root`)."""
STREAMS = ("compute", "all-gather", "reduce-scatter", "all-reduce")


def of_root(root: int, stream: int) -> int:
    """The stream of one of several FSDP2 roots; they have the compute stream in common."""
    return stream + root * ALL_REDUCE if stream else stream


def stream_name(stream: int) -> str:
    return STREAMS[(stream - 1) % ALL_REDUCE + 1] if stream else STREAMS[COMPUTE]


@dataclass(slots=True)
class Instant:
    """A named stretch of the step: the most bytes alive in it, and how they divide."""

    name: str
    bytes: int
    categories: dict[str, int] = field(default_factory=dict)
    streams: dict[int, int] = field(default_factory=dict)
    """Those of the blocks of each stream."""


@dataclass(slots=True)
class Line:
    """The largest sum that one category reached on its own, and its formula."""

    category: str
    bytes: int
    formula: str


class Storage:
    """Bytes on a tape until `free` is called or nobody refers to them; on GPUs blocks of the allocator."""

    __slots__ = ("blocks", "category", "is_alive", "rounded", "size", "stream", "tape")

    def __init__(
        self, tape: Tape, category: str, size: Size, rounded: int, stream: int, blocks: Sequence[Block]
    ) -> None:
        self.tape, self.category, self.size, self.rounded = tape, category, size, rounded
        self.stream, self.blocks = stream, blocks
        self.is_alive = True

    def free(self) -> None:
        """Gives the bytes back now, whoever still refers to them (torch's `untyped_storage().resize_(0)`)."""
        if self.is_alive:
            self.is_alive = False
            self.tape.forget(self)

    def __del__(self) -> None:
        self.free()


ROUNDING, ROUNDED = "allocator rounding", "B: blocks of multiples of 512 B, some with the rest of a segment"


class Tape:
    """`allocator`: the one that CUDA allocations go through; without it (CPUs) a block is as large as was asked for."""

    def __init__(self, allocator: Allocator | None = None) -> None:
        self.allocator = allocator
        self.total = 0
        self.in_stream: Counter[int] = Counter()
        self.bytes_of: Counter[str] = Counter()
        self.terms_of: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.start_step()

    @property
    def reserved_bytes(self) -> int:
        return 0 if self.allocator is None else self.allocator.reserved_bytes

    def start_step(self) -> None:
        """Forgets instants and peaks, not what is alive."""
        self.instants: list[Instant] = []
        self.now: Instant | None = None
        self.is_highest = False
        """What is alive is the most of this instant so far, and not noted yet."""
        self.most: dict[str, tuple[int, dict[str, int]]] = {}
        """The most of each category and its terms, noted when it shrinks."""

    def instant(self, name: str) -> None:
        """What follows belongs to `name`."""
        self._note_instant()
        self.now = Instant(name, self.total, dict(self.bytes_of), dict(self.in_stream))
        self.instants.append(self.now)

    def resume(self, instant: Instant) -> None:
        """What follows belongs to `instant` again, which others had interrupted."""
        self._note_instant()
        self.now = instant

    def allocate(
        self, category: str, size: Size, *, stream: int = COMPUTE, parts: Sequence[int] | None = None
    ) -> Storage:
        """parts: the bytes of each tensor, where `size` is the sum of several that come and go together; none for what
        is inside of another storage's block."""
        blocks: Sequence[Block] = ()
        rounded = size.bytes
        if self.allocator is not None and rounded:
            malloc = self.allocator.malloc
            blocks = [malloc(part, stream) for part in ((rounded,) if parts is None else parts) if part]
            rounded = sum(block.size for block in blocks)
        self._add(category, size.coefficient, size.monomial, size.bytes)
        if rounded != size.bytes:
            self._add(ROUNDING, rounded - size.bytes, ROUNDED, rounded - size.bytes)
        self.total += rounded
        self.in_stream[stream] += rounded
        if self.now is not None and self.total > self.now.bytes:
            self.now.bytes = self.total
            self.is_highest = True
        return Storage(self, category, size, rounded, stream, blocks)

    def forget(self, storage: Storage) -> None:
        self._note_instant()
        size = storage.size
        self._note_category(storage.category)
        self._add(storage.category, -size.coefficient, size.monomial, -size.bytes)
        if storage.rounded != size.bytes:
            self._note_category(ROUNDING)
            self._add(ROUNDING, size.bytes - storage.rounded, ROUNDED, size.bytes - storage.rounded)
        self.total -= storage.rounded
        self.in_stream[storage.stream] -= storage.rounded
        for block in storage.blocks:
            assert self.allocator is not None
            self.allocator.free(block)

    def _add(self, category: str, coefficient: int, monomial: str, size: int) -> None:
        self.bytes_of[category] += size
        self.terms_of[category][monomial] += coefficient

    def _note_instant(self) -> None:
        if self.is_highest and self.now is not None:
            self.now.categories, self.now.streams = dict(self.bytes_of), dict(self.in_stream)
            self.is_highest = False

    def _note_category(self, category: str) -> None:
        size = self.bytes_of[category]
        if category not in self.most or size > self.most[category][0]:
            self.most[category] = size, dict(self.terms_of[category])

    def peak(self) -> Instant:
        self._note_instant()
        return max(self.instants, key=lambda instant: instant.bytes)

    def lines(self) -> list[Line]:
        """Every category that held bytes in this step, largest first."""
        for category in self.bytes_of:
            self._note_category(category)
        found = [Line(name, size, as_formula(terms)) for name, (size, terms) in self.most.items() if size]
        return sorted(found, key=lambda line: -line.bytes)


class WeightlessTape(Tape):
    """Of a replay that is about time alone: it knows where the step is, and counts no bytes."""

    def instant(self, name: str) -> None:
        self.now = Instant(name, 0)

    def allocate(
        self, category: str, size: Size, *, stream: int = COMPUTE, parts: Sequence[int] | None = None
    ) -> Storage:
        return Storage(self, category, size, 0, stream, ())

    def forget(self, storage: Storage) -> None:
        pass
