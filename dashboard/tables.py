"""Tables whose cells read as the command line's, and sort as the numbers that they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.elements.lib.column_types import ColumnConfig

from harness.text import printable, quantity

NAMES = frozenset({"rank", "step", "device", "stream"})
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


def picked(
    rows: Sequence[Mapping[str, Any]],
    headers: Mapping[str, str | ColumnConfig],
    name: str,
    *,
    parameter: str,
    several: bool,
    words: str | None = None,
) -> list[str]:
    """A table to pick rows of, as `show`; returns the field `name` of those picked. The URL keeps them as
    `?{parameter}=`, so that they stay picked when others come before them, or another sorting."""
    names = [str(row[name]) for row in rows]
    asked = [one for one in dict.fromkeys(st.query_params.get_all(parameter)) if one in names]
    asked = asked if several else asked[:1]
    # A table keeps the positions that are picked: with other rows it is another one, which begins with the names.
    selection = show(
        rows,
        headers,
        key=f"{parameter}: {json.dumps(names)}",
        words=words,
        on_select="rerun",
        selection_mode="multi-row" if several else "single-row",
        selection_default={"selection": {"rows": [names.index(one) for one in asked]}},
    ).selection
    found = [names[row] for row in selection.rows]
    if found != asked:
        st.query_params[parameter] = found
    return found


def styled(rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> Any:
    # Whole numbers beside unknown ones stay whole as objects.
    frame = pd.DataFrame({field: pd.Series([clean(row.get(field)) for row in rows], dtype=object) for field in fields})
    numbers = [field for field in fields if all(isinstance(row.get(field), int | float | None) for row in rows)]
    return frame.style.format({field: partial(written, field) for field in numbers}, na_rep="n/a")


def clean(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


def written(field: str, value: Any) -> str:
    return str(value) if field in NAMES else quantity(field, value)
