"""What `meshscope overlap` prints: the whole files, the table that `--by` asks for, waiting across ranks, notes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.text import counted, milliseconds, percent, printable, table

By = Literal["step", "collective", "dimension", "unit"]
Row = dict[str, Any]

CROSS_RANK_SHOWN = 5
OF_COMMUNICATION = {"comm": "comm_ns", "overlapped": "overlap_ns", "exposed": "exposed_ns"}
OF_WINDOW = OF_COMMUNICATION | {
    "compute": "compute_ns",
    "memory ops": "memory_ns",
    "idle": "idle_ns",
    "span": "span_ns",
}
# What of idle the device waited for its host is known by the launch rule only.
OF_LAUNCHED = OF_WINDOW | {"idle for host": "idle_host_ns"}


@dataclass(frozen=True, slots=True)
class Level:
    """A table of `--by`: which list of a rank's entry it shows, what names its rows, which figures they have.

    Columns in `of_rank` name the same thing differently on each rank, so rows of several ranks are told apart without.
    """

    title: str
    items: str
    names: tuple[str, ...]
    figures: dict[str, str]
    of_rank: tuple[str, ...] = ()


LEVELS: dict[By, tuple[Level, ...]] = {
    "step": (
        Level("Steps, rule launch (launched in the step)", "launch", ("step",), OF_LAUNCHED),
        Level("Steps, rule clip (cut to the step's host window)", "clip", ("step",), OF_WINDOW),
    ),
    "collective": (
        Level("Collectives, whole file", "collectives", ("dimension", "kind"), OF_COMMUNICATION, ("group",)),
    ),
    "dimension": (Level("Parallel dimensions, whole file", "dimensions", ("dimension",), OF_COMMUNICATION),),
    "unit": (Level("FSDP units, whole file", "units", ("unit", "phase", "kind"), OF_COMMUNICATION),),
}


def report(result: Row, by: By | None, *, complete: Sequence[Row], ranks: int, per_rank: bool) -> str:
    """The whole text; times in ms, n/a where there is nothing to divide by.

    `result` is the object of `overlap --json`, `complete` its `ranks` without incomplete steps, `ranks` how many ranks
    have a trace. What `by` lists are means over ranks, unless there is one or `per_rank` asks for each.
    """
    entries = result["ranks"]
    lines = [f"mode: {result['mode']}; times in ms; overlap = communication hidden by compute / communication"]
    whole = [{**entry, **entry["window"]} for entry in entries]
    lines += ["", "Whole file", *rows_as_table(("rank", "device", "source"), OF_WINDOW, whole)]
    means = not per_rank and len({entry["rank"] for entry in entries}) > 1
    for level in LEVELS[by] if by else ():
        lines += ["", *(mean_table(level, complete) if means else rank_table(level, entries))]
    lines += cross_rank(result["cross_rank"], ranks)
    lines += notes(entries)
    return "\n".join(map(printable, lines))


def rank_table(level: Level, entries: Sequence[Row]) -> Iterator[str]:
    """Every row of every rank."""
    rows = [
        {**item, "rank": entry["rank"]}
        | ({"step": f"{item['step']} (incomplete)"} if item.get("step") in entry["incomplete_steps"] else {})
        for entry in entries
        for item in items(level, entry)
    ]
    counts = ("count",) if any("count" in row for row in rows) else ()
    yield level.title
    yield from rows_as_table(("rank", *level.names, *level.of_rank, *counts), level.figures, rows)


def mean_table(level: Level, entries: Sequence[Row]) -> Iterator[str]:
    """Means over the ranks that have a row, lowest and highest overlap among them."""
    yield f"{level.title}: means over ranks, lowest to highest overlap (each rank: --per-rank)"
    if not entries:
        yield "  no complete step"
        return
    groups: dict[tuple[Any, ...], list[tuple[Row, Row]]] = {}
    for entry in entries:
        seen: dict[tuple[Any, ...], int] = {}
        for item in items(level, entry):
            name = tuple(item[column] for column in level.names)
            seen[name] = seen.get(name, 0) + 1  # several groups of one dimension: the n-th with the n-th
            groups.setdefault((*name, seen[name]), []).append((entry, item))
    rows = []
    for (*values, _), mine in groups.items():
        found = [item for _, item in mine]
        row = dict(zip(level.names, values, strict=True)) | {"ranks": len({entry["rank"] for entry, _ in mine})}
        row |= {key: mean([item[key] for item in found]) for key in level.figures.values()}
        if "count" in found[0]:
            row["count"] = f"{statistics.mean(item['count'] for item in found):g}"
        shares = [item["overlap_pct"] for item in found if item["overlap_pct"] is not None]
        row["overlap"] = spread(shares)
        rows.append(row)
    counts = ("count",) if any("count" in row for row in rows) else ()
    yield from rows_as_table((*level.names, "ranks", *counts), level.figures, rows)


def items(level: Level, entry: Row) -> list[Row]:
    if level.items in ("launch", "clip"):
        starved = {item["step"]: item["idle_host_ns"] for item in entry["breakdown"]}
        steps = [step for step in entry["steps"] if step["rule"] == level.items]
        return [{**step, "idle_host_ns": starved[step["step"]]} for step in steps]
    found: list[Row] = entry[level.items]
    return found


def mean(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(statistics.mean(known)) if known else None


def spread(shares: Sequence[float]) -> str:
    if not shares:
        return "n/a"
    low, high = percent(min(shares)), percent(max(shares))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def rows_as_table(names: Sequence[str], figures: dict[str, str], rows: Sequence[Row]) -> list[str]:
    """One line per row: what it is, its overlap, its figures."""
    if not rows:
        return ["  none"]
    cells = [
        [
            *(shortened(printable("-" if row[name] is None else str(row[name]))) for name in names),
            row["overlap"] if "overlap" in row else percent(row["overlap_pct"]),
            *(milliseconds(row[key]) for key in figures.values()),
        ]
        for row in rows
    ]
    return table([*names, "overlap", *figures], cells, left=len(names))


def cross_rank(found: Row, ranks: int) -> Iterator[str]:
    collectives = found["collectives"]
    if collectives:
        transfer = sum(one["transfer_ns"] for one in collectives)
        yield ""
        yield (
            f"Across {counted(ranks, 'rank')}: {counted(len(collectives), 'collective')} matched, "
            f"transfer {milliseconds(transfer)} ms in all"
        )
    if collectives and found["aligned"]:
        waits: dict[str, int] = {}
        for one in collectives:
            for rank, wait in one["wait_ns"].items():
                waits[rank] = waits.get(rank, 0) + wait
        each = (f"rank {rank} {milliseconds(waits[rank])} ms" for rank in sorted(waits, key=int))
        yield f"  waiting for the last rank: {', '.join(each)}"
        for one in sorted(collectives, key=lambda one: -max(one["wait_ns"].values()))[:CROSS_RANK_SHOWN]:
            yield (
                f"  longest wait {milliseconds(max(one['wait_ns'].values()))} ms: {one['kind']} ({one['dimension']}), "
                f"transfer {milliseconds(one['transfer_ns'])} ms, rank {one['last_rank']} arrived last"
            )
    for note in found["notes"]:
        yield f"note (across ranks): {note}"


def notes(entries: Sequence[Row]) -> Iterator[str]:
    """Each note once, with the ranks that it is about."""
    ranks_of: dict[str, list[str]] = {}
    for entry in entries:
        dropped = [f"{counted(count, 'device event')} dropped: {why}" for why, count in entry["dropped"].items()]
        for note in entry["notes"] + dropped:
            ranks_of.setdefault(note, []).append("?" if entry["rank"] is None else str(entry["rank"]))
    for note, ranks in ranks_of.items():
        where = "all ranks" if len(ranks) == len(entries) > 1 else f"rank {', '.join(dict.fromkeys(ranks))}"
        yield f"note ({where}): {note}"


def shortened(text: str, limit: int = 24) -> str:
    return text if len(text) <= limit else text[: limit - 2] + ".."
