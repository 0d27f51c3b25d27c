"""The caching allocator once more, as plain as its rules can be written: everything is searched anew each time."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.allocator import Settings
from harness.allocator.expandable import address_space
from harness.allocator.settings import MIB


class NaiveOutOfMemoryError(Exception):
    pass


@dataclass(eq=False)
class Chunk:
    address: int
    size: int
    state: str  # free, used, pending, unmapped
    born: int = 0  # when it became free, in searches of its pool


@dataclass(eq=False)
class Region:
    stream: int
    small: bool
    page: int  # 0: one cudaMalloc
    chunks: list[Chunk] = field(default_factory=list)

    def tidy(self, searches: int) -> None:
        """Joins neighbours that are both free or both unmapped; what was joined is young again."""
        chunks: list[Chunk] = []
        for chunk in self.chunks:
            if chunks and chunk.state in ("free", "unmapped") and chunks[-1].state == chunk.state:
                chunks[-1] = Chunk(chunks[-1].address, chunks[-1].size + chunk.size, chunk.state, searches)
            else:
                chunks.append(chunk)
        self.chunks = chunks

    def after(self, chunk: Chunk) -> Chunk | None:
        at = self.chunks.index(chunk) + 1
        return self.chunks[at] if at < len(self.chunks) else None


class Naive:
    def __init__(self, settings: Settings, limit: int | None) -> None:
        self.settings, self.limit = settings, limit
        self.regions: list[Region] = []
        self.lowest = 1 << 47
        self.searches = {True: 0, False: 0}

    @property
    def reserved(self) -> int:
        return sum(chunk.size for region in self.regions for chunk in region.chunks if chunk.state != "unmapped")

    def rounded(self, size: int) -> int:
        if size < 512:
            return 512
        interval = max(0, min(15, size.bit_length() - 1 - 20))
        divisions = self.settings.roundup_power2_divisions[interval]
        if divisions > 1 and size > 512 * divisions:
            floor = 1 << (size.bit_length() - 1)
            return next(
                floor + floor * k // divisions for k in range(divisions + 1) if floor + floor * k // divisions >= size
            )
        return (size + 511) // 512 * 512

    def malloc(self, size: int, stream: int) -> Chunk:
        size = self.rounded(size)
        small = size <= MIB
        if self.limit is not None and self.settings.garbage_collection_threshold:
            self.searches[small] += 1
        found = self.best(size, stream, small) or self.more(size, stream, small)
        region, chunk = found
        rest = chunk.size - size
        bound = self.settings.max_split_size_bytes
        if small or self.settings.expandable_segments:
            split = rest >= 512
        else:
            split = rest > MIB and (bound is None or size < bound)
        at = region.chunks.index(chunk)
        taken = Chunk(chunk.address, size if split else chunk.size, "used")
        rests = [Chunk(chunk.address + size, rest, "free", self.searches[small])] if split else []
        region.chunks[at : at + 1] = [taken, *rests]
        return taken

    def best(self, size: int, stream: int, small: bool) -> tuple[Region, Chunk] | None:
        found = sorted(
            ((c.size, c.address, r, c) for r, c in self.all_free(small) if r.stream == stream and c.size >= size),
            key=lambda item: item[:2],
        )
        if not found:
            return None

        def growable(item: tuple[int, int, Region, Chunk]) -> int:
            following = item[2].after(item[3])
            return item[0] + (following.size if following and following.state == "unmapped" else 0)

        if self.settings.expandable_segments:
            while len(found) > 1 and found[0][2].page and growable(found[1]) < growable(found[0]):
                del found[0]
        chosen = found[0]
        bound = self.settings.max_split_size_bytes
        if bound is not None:
            if size < bound <= chosen[0]:
                return None
            if size >= bound and chosen[0] >= size + self.settings.max_non_split_rounding_bytes:
                return None
        return chosen[2], chosen[3]

    def all_free(self, small: bool) -> list[tuple[Region, Chunk]]:
        return [(r, c) for r in self.regions if r.small == small for c in r.chunks if c.state == "free"]

    def more(self, size: int, stream: int, small: bool) -> tuple[Region, Chunk]:
        self.collect()
        found = self.ask(size, stream, small)
        if found is None and self.give_oversize(size, stream, small):
            found = self.ask(size, stream, small)
        if found is None:
            self.empty()
            found = self.ask(size, stream, small)
        if found is None:
            raise NaiveOutOfMemoryError
        return found

    def ask(self, size: int, stream: int, small: bool) -> tuple[Region, Chunk] | None:
        segment = 2 * MIB if small else self.settings.large_segment_bytes
        if size >= 10 * MIB:
            segment = (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        if self.limit is not None and self.reserved + segment > self.limit:
            return None
        if self.settings.expandable_segments:
            return self.grow(size, stream, small)
        region = Region(stream, small, 0, [Chunk(self.address(segment), segment, "free")])
        self.regions.append(region)
        return region, region.chunks[0]

    def address(self, size: int) -> int:
        self.lowest -= (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        return self.lowest

    def grow(self, size: int, stream: int, small: bool) -> tuple[Region, Chunk]:
        """Unmapped pages that, with free space around them, make room at the lowest address, are mapped one by one."""
        page = 2 * MIB if small else self.settings.large_segment_bytes
        for region in sorted(self.regions, key=lambda r: r.chunks[0].address):
            if (region.stream, region.small, bool(region.page)) != (stream, small, True):
                continue
            for at, chunk in enumerate(region.chunks):
                if chunk.state != "unmapped":
                    continue
                first = at - (at > 0 and region.chunks[at - 1].state == "free")
                room, last = 0, first
                while last < len(region.chunks) and region.chunks[last].state in ("free", "unmapped") and room < size:
                    room += region.chunks[last].size
                    last += 1
                if room >= size:
                    return self.map(region, region.chunks[first].address, size)
        space = address_space(page)
        region = Region(stream, small, page, [Chunk(self.address(space), space, "unmapped")])
        self.regions.append(region)
        return self.map(region, region.chunks[0].address, size)

    def map(self, region: Region, start: int, size: int) -> tuple[Region, Chunk]:
        while True:
            [chunk] = [c for c in region.chunks if c.address <= start < c.address + c.size]
            if chunk.state == "free" and chunk.size >= size:
                return region, chunk
            unmapped = chunk if chunk.state == "unmapped" else region.after(chunk)
            assert unmapped is not None
            at = region.chunks.index(unmapped)
            mapped = Chunk(unmapped.address, region.page, "free")
            rest = Chunk(unmapped.address + region.page, unmapped.size - region.page, "unmapped")
            region.chunks[at : at + 1] = [mapped, rest] if rest.size else [mapped]
            region.tidy(self.searches[region.small])

    def free(self, chunk: Chunk) -> None:
        [region] = [region for region in self.regions if chunk in region.chunks]
        chunk.state, chunk.born = "free", self.searches[region.small]
        region.tidy(self.searches[region.small])

    def empty(self) -> None:
        for region in list(self.regions):
            for chunk in region.chunks:
                if chunk.state == "pending":
                    self.free(chunk)
        for region in list(self.regions):
            if not region.page and [chunk.state for chunk in region.chunks] == ["free"]:
                self.regions.remove(region)
            elif region.page:
                self.unmap(region)

    def unmap(self, region: Region) -> None:
        base, page = region.chunks[0].address, region.page
        chunks = []
        for chunk in region.chunks:
            first = base + (chunk.address - base + page - 1) // page * page
            last = base + (chunk.address + chunk.size - base) // page * page
            if chunk.state != "free" or first >= last:
                chunks.append(chunk)
                continue
            now, end = self.searches[region.small], chunk.address + chunk.size
            parts = [(chunk.address, first, "free"), (first, last, "unmapped"), (last, end, "free")]
            chunks += [Chunk(a, b - a, state, now) for a, b, state in parts if b > a]
        region.chunks = chunks
        region.tidy(self.searches[region.small])
        if len(region.chunks) == 1 and region.chunks[0].state == "unmapped":
            self.regions.remove(region)

    def collect(self) -> None:
        threshold = self.settings.garbage_collection_threshold
        if self.limit is None or not threshold:
            return
        excess = self.reserved - int(threshold * self.limit)
        while excess > 0:
            whole = [r for r, c in self.all_free(False) if len(r.chunks) == 1]
            if not whole:
                return
            ages = {id(r): self.searches[False] - r.chunks[0].born for r in whole}
            mean = sum(ages.values()) / len(ages)
            for region in whole:
                if ages[id(region)] >= mean:
                    excess -= region.chunks[0].size
                    self.regions.remove(region)

    def give_oversize(self, size: int, stream: int, small: bool) -> bool:
        bound = self.settings.max_split_size_bytes
        if bound is None:
            return False
        wanted = max(size, bound)
        own = sorted(
            ((c.size, c.address, r) for r, c in self.all_free(small) if r.stream == stream), key=lambda i: i[:2]
        )
        enough = [item for item in own if item[0] >= wanted]
        given = 0
        for released, _, region in enough[:1] or own[::-1]:
            if given >= wanted or released < bound:
                break
            given += released
            self.regions.remove(region)
        return given >= wanted
