"""What things look like in a timeline: the colour says what runs, the pattern in which dimension, the label both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from harness.report.drawing import BLUE, GREY, RED
from harness.report.figures import COLOUR_OF_KIND, OTHER_KIND
from harness.text import printable

EXPOSED = RED
LEVELS = {"allocated": BLUE, "pending": RED}
PATTERNS = ("", "/", "\\", "x", ".", "-")
NAME_LETTERS = 300


def dimensions_of(devices: Sequence[dict[str, Any]]) -> list[str]:
    """The dimensions that communicate on any of the devices, in order of their names, which is that of the patterns."""
    return sorted({one["dimension"] for device in devices for one in device["classes"] if one["dimension"] is not None})


def look(role: str, kind: str | None, dimension: str | None, dimensions: Sequence[str]) -> dict[str, str]:
    """`colour` and `pattern` of a class."""
    if role != "communication":
        return {"colour": {"compute": BLUE, "memory": GREY, "exposed": RED}[role], "pattern": ""}
    place = dimensions.index(dimension) if dimension is not None else 0
    return {"colour": COLOUR_OF_KIND.get(kind or "", OTHER_KIND), "pattern": PATTERNS[place % len(PATTERNS)]}


def full_name(name: str) -> str:
    text = printable(name)
    return text if len(text) <= NAME_LETTERS else f"{text[: NAME_LETTERS - 1]}…"


def short_name(name: str) -> str:
    """A kernel's name without return type, namespaces, template arguments and parameters."""
    text = re.sub(r"^(void|int|float|bool) ", "", printable(name))
    text = re.split(r"[<(]", text, maxsplit=1)[0].strip() or text
    return text.rpartition("::")[2][:60]
