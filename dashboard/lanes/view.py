"""Where a timeline is: the view of a session, in the URL as `?range=<start>-<end>` in ns of the axis."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import streamlit as st

from dashboard.lanes.component import timeline
from dashboard.lanes.picture import Picture, View

RANGE = re.compile(r"(\d{1,18})-(\d{1,18})")
PARAMETER = "range"
WIDTH = "timeline_width"
"""Where the session keeps how many pixels wide its timelines are."""
GUESSED_WIDTH = 1000
WIDEST = 4000
FEWEST_NS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """An axis of `extent_ns`; another `id` (another run, another step) begins anew with its whole or `first`. One that
    is not `settled` may still grow, while traces are read."""

    id: str
    extent_ns: int
    first: tuple[int, int] | None = None
    unit: Literal["time", "event"] = "time"
    settled: bool = True

    @property
    def begin(self) -> tuple[int, int]:
        return self.first or (0, self.extent_ns)


def view_of(axis: Axis, key: str) -> View:
    """The session's view of an axis: where it was, or where the URL leads."""
    kept: dict[str, Any] | None = st.session_state.get(_place(key))
    asked = st.query_params.get(PARAMETER)
    begin = _range(parsed(asked, axis) or axis.begin)
    if kept is None:
        kept = {"axis": axis.id, "turn": 0, "grown": axis.extent_ns, **begin}
    elif kept["axis"] == axis.id and kept["grown"] != axis.extent_ns:
        kept = {**kept, "turn": kept["turn"] + 1, "grown": axis.extent_ns, **begin}
    elif kept["axis"] != axis.id:
        kept = {**kept, "axis": axis.id, "turn": kept["turn"] + 1, "grown": axis.extent_ns, **_range(axis.begin)}
        st.session_state.pop(f"{key}_mark", None)
    elif asked is not None and asked != _text(kept) and (found := parsed(asked, axis)):
        kept = {**kept, "turn": kept["turn"] + 1, **_range(found)}
    st.session_state[_place(key)] = kept
    if axis.settled:
        _tell(kept, axis)
    return View(
        start_ns=kept["start"],
        end_ns=kept["end"],
        extent_ns=axis.extent_ns,
        width=st.session_state.get(WIDTH, GUESSED_WIDTH),
        view_id=f"{axis.id} {kept['turn']}",
        axis=axis.unit,
    )


def parsed(text: str | None, axis: Axis) -> tuple[int, int] | None:
    """A range of the URL within the axis, None for anything else."""
    match = RANGE.fullmatch(text or "")
    if not match:
        return None
    start, end = min(int(match[1]), axis.extent_ns), min(int(match[2]), axis.extent_ns)
    return (start, end) if end - start >= min(FEWEST_NS, axis.extent_ns) else None


def go_to(start_ns: int, end_ns: int, axis: Axis, key: str, *, margin: float = 0.0) -> None:
    """Moves the view, with a margin on both sides as a share of it."""
    kept = st.session_state.get(_place(key)) or {"turn": 0}
    more = int((end_ns - start_ns) * margin)
    start, end = max(0, start_ns - more), min(axis.extent_ns, max(end_ns + more, start_ns + FEWEST_NS))
    st.session_state[_place(key)] = {
        **kept,
        "axis": axis.id,
        "turn": kept["turn"] + 1,
        "grown": axis.extent_ns,
        **_range((start, end)),
    }
    _tell(st.session_state[_place(key)], axis)


def draw(make: Callable[[View], Picture], axis: Axis, key: str) -> Picture:
    """The timeline with what it shows; call it in a fragment, which alone runs again when the view moves."""
    made = make(view_of(axis, key))

    def moved() -> None:
        asked = _said(key, "range")
        if asked is None:
            return
        kept = st.session_state[_place(key)]
        start, end, width = (int(asked[name]) for name in ("start", "end", "width"))
        start, end = max(0, start), min(axis.extent_ns, end)
        ends = _range((start, end)) if end > start else {}
        moves = bool(ends) and (start, end) != (kept["start"], kept["end"])
        st.session_state[_place(key)] = {**kept, **ends}
        st.session_state[WIDTH] = max(60, min(width, WIDEST))
        if moves:
            _tell(st.session_state[_place(key)], axis)

    def selected() -> None:
        chosen = _said(key, "selected")
        if chosen is not None:
            st.session_state[f"{key}_mark"] = chosen

    timeline(made.data, key=f"{key}_lanes", on_range=moved, on_selected=selected)
    return made


def _said(key: str, what: str) -> dict[str, Any] | None:
    """What the browser says; None where it says nothing, or speaks of a page that was left meanwhile."""
    said = getattr(st.session_state.get(f"{key}_lanes"), what, None)
    return said if isinstance(said, dict) else None


def mark(key: str) -> dict[str, Any] | None:
    """The event that is marked: its `row`, `start` and `end`, and `words` about it where it was clicked."""
    found: dict[str, Any] | None = st.session_state.get(f"{key}_mark")
    return found


def set_mark(key: str, row: str, start_ns: int, end_ns: int) -> None:
    st.session_state[f"{key}_mark"] = {"row": row, "start": start_ns, "end": end_ns}


def _place(key: str) -> str:
    return f"{key}_view"


def _range(ends: tuple[int, int]) -> dict[str, int]:
    return {"start": ends[0], "end": ends[1]}


def _text(kept: dict[str, Any]) -> str:
    return f"{kept['start']}-{kept['end']}"


def _tell(kept: dict[str, Any], axis: Axis) -> None:
    """Writes the range into the URL, where it is not what one begins with."""
    if (kept["start"], kept["end"]) == axis.begin:
        st.query_params.pop(PARAMETER, None)
    elif st.query_params.get(PARAMETER) != _text(kept):
        st.query_params[PARAMETER] = _text(kept)
