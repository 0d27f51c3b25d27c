"""A page as a browser would see it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "br", "img", "hr", "path", "rect", "use", "circle", "polyline", "image"}


class Page(HTMLParser):
    """What a browser would see: elements with attributes, text, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))

    def handle_endtag(self, name: str) -> None:
        if name not in VOID:
            assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if not (self.open and self.open[-1] in ("style", "script")):
            self.text += data

    def figures(self, name: str) -> list[Any]:
        values = [a.get("data-value") for _, a in self.elements if a.get("data-figure") == name]
        return [None if value is None else json.loads(value) for value in values]

    def ids(self) -> list[str]:
        return [attributes["id"] or "" for _, attributes in self.elements if "id" in attributes]


def loads(text: str) -> list[str]:
    """Everything in a page that could make a browser ask for something, or run something."""
    found = []
    for name, attributes in Page(text).elements:
        assert name not in ("script", "link", "iframe", "object", "embed", "base", "form"), name
        for key, value in attributes.items():
            assert not key.startswith("on"), key
            if key in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
                found.append(str(value))
            found += re.findall(r"url\(([^)]*)\)", value or "")
    found += re.findall(r"url\(([^)]*)\)|@import", text)
    return found
