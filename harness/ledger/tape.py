"""What is allocated when: named lines in closed form, their sum over the instants of a step, and the peak.

A `Storage` gives its bytes back when the last reference to it goes (CPython counts references, as torch counts those
of its storages), so code that holds its tensors as the trainer holds them has the trainer's lifetimes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from harness.ledger.sizes import Size, as_formula


@dataclass(slots=True)
class Instant:
    """A named stretch of the step: the most bytes alive in it, and how they divide."""

    name: str
    bytes: int
    categories: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Line:
    """The largest sum that one category reached on its own, and its formula."""

    category: str
    bytes: int
    formula: str


class Storage:
    """Bytes on a tape until `free` is called or nobody refers to them."""

    __slots__ = ("category", "rounded", "size", "tape")

    def __init__(self, tape: Tape, category: str, size: Size, rounded: int) -> None:
        self.tape, self.category, self.size, self.rounded = tape, category, size, rounded

    def free(self) -> None:
        """Gives the bytes back now, whoever still refers to them (torch's `untyped_storage().resize_(0)`)."""
        if self.rounded:
            self.tape.forget(self)
            self.rounded = 0

    def __del__(self) -> None:
        self.free()


ROUNDING = "allocator rounding"
OWN_SEGMENT_BYTES, SEGMENT_MULTIPLE_BYTES, UNSPLIT_BYTES = 10 << 20, 2 << 20, 1 << 20
"""c10/cuda/CUDACachingAllocator.cpp kMinLargeAlloc, kRoundLarge, and kSmallSize as `should_split` has it."""


class Tape:
    """`granule`: the allocator rounds every block up to a multiple of it (CUDA 512 bytes, CPU 1)."""

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.total = 0
        self.bytes_of: Counter[str] = Counter()
        self.terms_of: dict[str, Counter[str]] = {}
        self.start_step()

    def start_step(self) -> None:
        """Forgets instants and peaks, not what is alive."""
        self.instants: list[Instant] = []
        self.now: Instant | None = None
        self.largest = {category: (size, dict(self.terms_of[category])) for category, size in self.bytes_of.items()}

    def instant(self, name: str) -> None:
        """What follows belongs to `name`."""
        self.now = Instant(name, self.total, dict(self.bytes_of))
        self.instants.append(self.now)

    def resume(self, instant: Instant) -> None:
        """What follows belongs to `instant` again, which others had interrupted."""
        self.now = instant

    def allocate(self, category: str, size: Size, *, remainder: int = 0) -> Storage:
        """remainder: bytes that the allocator hands out with it (`unsplit`)."""
        rounded = self._rounded(size.bytes) + remainder
        self._add(category, size.coefficient, size.monomial, size.bytes)
        if rounded != size.bytes:
            self._round(rounded - size.bytes)
        if self.now is not None and self.total > self.now.bytes:
            self.now.bytes, self.now.categories = self.total, dict(self.bytes_of)
        return Storage(self, category, size, rounded)

    def forget(self, storage: Storage) -> None:
        size = storage.size
        self._add(storage.category, -size.coefficient, size.monomial, -size.bytes)
        if storage.rounded != size.bytes:
            self._round(size.bytes - storage.rounded)

    def unsplit(self, size: int) -> int:
        """What remains of a segment that the CUDA allocator makes for `size` bytes and does not split off: 0 to 1 MiB.

        That is certain of what never meets a larger free block of its stream: elsewhere that one is split instead.
        """
        block = self._rounded(size)
        remainder = -block % SEGMENT_MULTIPLE_BYTES
        is_kept = self.granule > 1 and block >= OWN_SEGMENT_BYTES and remainder <= UNSPLIT_BYTES
        return remainder if is_kept else 0

    def _rounded(self, size: int) -> int:
        return -(-size // self.granule) * self.granule

    def _round(self, size: int) -> None:
        self._add(ROUNDING, size, f"B: blocks of multiples of {self.granule} B, some with the rest of a segment", size)

    def _add(self, category: str, coefficient: int, monomial: str, size: int) -> None:
        self.total += size
        self.bytes_of[category] += size
        terms = self.terms_of.setdefault(category, Counter())
        terms[monomial] += coefficient
        if self.bytes_of[category] > self.largest.get(category, (0, {}))[0]:
            self.largest[category] = self.bytes_of[category], dict(terms)

    def peak(self) -> Instant:
        return max(self.instants, key=lambda instant: instant.bytes)

    def lines(self) -> list[Line]:
        """Every category that held bytes in this step, largest first."""
        found = [Line(name, size, as_formula(terms)) for name, (size, terms) in self.largest.items() if size]
        return sorted(found, key=lambda line: -line.bytes)
