"""HTML by functions that escape: text is text unless it was made here.

Names in traces and recordings are strangers' words. Only `Html` values are put into a page as they are.
"""

from __future__ import annotations

import html

from harness.text import printable, quantity


class Html(str):
    """Markup that is finished."""

    __slots__ = ()


VOID = frozenset({"meta", "br", "img", "hr"})


def escaped(text: str) -> Html:
    return text if isinstance(text, Html) else Html(html.escape(printable(text), quote=True))


def joined(*parts: str) -> Html:
    return Html("".join(map(escaped, parts)))


def tag(name: str, /, *children: str, **attributes: str | None) -> Html:
    """An element. A trailing underscore of an attribute's name is dropped (`class_`), others become hyphens; None
    leaves the attribute out."""
    words = (
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    opening = f"<{name}{''.join(words)}>"
    return Html(opening if name in VOID else f"{opening}{joined(*children)}</{name}>")


FIGURE = 'class="n"'


def figure_cell(name: str, value: int | float | None) -> Html:
    """A table cell with a figure in its unit; `data-value` is the value itself, as in --json."""
    raw = None if value is None else repr(value)
    return tag("td", quantity(name, value), class_="n", data_figure=name, data_value=raw)


def table(headers: list[str], rows: list[list[str]], *, caption: str | None = None, left: int = 1) -> Html:
    """Cells that are not finished `td` elements are text; the first `left` columns are row headers."""
    right = [bool(rows) and cell.startswith(f"<td {FIGURE}") for cell in (rows[0] if rows else [])]
    heads = (
        tag("th", header, scope="col", class_="n" if index < len(right) and right[index] else None)
        for index, header in enumerate(headers)
    )
    head = tag("thead", tag("tr", *heads))
    body = tag("tbody", *(tag("tr", *(_cell(cell, i < left) for i, cell in enumerate(row))) for row in rows))
    title = [tag("caption", caption)] if caption else []
    return tag("div", tag("table", *title, head, body), class_="scroll")


def _cell(cell: str, is_header: bool) -> Html:
    if isinstance(cell, Html) and cell.startswith("<td"):
        return cell
    return tag("th", cell, scope="row") if is_header else tag("td", cell)


def listing(items: list[str], class_: str | None = None) -> Html:
    return tag("ul", *(tag("li", item) for item in items), class_=class_)
