"""One view of a timeline: the bytes that the browser draws, and the same figures as a table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from dashboard.lanes import payload
from dashboard.lanes.detail import Events, Lane, LaneIndex, Layout, columns_of, edges_of, exact_lanes
from dashboard.lanes.looks import EXPOSED, LEVELS, dimensions_of, full_name, look, short_name
from dashboard.lanes.strip import Curves
from harness.report.figures import unit_of
from harness.text import size
from harness.trace.intervals import Ns

COLUMN_BYTES = 450_000
"""What columns may take of a picture; with more lanes there are fewer of them, and a pixel's share stays true."""
NAME_LETTERS = 100_000
MOST_COLUMNS = 3000
FEWEST_COLUMNS = 160
MARGIN = 0.25
"""Of the view, on both sides: what is there already while the view moves."""

Arrange = Literal["rank", "lane"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A device in a picture: its time plus `offset_ns` is the picture's, which begins at 0."""

    index: LaneIndex
    device: dict[str, Any]
    group: str
    offset_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Strip:
    """Memory of a device; `marks` are (time, bytes, words) in its own time, `pending_marks` those of the pending band.
    `height` in pixels; `top_bytes` is what the scale reaches at least, to be the same in several strips."""

    label: str
    group: str
    curves: Curves
    offset_ns: int
    height: int = 110
    top_bytes: int = 0
    marks: Sequence[tuple[int, int, str]] = ()
    pending_marks: Sequence[tuple[int, int, str]] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What is asked for: [start, end) in ns of the picture, within [0, extent), on `width` pixels. A new `view_id`
    makes the browser go there; with the same it keeps where it is."""

    start_ns: int
    end_ns: int
    extent_ns: int
    width: int
    view_id: str
    axis: Literal["time", "event"] = "time"

    def window(self) -> tuple[int, int]:
        """The view with a margin."""
        margin = int((self.end_ns - self.start_ns) * MARGIN)
        return max(0, self.start_ns - margin), min(self.extent_ns, self.end_ns + margin)


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A step or phase over the rows of a group."""

    group: str
    label: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """`data` is for the component; `table` has one item per lane with the figures of the view, in ns; `events` were in
    the window, `single` of them are in `data` one by one."""

    data: bytes
    table: list[dict[str, Any]]
    events: int
    single: int
    columns: int


@dataclass(slots=True)
class _Tables:
    """What rows refer to by number."""

    classes: dict[tuple[str, str | None, str | None], int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)

    def number(self, table: dict[Any, int], key: Any) -> int:
        return table.setdefault(key, len(table))


@dataclass(frozen=True, slots=True)
class _Row:
    shown: Shown
    lane: Lane
    count: int

    @property
    def id(self) -> str:
        return row_id(self.shown, self.lane.label)


def row_id(shown: Shown, label: str) -> str:
    return f"{shown.group}|{label}"


def picture(
    shown: Sequence[Shown],
    view: View,
    *,
    layout: Layout = "kind",
    arrange: Arrange = "rank",
    dimensions: Collection[str] | None = None,
    strips: Sequence[Strip] = (),
    bands: Sequence[Band] = (),
    mark: Mapping[str, Any] | None = None,
) -> Picture:
    """The view of these devices, lanes by `layout`, one device's after the other's or the same lane of all together."""
    low, high = view.window()
    rows = [
        _Row(one, lane, one.index.count(lane, low - one.offset_ns, high - one.offset_ns))
        for one in shown
        for lane in one.index.lanes(one.device, layout, dimensions)
    ]
    if arrange == "lane":
        order = {label: place for place, label in enumerate(dict.fromkeys(row.lane.label for row in rows))}
        rows.sort(key=lambda row: order[row.lane.label])
    exact = exact_lanes([row.count for row in rows])
    lines = max(1, len(rows) + 4 * len(strips))
    wanted = round(view.width * (high - low) / max(1, view.end_ns - view.start_ns))
    columns = max(FEWEST_COLUMNS, min(wanted, MOST_COLUMNS, COLUMN_BYTES // (6 * lines)))
    edges = edges_of(low, high, columns)
    arrays, tables = payload.Arrays(), _Tables()
    all_dimensions = dimensions_of([one.device for one in shown])
    height = 16 if len(rows) <= 30 else 12 if len(rows) <= 64 else 9
    drawn = [
        _row(row, edges, arrange=arrange, exact=is_exact, height=height, arrays=arrays, tables=tables)
        for row, is_exact in zip(rows, exact, strict=True)
    ]
    memory = [_strip(strip, edges, arrays) for strip in strips]
    classes = [
        {"label": _class_label(*key), "role": key[0], "kind": key[1], "dimension": key[2], **look(*key, all_dimensions)}
        for key in tables.classes
    ]
    header = {
        "view": [view.start_ns, view.end_ns],
        "view_id": view.view_id,
        "window": [low, high],
        "extent": [0, view.extent_ns],
        "width": view.width,
        "axis": view.axis,
        "rows": drawn,
        "memory": memory,
        "classes": classes,
        "names": fitting(list(tables.names)),
        "units": fitting(list(tables.units)),
        "steps": [_band(band, place) for place, band in enumerate(bands)],
        "red": EXPOSED,
        "mark": mark,
        "legend": _legend(classes, bool(strips), any(row.lane.exposed is not None for row in rows)),
        "alt": _alt(rows, strips, view),
    }
    return Picture(
        data=payload.pack(header, arrays),
        table=[_figures(row, view) for row in rows],
        events=sum(row.count for row in rows),
        single=sum(row.count for row, is_exact in zip(rows, exact, strict=True) if is_exact),
        columns=len(edges) - 1,
    )


def _row(
    row: _Row, edges: Ns, *, arrange: Arrange, exact: bool, height: int, arrays: payload.Arrays, tables: _Tables
) -> dict[str, Any]:
    shown, lane = row.shown, row.lane
    device = shown.device
    numbers = np.zeros(len(device["classes"]), np.int64)
    for index, _ in lane.class_covers:
        one = device["classes"][index]
        numbers[index] = tables.number(tables.classes, (one["role"], one["kind"], one["dimension"]))
    if lane.role == "exposed":
        mine = [tables.number(tables.classes, ("exposed", None, None))]
    else:
        mine = [int(numbers[index]) for index, _ in lane.class_covers]
    own = edges - shown.offset_ns
    widths = np.diff(edges)
    found = columns_of(lane, own)
    by_rank = arrange == "rank"
    header: dict[str, Any] = {
        "id": row.id,
        "group": shown.group if by_rank else lane.label,
        "label": lane.label if by_rank else shown.group,
        "band": shown.group if by_rank else "all",
        "height": height,
        "classes": mine,
        "count": row.count,
        "exposed": arrays.add(payload.shares(found.exposed_ns, widths))
        if lane.exposed is not None and lane.role != "exposed"
        else None,
    }
    if exact and lane.tracks:
        events = shown.index.events(device, lane, int(own[0]), int(own[-1]))
        return header | {"events": _events(events, device, shown.offset_ns, numbers, arrays, tables)}
    header["busy"] = arrays.add(payload.shares(found.busy_ns, widths))
    if len(mine) > 1:
        dominant = np.append(numbers, 0)[np.minimum(found.dominant, len(numbers))]
        header["dominant"] = arrays.add(dominant.astype(np.uint16))
    return header


def _events(
    events: Events, device: dict[str, Any], offset_ns: int, numbers: Any, arrays: payload.Arrays, tables: _Tables
) -> dict[str, Any]:
    names, units, collectives = device["names"], device["units"], device["collectives"]
    steps = np.array([step["step"] for step in device["steps"]] + [-1], np.int64)
    labels, full, unit_of, sizes = [], [], [], []
    rows = zip(events.name.tolist(), events.collective.tolist(), events.unit.tolist(), strict=True)
    for name, collective, unit in rows:
        about = collectives[collective] if collective >= 0 else None
        where = " ".join(units[unit]) if unit >= 0 else None
        # The lane says the kind of a collective already.
        label = units[unit][0] if where else about["kind"] if about is not None else short_name(names[name])
        labels.append(tables.number(tables.names, full_name(label)))
        full.append(tables.number(tables.names, full_name(names[name])))
        unit_of.append(-1 if where is None else tables.number(tables.units, full_name(where)))
        size_bytes = about["bytes"] if about is not None else None
        sizes.append(-1.0 if size_bytes is None else float(size_bytes))
    return {
        "start": arrays.add((events.start + offset_ns).astype(np.float64)),
        "end": arrays.add((events.end + offset_ns).astype(np.float64)),
        "class": arrays.add(numbers[events.classes].astype(np.uint16)),
        "label": arrays.add(np.array(labels, np.int32)),
        "name": arrays.add(np.array(full, np.int32)),
        "unit": arrays.add(np.array(unit_of, np.int32)),
        "bytes": arrays.add(np.array(sizes, np.float64)),
        "exposed_ns": arrays.add(events.exposed_ns.astype(np.float64)),
        "step": arrays.add(steps[events.step].astype(np.int32)),
    }


def _strip(strip: Strip, edges: Ns, arrays: payload.Arrays) -> dict[str, Any]:
    curves = strip.curves
    columns = curves.columns(edges - strip.offset_ns)
    top = max(strip.top_bytes, *(curves.peak(name)[0] for name in ("reserved", "active", "allocated")))
    unit, unit_name = unit_of(top)
    clock = curves.time_ns
    return {
        "label": strip.label,
        "band": strip.group,
        "height": strip.height,
        "top": max(top, 1) * 1.12,
        "pending_top": curves.peak("pending")[0],
        "unit": unit,
        "unit_name": unit_name,
        "known": [int(clock[0]) + strip.offset_ns, int(clock[-1]) + strip.offset_ns] if len(clock) else [0, 0],
        "looks": LEVELS,
        "marks": _marks(strip.marks, strip.offset_ns),
        "pending_marks": _marks(strip.pending_marks, strip.offset_ns),
        "columns": {name: arrays.add(values) for name, values in columns.items()},
    }


def _marks(marks: Sequence[tuple[int, int, str]], offset_ns: int) -> list[dict[str, Any]]:
    return [{"time": at + offset_ns, "bytes": level, "label": words} for at, level, words in marks]


def fitting(names: list[str]) -> list[str]:
    """The names, all cut to a length at which they take no more than `NAME_LETTERS` together."""
    if sum(map(len, names)) <= NAME_LETTERS:
        return names
    return [name[: max(1, NAME_LETTERS // len(names))] for name in names]


def _band(band: Band, place: int) -> dict[str, Any]:
    return {
        "group": band.group,
        "label": band.label,
        "start": band.start_ns,
        "end": band.end_ns,
        "shaded": place % 2 == 0,
    }


def _figures(row: _Row, view: View) -> dict[str, Any]:
    lane = row.lane
    edges = np.array([view.start_ns, view.end_ns], np.int64) - row.shown.offset_ns
    busy = int(lane.busy.per_column(edges)[0])
    return {
        "rank": row.shown.index.rank,
        "group": row.shown.group,
        "lane": lane.label,
        "events": row.shown.index.count(lane, int(edges[0]), int(edges[1])) if lane.tracks else None,
        "busy_ns": busy,
        "busy_pct": 100 * busy / (view.end_ns - view.start_ns),
        "exposed_ns": None if lane.exposed is None else int(lane.exposed.per_column(edges)[0]),
    }


def _class_label(role: str, kind: str | None, dimension: str | None) -> str:
    if role == "communication":
        return full_name(f"{dimension} {kind}")
    return {"compute": "compute", "memory": "memory operations", "exposed": "exposed communication"}[role]


def _legend(classes: Sequence[dict[str, Any]], memory: bool, communicates: bool) -> list[dict[str, Any]]:
    items = [{"label": one["label"], "colour": one["colour"], "pattern": one["pattern"]} for one in classes]
    if communicates and all(one["role"] != "exposed" for one in classes):
        items.append({"label": "exposed: nothing computed", "colour": EXPOSED, "pattern": "", "line": True})
    if memory:
        items.append({"label": "allocated", "colour": LEVELS["allocated"], "pattern": ""})
        items.append({"label": "pending: freed, not reusable", "colour": LEVELS["pending"], "pattern": "/"})
        items.append({"label": "reserved", "colour": "#888888", "pattern": "", "dashed": True})
    return items


def _alt(rows: Sequence[_Row], strips: Sequence[Strip], view: View) -> str:
    groups = list(dict.fromkeys([row.shown.group for row in rows] + [strip.group for strip in strips]))
    parts = [f"Timeline of {', '.join(groups[:4])}{' and more' if len(groups) > 4 else ''}"]
    if rows:
        parts.append(f"{len(rows)} lanes over {(view.end_ns - view.start_ns) / 1e6:.3f} ms")
    for strip in strips[:4]:
        parts.append(f"{strip.group}: active peak {size(strip.curves.peak('active')[0])}")
    return "; ".join(parts) + ". The table below has the figures of each lane in view."
