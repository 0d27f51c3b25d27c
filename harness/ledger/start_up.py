"""What a rank allocates before its first step: the model's shards, as `to_empty` makes them, and the temporaries that
their initial values are computed with (harness/trainer/initialise.py). Nothing of it is part of a step, but the blocks
that it leaves are those that the first step finds."""

from __future__ import annotations

from collections.abc import Iterable

from harness.ledger.operators import Operators
from harness.ledger.sizes import Size
from harness.ledger.tape import Storage, Tape

CHUNK = 1 << 22
"""Elements computed at a time (harness/trainer/initialise.py CHUNK)."""


def fill_normal(tape: Tape, matrices: Iterable[tuple[int, int]]) -> None:
    """Temporaries of the initial values of local matrices, each of so many rows and columns. Two chunks stand for all:
    from the third on blocks come and go as in the second. So does one matrix for all of its shape."""
    for rows, columns in dict.fromkeys(matrices):
        at_once = max(1, CHUNK // max(1, columns))
        across = _new(tape, 8 * columns)
        whole, rest = divmod(rows, at_once)
        names: dict[str, Storage] = {}
        for count in [*[at_once] * min(2, whole), *([rest] if rest else [])]:
            _chunk(tape, count, columns, names)
        del across, names


def _chunk(tape: Tape, rows: int, columns: int, names: dict[str, Storage]) -> None:
    """One turn of `_fill_normal`'s loop, whose `names` keep what they had in the turn before until they get anew."""
    whole = 8 * rows * columns
    names["down"] = _new(tape, 8 * rows)
    starts = _new(tape, 8 * rows)
    added = _new(tape, whole)
    del starts
    doubled = _new(tape, whole)
    del added
    names["index"] = _new(tape, whole)
    del doubled
    names["radius"] = _uniform(tape, whole)
    following = _new(tape, whole)
    angle = _uniform(tape, whole)
    del following, angle


def _uniform(tape: Tape, whole: int) -> Storage:
    """`_uniform` of int64 indices of so many bytes: float32."""
    x = _new(tape, whole)
    for is_last in (False, False, True):
        masked = _shifted(tape, whole)
        mixed = _new(tape, whole)
        del masked
        x = mixed if is_last else _new(tape, whole)
        del mixed
    masked = _shifted(tape, whole)
    del x
    wide = _new(tape, whole // 2)
    del masked
    moved = _new(tape, whole // 2)
    del wide
    return moved


def _shifted(tape: Tape, whole: int) -> Storage:
    shifted = _new(tape, whole)
    masked = _new(tape, whole)
    del shifted
    return masked


def rotary_table(ops: Operators, seq_len: int) -> Storage:
    """The table that `recompute_buffers` makes after `to_empty` had made an empty one; a context-parallel rank's part
    is taken out of that of whole sequences."""
    tape, elements = ops.tape, seq_len * ops.quantities.values["hd"]
    angles = _new(tape, 2 * elements)
    ones = _new(tape, 2 * elements)
    table = _new(tape, 4 * elements) if ops.quantities.values["c"] > 1 else None
    own = ops.new("rotary table", 4, "S·hd")
    del angles, ones, table
    return own


def _new(tape: Tape, size: int) -> Storage:
    return tape.allocate("start-up", Size(size, "1", size))
