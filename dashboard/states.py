"""What is said where there is nothing, only a part, or something broken to show."""

from __future__ import annotations

import re
from typing import Any

import streamlit as st

from harness.errors import InputError, MeshscopeError
from harness.report.finding import NOT_A_CLUSTER
from harness.text import printable

ERRORS_SHOWN = 8


def escaped(text: str) -> str:
    """A stranger's text within Markdown: on one line, without markup."""
    return re.sub(r"([\\`*_{}\[\]<>()#+\-.!|~$:&@])", r"\\\1", printable(text))


# A sign, a word and a colour: none of them alone.
STATE_LOOKS: dict[str, tuple[str, Any]] = {
    "complete": ("✓", "green"),
    "running": ("▶", "blue"),
    "planned": ("▷", "blue"),
    "failed": ("✗", "red"),
    "invalid": ("✗", "red"),
    "abandoned": ("✗", "red"),
    "unreadable": ("✗", "red"),
    "partial": ("◐", "orange"),
    "unknown": ("?", "gray"),
    "files": ("▤", "gray"),
}


def marked(name: str) -> str:
    """A state as text."""
    return f"{STATE_LOOKS[name][0]} {name}"


def badge(name: str) -> None:
    st.badge(marked(name), color=STATE_LOOKS[name][1])


def say_mode(mode: str) -> None:
    """The mode that times are from, and what they do not stand for."""
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        st.badge(f"mode {mode}", color="orange" if mode in NOT_A_CLUSTER else "blue")
        if why := NOT_A_CLUSTER.get(mode):
            st.caption(f"{why[0].upper()}{why[1:]}.")


def empty(what: str, command: str | None = None) -> None:
    """Nothing there yet, and the command that makes it."""
    st.info(escaped(what), icon=":material/info:")
    if command:
        st.code(command, language="sh")


def broken(error: MeshscopeError) -> None:
    """What cannot be shown, where, and why: one readable error."""
    if isinstance(error, InputError):
        place = "" if error.offset is None else f" at byte {error.offset:,}"
        st.error(f"**{escaped(error.file)}**{place}: {escaped(error.reason)}", icon=":material/error:")
    else:
        st.error(escaped(str(error)), icon=":material/error:")


def partial(errors: list[dict[str, Any]]) -> None:
    """Part of the input is missing or unreadable: each is named, once."""
    for error in errors[:ERRORS_SHOWN]:
        broken(InputError(error["file"], error["reason"], error["offset"]))
    if len(errors) > ERRORS_SHOWN:
        with st.expander(f"{len(errors) - ERRORS_SHOWN} more that could not be read"):
            st.dataframe(errors[ERRORS_SHOWN:], hide_index=True)
