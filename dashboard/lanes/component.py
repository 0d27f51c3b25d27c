"""The timeline as a Streamlit component: `assets/` in the page, its bytes from `picture`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

import streamlit as st

NAME = "meshscope.timeline"
SCRIPTS = ("payload.js", "draw.js", "lanes.js", "input.js")


@cache
def assets() -> tuple[str, str]:
    """(script, style). The parts of the script share one scope, in this order."""
    folder = files(__package__) / "assets"
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    return script, (folder / "lanes.css").read_text(encoding="utf-8")


def timeline(data: bytes, *, key: str, on_range: Callable[[], None], on_selected: Callable[[], None]) -> Any:
    """Draws `picture.Picture.data`.

    Calls back when the view has come to rest elsewhere (`st.session_state[key].range`: `start`, `end` in ns and the
    `width` in pixels) and when an event is clicked (`.selected`: its `row`, `start`, `end`).
    """
    script, style = assets()
    # The same definition again is no change; a module may be imported before there is a server to register with.
    mount = st.components.v2.component(NAME, html='<div class="timeline"></div>', css=style, js=script)
    return mount(key=key, data=data, on_range_change=on_range, on_selected_change=on_selected)
