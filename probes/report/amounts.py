"""Amounts in the unit of a comparison; light to import, for pages that show what was compared elsewhere."""

from __future__ import annotations

from harness.report.figures import unit_of
from harness.text import signed_percent, size


def amount(value: float | None, unit: str) -> str:
    """A difference with its sign, in percent, points or bytes."""
    if value is None:
        return "n/a"
    if unit == "bytes":
        return f"{'+' if value > 0 else ''}{size(int(value))}"
    text = signed_percent(value)
    return text.replace("%", "points") if unit == "points" else text


def around_zero(threshold: float, unit: str) -> str:
    """`±1 %`, `±2 points`, `±64.000 MiB`."""
    return f"±{size(int(threshold))}" if unit == "bytes" else f"±{threshold:g} {unit}"


def scale_of_axis(metric: str, highest: float) -> tuple[float, str]:
    """What to divide a metric's values by for an axis, and the unit that leaves."""
    if metric.endswith("_bytes"):
        return unit_of(int(highest))
    return (1e6, "ms") if metric.endswith("_ns") else (1, "%")
