"""Tables whose cells read as the command line's, and sort as the numbers that they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.elements.lib.column_types import ColumnConfig

from harness.text import printable, quantity

NAMES = frozenset({"rank", "step", "device"})
"""Numbers that name something, and so have no separators."""
WHOLE = 24
"""Rows of a table that is shown whole; longer ones scroll."""
ROW_PIXELS = 28


def show(
    rows: Sequence[Mapping[str, Any]],
    headers: Mapping[str, str | ColumnConfig],
    *,
    key: str | None = None,
    words: str | None = None,
    **arguments: Any,
) -> Any:
    """The fields of `headers` of each row, in that order. A number is written by `harness.text.quantity` in the unit
    that its field's name ends with; text of strangers without control characters. Returns what `st.dataframe` does."""
    return st.dataframe(
        styled(rows, list(headers)),
        column_config=dict(headers),
        hide_index=True,
        key=key,
        alt=words,
        placeholder="n/a",
        height="content" if len(rows) <= WHOLE else WHOLE * ROW_PIXELS,
        row_height=ROW_PIXELS,
        **arguments,
    )


def styled(rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> Any:
    # Whole numbers beside unknown ones stay whole as objects.
    frame = pd.DataFrame({field: pd.Series([clean(row.get(field)) for row in rows], dtype=object) for field in fields})
    numbers = [field for field in fields if all(isinstance(row.get(field), int | float | None) for row in rows)]
    return frame.style.format({field: partial(written, field) for field in numbers}, na_rep="n/a")


def clean(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


def written(field: str, value: Any) -> str:
    return str(value) if field in NAMES else quantity(field, value)
