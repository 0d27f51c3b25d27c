"""The actions of a pipeline schedule in torch's notation, and tables of them as CSV.

`2F0` is the forward of micro-batch 0 on stage 2 (torch/distributed/pipelining/schedules.py:_Action). A table has one
row per pipeline rank, its cells in the order in which the rank carries them out; empty cells are idle.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from harness.errors import UsageError

Kind = Literal[
    "F", "B", "I", "W", "OVERLAP_F_B", "UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_F", "SEND_B", "RECV_B"
]
"""F forward; B backward; I and W backward for the inputs and for the weights apart (arXiv 2401.10241)."""
COMPUTE: frozenset[str] = frozenset(("F", "B", "I", "W"))
WHOLE_STAGE: frozenset[str] = frozenset(("UNSHARD", "RESHARD", "REDUCE_GRAD"))
"""Actions that mean no micro-batch."""

_ONE = re.compile(rf"(\d+)({'|'.join(sorted(get_args(Kind), key=len, reverse=True))})(\d*)")
_TOGETHER = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """`micro_batch` is None for an action on a whole stage, `stage` -1 for several at once (`parts`)."""

    stage: int
    kind: Kind
    micro_batch: int | None = None
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.micro_batch is None else self.micro_batch}"

    @property
    def steps(self) -> tuple[Action, ...]:
        """Itself, or what it consists of, in the order in which that is carried out."""
        return self.parts or (self,)


Table = Sequence[Sequence[Action]]
"""Actions of each pipeline rank in order."""


def parse_action(text: str) -> Action:
    """Raises ValueError for what is no action."""
    if match := _TOGETHER.fullmatch(text.strip()):
        parts = tuple(parse_action(part) for part in match[1].split(";"))
        if any(part.kind not in COMPUTE for part in parts):
            raise ValueError(f"`{text.strip()}` overlaps something else than computation")
        return Action(-1, "OVERLAP_F_B", None, parts)
    match = _ONE.fullmatch(text.strip())
    if match is None or match[2] == "OVERLAP_F_B":
        raise ValueError(f"`{text.strip()}` is no action: write stage, kind and micro-batch, such as 2F0 or 1UNSHARD")
    kind: Kind = match[2]  # type: ignore[assignment]
    if (kind in WHOLE_STAGE) == bool(match[3]):
        raise ValueError(f"`{text.strip()}` {'means no' if match[3] else 'lacks its'} micro-batch")
    return Action(int(match[1]), kind, int(match[3]) if match[3] else None)


def read_table(text: str) -> list[list[Action]]:
    """The table of a CSV; raises `UsageError` naming row and column of what is no action."""
    table = []
    for number, cells in _rows(text):
        row = []
        for column, cell in enumerate(cells, start=1):
            try:
                row += [parse_action(cell)] if cell.strip() else []
            except ValueError as error:
                raise UsageError(f"pipeline.csv: row {number} (rank {number - 1}), column {column}: {error}") from None
        if row:
            table.append(row)
        elif table and any(cell.strip() for cell in cells):
            raise UsageError(f"pipeline.csv: row {number} holds no action")
    if not table:
        raise UsageError("pipeline.csv holds no action: give one row per pipeline rank")
    return table


def _rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """Rows from 1 on; raises `UsageError` for what is no CSV."""
    rows = csv.reader(io.StringIO(text))
    try:
        yield from enumerate(rows, start=1)
    except csv.Error as error:
        raise UsageError(f"pipeline.csv: line {rows.line_num}: {error}") from None


def write_table(table: Table) -> str:
    """CSV that `read_table`, and torch's `_load_csv`, read back."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([str(action) for action in row] for row in table)
    return out.getvalue()


def computation(row: Sequence[Action]) -> list[Action]:
    """What of a rank's actions computes, those that overlap together as they are."""
    return [action for action in row if action.kind in COMPUTE or action.parts]


def each_step(row: Sequence[Action]) -> Iterator[Action]:
    """Every single action of a rank in order, overlapping ones one by one."""
    for action in row:
        yield from action.steps
