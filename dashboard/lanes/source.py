"""Lane indexes on disk, and which of them can be drawn on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from dashboard import store
from dashboard.lanes.detail import LaneIndex
from dashboard.lanes.picture import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What has to be known of every capture, shown or not; times in unix ns."""

    folder: str
    file: str
    rank: int | None
    iteration: int | None
    start_ns: int
    end_ns: int
    base_ns: int
    dimensions: tuple[str, ...]
    steps: tuple[int, ...]
    units: tuple[str, ...]
    source: str
    empty: bool


@st.cache_resource(max_entries=2048, show_spinner=False)
def head_of(folder: str) -> Head:
    values = store.load(Path(folder)).values
    devices = values["devices"]
    return Head(
        folder=folder,
        file=values["file"],
        rank=values["rank"],
        iteration=values["iteration"],
        start_ns=values["start_ns"],
        end_ns=values["end_ns"],
        base_ns=values["base_ns"],
        dimensions=tuple(sorted({one["dimension"] for d in devices for one in d["classes"] if one["dimension"]})),
        steps=tuple(dict.fromkeys(step["step"] for device in devices for step in device["steps"])),
        units=tuple(dict.fromkeys(unit for device in devices for unit, _ in device["units"])),
        source=devices[0]["source"] if devices else "device",
        empty=values["end_ns"] <= values["start_ns"],
    )


@st.cache_resource(max_entries=64, show_spinner=False)
def index_of(folder: str) -> LaneIndex:
    """An index with its columns as memory maps; each keeps a few files open."""
    return LaneIndex(store.load(Path(folder)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Captures of one time, one of each rank. `common_clock` is False where their times do not meet, so that each is
    drawn from its own start."""

    label: str
    heads: tuple[Head, ...]

    @property
    def common_clock(self) -> bool:
        return max(head.start_ns for head in self.heads) < min(head.end_ns for head in self.heads)

    @property
    def origin_ns(self) -> int:
        return min(head.start_ns for head in self.heads)

    @property
    def extent_ns(self) -> int:
        if self.common_clock:
            return max(head.end_ns for head in self.heads) - self.origin_ns
        return max(head.end_ns - head.start_ns for head in self.heads)

    def offset_ns(self, head: Head) -> int:
        """What turns the times of a capture's events into those of the axis."""
        return head.base_ns - (self.origin_ns if self.common_clock else head.start_ns)

    @property
    def steps(self) -> list[int]:
        return sorted({step for head in self.heads for step in head.steps})

    @property
    def dimensions(self) -> list[str]:
        return sorted({name for head in self.heads for name in head.dimensions})

    @property
    def units(self) -> list[str]:
        return list(dict.fromkeys(name for head in self.heads for name in head.units))


def moments_of(heads: Sequence[Head]) -> list[Moment]:
    """Captures that belong together: of one iteration, and where a rank has several in it, its first with the others'
    first and so on. A capture without any event is in none."""
    groups: dict[tuple[int, int], list[Head]] = {}
    seen: dict[tuple[int, int | str], int] = {}
    for head in sorted(heads, key=lambda head: (head.rank is None, head.rank or 0, head.start_ns)):
        if head.empty:
            continue
        iteration = -1 if head.iteration is None else head.iteration
        who = head.file if head.rank is None else head.rank
        place = seen.get((iteration, who), 0)
        seen[iteration, who] = place + 1
        groups.setdefault((iteration, place), []).append(head)
    several = len({place for _, place in groups}) > 1
    return [
        Moment(label=_label(iteration, place, members, several=several), heads=tuple(members))
        for (iteration, place), members in sorted(groups.items())
    ]


def _label(iteration: int, place: int, members: Sequence[Head], *, several: bool) -> str:
    named = "traces" if iteration < 0 else f"iteration {iteration}"
    if not several:
        return named
    return f"{named}: {Path(members[0].file).name}" if len(members) == 1 else f"{named}, capture {place + 1}"


def name_of(head: Head) -> str:
    return Path(head.file).name if head.rank is None else f"rank {head.rank}"


def shown_of(moment: Moment, ranks: Sequence[int | None]) -> list[Shown]:
    """The devices of these ranks."""
    found = []
    for head in moment.heads:
        if head.rank not in ranks:
            continue
        index = index_of(head.folder)
        for device in index.devices:
            several = f" device {device['device']}" if len(index.devices) > 1 else ""
            group = f"{name_of(head)}{several}"
            found.append(Shown(index=index, device=device, group=group, offset_ns=moment.offset_ns(head)))
    return found
