"""Sizes in closed form: a coefficient and a product of named quantities, with their value in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Size:
    """`coefficient · monomial`; the coefficient carries the bytes of an element, the monomial the elements."""

    coefficient: int
    monomial: str
    bytes: int


class Quantities:
    """The named quantities of one configuration, such as T (tokens of a rank) or d (width of the model)."""

    def __init__(self, values: Mapping[str, int]) -> None:
        self.values = dict(values)
        self._elements: dict[str, tuple[str, int]] = {}

    def size(self, coefficient: int, monomial: str) -> Size:
        """`coefficient` bytes for each element of `monomial`, which reads like `T·d/t`.

        Divisors that are 1 in this configuration are left out. Raises KeyError for an unknown quantity.
        """
        if monomial not in self._elements:
            numerator, *divisors = monomial.split("/")
            divisors = [name for name in divisors if self.values[name] != 1]
            elements = prod(self.values[name] for name in numerator.split("·"))
            elements //= prod(self.values[name] for name in divisors)
            self._elements[monomial] = "/".join([numerator, *divisors]), elements
        name, elements = self._elements[monomial]
        return Size(coefficient, name, coefficient * elements)


def as_formula(terms: Mapping[str, int]) -> str:
    """The sum of `coefficient · monomial` as text, largest coefficient first: `64·T·d/t + 8·T`."""
    parts = sorted(((c, m) for m, c in terms.items() if c), key=lambda part: (-part[0], part[1]))
    return " + ".join(f"{coefficient:,}·{monomial}" for coefficient, monomial in parts) or "0"
