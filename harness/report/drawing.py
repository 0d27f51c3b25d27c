"""matplotlib as an SVG for a page: no pyplot, no request, the page's own text colour and font."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from harness.report.markup import Html, escaped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with every kind of colour blindness. What they mean is written beside them, too.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, YELLOW, GREY = "#56B4E9", "#D55E00", "#F0E442", "#999999"

# Replaced by the page's text colour, so that one picture serves light and dark.
INK = "#0a0b0c"
WIDTH_INCHES = 9.5

STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 8.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.7,
    "savefig.transparent": True,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


@contextmanager
def style() -> Iterator[None]:
    """Drawing with this project's settings, whatever the user's matplotlibrc says."""
    import matplotlib.style

    with matplotlib.style.context(["default", STYLE]), warnings.catch_warnings():
        # The browser has the glyphs of a stranger's names, matplotlib's own font need not.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def new_figure(height_inches: float) -> tuple[Figure, Axes]:
    figure, [axes] = new_grid(height_inches)
    return figure, axes


def new_grid(height_inches: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """Several pictures in one, row by row; `options` are those of `Figure.subplots`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def new_mosaic(height_inches: float, places: list[Any], **options: Any) -> tuple[Figure, dict[str, Axes]]:
    """Pictures by name, each over all the places that bear it; `options` are those of `Figure.subplot_mosaic`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    return figure, dict(figure.subplot_mosaic(places, **options))


def whole_numbers(axis: Axis) -> None:
    """Ticks at whole numbers only, as ranks and steps have."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def few_numbers(axis: Axis, most: int) -> None:
    """At most `most` ticks, which do not reach into one another or the picture beside."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=most, prune="both"))


def svg(figure: Figure, name: str, alt: str) -> Html:
    """The figure as an inline SVG element. `name` makes its ids its own, `alt` says what it shows."""
    buffer = io.StringIO()
    nothing: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, count=1, flags=re.DOTALL)
    text = text.replace(INK, "currentColor")
    text = re.sub(r'\bid="([\w.-]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([\w.-]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'href="#([\w.-]+)"', rf'href="#{name}-\1"', text)
    text = text.replace("xlink:href=", "href=")
    view = re.search(r'viewBox="[^"]*"', text)
    opening = f'<svg role="img" aria-label="{escaped(alt)}" {view[0] if view else ""}>'
    return Html(re.sub(r"<svg[^>]*>", lambda _: f"{opening}<title>{escaped(alt)}</title>", text, count=1).strip())
