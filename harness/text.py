"""Plain-text tables and sizes, the same on a terminal, in a log and in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

GIB = 2**30
MIB = 2**20


def one_line(text: str) -> str:
    """Its lines joined by spaces, other control characters (a file's name may hold escape codes) as `?`."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.splitlines()))


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    last_left: bool = False,
    indent: str = "  ",
) -> list[str]:
    """Lines of a table: text columns, the first `left` and perhaps the last, start at the left, figures end at the
    right."""
    lines = [list(headers), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return [
        (
            indent
            + "  ".join(
                cell.ljust(width) if column < left or (last_left and column == len(widths) - 1) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
        ).rstrip()
        for line in lines
    ]


def size(value: int | None) -> str:
    """Bytes as GiB with four decimals, as MiB below a tenth of a GiB, as they are below a tenth of a MiB, n/a where
    unknown."""
    if value is None:
        return "n/a"
    if 0 < abs(value) < MIB // 10:
        return f"{value:,} B"
    return f"{value / GIB:.4f} GiB" if abs(value) >= GIB // 10 else f"{value / MIB:.3f} MiB"


def byte_seconds(value: float | None) -> str:
    """Bytes times seconds, in the unit that `size` takes."""
    return "n/a" if value is None else f"{size(round(value))}·s"


def quantity(name: str, value: int | float | None) -> str:
    """A figure as text, in the unit that its name ends with: `_bytes`, `byte_seconds`, `_ns`, `_pct`; plain
    otherwise."""
    if value is None:
        return "n/a"
    if name.endswith("byte_seconds"):
        return byte_seconds(value)
    if name == "bytes" or name.endswith("_bytes"):
        return size(int(value))
    if name.endswith("_ns"):
        return f"{milliseconds(int(value))} ms"
    if name.endswith("_pct"):
        return percent(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def printable(text: str) -> str:
    """A stranger's text fit for one line: no control, formatting or surrogate characters."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def milliseconds(value: int | None) -> str:
    return "n/a" if value is None else f"{value / 1e6:.3f}"


def percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:z.2f} %"


def signed_percent(value: float | None) -> str:
    """A difference: `+1.00 %`, `-1.00 %`, and `0.00 %` for one that two decimals do not show."""
    return "n/a" if value is None else percent(value) if abs(value) < 0.005 else f"{value:+.2f} %"


def number(value: float | None, digits: int = 4) -> str:
    return "n/a" if value is None else f"{value:z.{digits}f}"


def counted(count: int, what: str) -> str:
    """`1 rank`, `8 ranks`: a regular plural."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def in_ranges(numbers: Iterable[int]) -> str:
    """Whole numbers in order, each once, neighbours as a range: `4–7, 9`."""
    ordered = sorted(set(numbers))
    # Neighbours have the same difference between number and position.
    runs = [[n for _, n in run] for _, run in groupby(enumerate(ordered), key=lambda item: item[1] - item[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
