"""The tests behind a verdict, on plain numbers: the power of a t test, and exact tests by counting arrangements."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.special import nctdtr, ndtri, stdtrit  # type: ignore[import-untyped]

Floats = NDArray[np.float64]

# Below it no verdict but `no difference` is possible: five pairs of one sign have an exact p of 2/2⁵ = .0625.
MIN_PAIRS = 6
MOST_PAIRS = 1_000_000
POWER = 0.8

# An exact test counts all arrangements up to this many (20 pairs, 11 runs against 11); else it draws some, seeded.
ARRANGEMENTS = 2**20
DRAWS = 2**14


def needed_pairs(sd: float, effect: float, *, confidence: float = 0.95, power: float = POWER) -> int:
    """The fewest pairs whose t test finds `effect` with probability `power` where differences of pairs have the
    standard deviation `sd` (both > 0, in one unit); at least `MIN_PAIRS`, at most `MOST_PAIRS`."""
    if not (sd > 0 and effect > 0):
        raise ValueError(f"sd {sd} and effect {effect} must be positive")
    of_normal = ((float(ndtri((1 + confidence) / 2)) + float(ndtri(power))) * min(sd / effect, MOST_PAIRS)) ** 2
    if of_normal > MOST_PAIRS:
        return MOST_PAIRS
    pairs = max(MIN_PAIRS, math.floor(of_normal))
    while t_power(effect / sd * math.sqrt(pairs), pairs, confidence) < power:
        pairs += 1
    return pairs


def detectable_effect(sd: float, pairs: int, *, confidence: float = 0.95, power: float = POWER) -> float:
    """The smallest effect that the t test of `pairs` (≥ 2) differences with standard deviation `sd` finds with
    probability `power`, in the unit of `sd`."""
    low, high = 0.0, 1.0
    while t_power(high * math.sqrt(pairs), pairs, confidence) < power:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if t_power(middle * math.sqrt(pairs), pairs, confidence) < power else (low, middle)
    return high * sd


def t_power(noncentrality: float, n: int, confidence: float = 0.95) -> float:
    """Probability that a two-sided one-sample t test of `n` values rejects; noncentrality = effect/sd·√n."""
    critical = float(stdtrit(n - 1, (1 + confidence) / 2))
    return 1.0 - float(nctdtr(n - 1, noncentrality, critical)) + float(nctdtr(n - 1, noncentrality, -critical))


def sign_flip_p(differences: Floats) -> float:
    """Two-sided p of the sign-flip test of mean 0: the share of sign patterns whose |sum| is at least the observed
    one (scipy's `permutation_test` with `permutation_type="samples"`); all patterns up to 20 pairs."""
    sizes, observed = np.abs(differences), abs(float(np.sum(differences)))
    if 2 ** len(sizes) <= ARRANGEMENTS:
        sums = np.zeros(1)
        for size in sizes:
            sums = np.concatenate([sums + size, sums - size])
        return _share(sums, observed, float(np.sum(sizes)), exact=True)
    signs = np.random.default_rng(0)
    draws = [float(np.dot(signs.choice((-1.0, 1.0), len(sizes)), sizes)) for _ in range(DRAWS)]
    return _share(np.array(draws), observed, float(np.sum(sizes)), exact=False)


def permutation_p(a: Floats, b: Floats) -> float:
    """Two-sided p of the permutation test of equal means (scipy's `permutation_test`, `"independent"`)."""
    pooled = np.concatenate([a, b])
    centred = pooled - np.mean(pooled)
    observed, size = abs(float(np.sum(centred[: len(a)]))), float(np.sum(np.abs(centred)))
    if math.comb(len(pooled), len(a)) <= ARRANGEMENTS:
        sums = np.array([sum(chosen) for chosen in combinations(centred.tolist(), len(a))])
        return _share(sums, observed, size, exact=True)
    shuffled = np.random.default_rng(0)
    draws = [float(np.sum(shuffled.permutation(centred)[: len(a)])) for _ in range(DRAWS)]
    return _share(np.array(draws), observed, size, exact=False)


def _share(sums: Floats, observed: float, size: float, *, exact: bool) -> float:
    """The share of |sums| ≥ observed, with room for rounding; of a sample, the observed one counts too."""
    hits = int(np.count_nonzero(np.abs(sums) >= observed - 1e-12 * size))
    return hits / len(sums) if exact else (hits + 1) / (len(sums) + 1)
