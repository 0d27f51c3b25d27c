"""Tables of the object of `meshscope overlap --json`: its own figures, one row for each item of each rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from dashboard.lanes.detail import label_of
from dashboard.lanes.picture import Shown, row_id

Row = dict[str, Any]

WORST_SHOWN = 50

COMMUNICATION = ("comm_ns", "overlap_ns", "exposed_ns", "overlap_pct")
WINDOW = (*COMMUNICATION, "compute_ns", "memory_ns", "idle_ns", "span_ns")


def entries_of(overlap: Row, files: Collection[str], ranks: Collection[int | None]) -> list[Row]:
    """The entries of these files and ranks."""
    return [entry for entry in overlap["ranks"] if entry["file"] in files and entry["rank"] in ranks]


def whole_rows(entries: Sequence[Row]) -> list[Row]:
    return [_row(entry, entry["window"], ("device", "source"), WINDOW, entry) for entry in entries]


def dimension_rows(entries: Sequence[Row], dimensions: Collection[str]) -> list[Row]:
    return [
        _row(entry, item, ("dimension",), COMMUNICATION)
        for entry in entries
        for item in entry["dimensions"]
        if item["dimension"] in dimensions
    ]


def collective_rows(entries: Sequence[Row], dimensions: Collection[str]) -> list[Row]:
    names = ("dimension", "kind", "group", "count")
    return [
        _row(entry, item, names, (*COMMUNICATION, "sum_ns"))
        for entry in entries
        for item in entry["collectives"]
        if item["dimension"] in dimensions
    ]


def unit_rows(entries: Sequence[Row]) -> list[Row]:
    return [_row(entry, item, ("unit", "phase", "kind"), COMMUNICATION) for entry in entries for item in entry["units"]]


def step_rows(entries: Sequence[Row], rule: str, step: int | None) -> list[Row]:
    """Steps by one rule, all or one; `incomplete` marks those that the file holds in part."""
    return [
        _row(entry, item, ("step",), WINDOW) | {"incomplete": item["step"] in entry["incomplete_steps"]}
        for entry in entries
        for item in entry["steps"]
        if item["rule"] == rule and step in (None, item["step"])
    ]


def breakdown_rows(entries: Sequence[Row], step: int | None) -> list[Row]:
    """Where each step's span goes; a column for each dimension's exposed communication."""
    return [
        {"rank": entry["rank"], "step": item["step"], "compute_ns": item["compute_ns"]}
        | {f"exposed {name}_ns": value for name, value in item["exposed"].items()}
        | {name: item[name] for name in ("exposed_memory_ns", "idle_ns", "idle_host_ns", "span_ns")}
        for entry in entries
        for item in entry["breakdown"]
        if step in (None, item["step"])
    ]


def waiting_rows(cross_rank: Row, dimensions: Collection[str]) -> list[Row]:
    """Per kind and dimension: how many collectives were matched over ranks, the sum of their transfers, what each rank
    waited in all, and who came last most often. Waits are None where clocks are not aligned."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for one in cross_rank["collectives"]:
        if one["dimension"] in dimensions:
            groups.setdefault((one["dimension"], one["kind"]), []).append(one)
    return [_waiting(dimension, kind, ones) for (dimension, kind), ones in sorted(groups.items())]


def worst_rows(shown: Sequence[Shown], dimensions: Collection[str], step: int | None) -> list[Row]:
    """The collectives with most exposed time (`Lane.exposed` over each alone), largest first. `at_ns` is on the
    timeline's axis, `row` the lane that each is in."""
    rows = [
        {
            "rank": one.index.rank,
            "kind": kind["kind"],
            "dimension": kind["dimension"],
            "unit": one.device["units"][item["unit"]][0] if item["unit"] >= 0 else None,
            "step": step_of(one, item["step"]),
            "exposed_ns": item["exposed_ns"],
            "duration_ns": item["end"] - item["start"],
            "at_ns": item["start"] + one.offset_ns,
            "row": row_id(one, label_of(kind)),
        }
        for one in shown
        for item in one.device["worst"]
        for kind in [one.device["classes"][item["class"]]]
        if kind["dimension"] in dimensions and step in (None, step_of(one, item["step"]))
    ]
    return sorted(rows, key=lambda row: -row["exposed_ns"])[:WORST_SHOWN]


def step_of(one: Shown, place: int) -> int | None:
    """The number of the step at a place in a device's list; None for -1."""
    number: int | None = one.device["steps"][place]["step"] if place >= 0 else None
    return number


def _waiting(dimension: str, kind: str, ones: Sequence[Row]) -> Row:
    waits: dict[str, int] = {}
    last: dict[int, int] = {}
    for one in ones:
        if one["wait_ns"] is None:
            continue
        for rank, wait in one["wait_ns"].items():
            waits[rank] = waits.get(rank, 0) + wait
        last[one["last_rank"]] = last.get(one["last_rank"], 0) + 1
    most = max(last, key=lambda rank: last[rank]) if last else None
    return {
        "dimension": dimension,
        "kind": kind,
        "matched": len(ones),
        "transfer_ns": sum(one["transfer_ns"] for one in ones),
        "last": None if most is None else f"rank {most} ({last[most]} of {len(ones)})",
    } | {f"rank {rank} waited_ns": waits[rank] for rank in sorted(waits, key=int)}


def _row(entry: Row, item: Row, names: Sequence[str], figures: Sequence[str], names_from: Row | None = None) -> Row:
    return {
        "rank": entry["rank"],
        **{name: (names_from or item)[name] for name in names},
        **{name: item[name] for name in figures},
    }


def header(name: str) -> str:
    """A field's name without its unit, which the cells have."""
    return name.removesuffix("_ns").replace("_", " ") if name.endswith("_ns") else name
