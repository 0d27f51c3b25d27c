"""From one number per trial to a verdict: is B better than A, worse, or shown not to differ by what matters?

Steps of one run are correlated and runs differ among themselves, so a trial (a fresh process tree) is one number and
the trials of a pair, run next to each other, are compared: a paired t interval on log ratios (times) or differences
(shares, bytes). An exact test without a distribution's assumptions has to agree. Memory that every trial of an arm
repeats to the byte needs no statistics.

How the intervals and a threshold (the smallest effect that matters) make a verdict, the same for every scale:

- `no difference`: two one-sided tests (Schuirmann 1987) show |effect| < threshold: the 90 % interval lies within
  ±threshold. Where 0 is outside the 95 % interval, the effect is real but negligible, and a note says so.
- `better`, `worse`: otherwise, the 95 % interval excludes 0 and the exact test agrees.
- `inconclusive`: otherwise; `needed_pairs` says how many pairs would probably decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtri, stdtr, stdtrit  # type: ignore[import-untyped]

from harness.compare.metrics import Better
from harness.compare.runs import Verdict
from harness.text import size
from probes.inference import MOST_PAIRS, POWER, detectable_effect, needed_pairs, permutation_p, sign_flip_p

Scale = Literal["ratio", "points", "bytes"]
Floats = NDArray[np.float64]

UNITS: dict[Scale, str] = {"ratio": "%", "points": "points", "bytes": "bytes"}

# The smallest effect that matters, unless the caller says otherwise; for bytes the smaller of the two.
THRESHOLD_PCT = 1.0
THRESHOLD_POINTS = 2.0
THRESHOLD_BYTES = 64 * 2**20

# Differences that vary by less than this share of the values differ by rounding only.
ROUNDING = 1e-11
LARGEST = 1e30


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One metric of both arms.

    `a`, `b`: means over trials, geometric ones for scale `ratio`, so that `effect_pct` = 100·(b − a)/a throughout
    (None where a is 0); bytes are rounded to whole ones. `effect`, `ci_low`, `ci_high`, `equivalence_low`,
    `equivalence_high`, `threshold`: in the scale's `unit` (percent, points, bytes); the first interval is for
    `confidence`, the second for the two one-sided tests, 2·confidence − 1. `sd`: of the differences between pairs, as
    natural logarithms for `ratio`. `p_value`: t test; `sign_flip_p`: exact test (for unpaired runs, of permutations).
    Both None in `exact` mode, where every trial of an arm gave the same value. `needed_pairs`: None unless the verdict
    is inconclusive and the differences vary. `n_pairs`: None for unpaired runs.
    """

    metric: str
    a: float
    b: float
    better: Better
    scale: Scale
    unit: str
    effect_pct: float | None
    ci_low_pct: float | None
    ci_high_pct: float | None
    effect: float
    ci_low: float | None
    ci_high: float | None
    equivalence_low: float | None
    equivalence_high: float | None
    threshold: float
    confidence: float
    sd: float
    p_value: float | None
    sign_flip_p: float | None
    n_pairs: int | None
    verdict: Verdict
    exact: bool
    needed_pairs: int | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The item of `metrics` in `meshscope probe --json`."""
        return asdict(self) | {"notes": list(self.notes)}


def difference(a: float, b: float, scale: Scale) -> float:
    """B against A in the scale's unit: percent of A, points or bytes."""
    return 100 * (b - a) / a if scale == "ratio" else b - a


def compare_pairs(
    metric: str,
    a: Sequence[float],
    b: Sequence[float],
    *,
    better: Better,
    scale: Scale,
    threshold: float | None = None,
    confidence: float = 0.95,
) -> Comparison:
    """Compares trials by pairs: `a[k]` and `b[k]` ran next to each other, one number each.

    `threshold` is in percent, points or bytes by the `scale`; None: 1 %, 2 points, or the smaller of 1 % of A and
    64 MiB. Raises ValueError (one line) for unequal lengths, fewer than two pairs, values that are missing, not
    finite or negative, and zeros where ratios are asked for.
    """
    of_a, of_b = _checked(metric, "A", a, scale), _checked(metric, "B", b, scale)
    if len(of_a) != len(of_b):
        raise ValueError(f"{metric}: {len(of_a)} trials of A and {len(of_b)} of B do not make pairs")
    frame = _Frame.of(metric, better, scale, of_a, of_b, threshold, confidence, n_pairs=len(of_a))
    if np.ptp(of_a) == np.ptp(of_b) == 0:
        return frame.exactly()
    differences = _analysed(of_b, scale) - _analysed(of_a, scale)
    n, sd = len(differences), float(np.std(differences, ddof=1))
    if sd <= _rounding(of_a, of_b, scale):
        return frame.undecided("every pair has the same difference though the trials vary: not independent runs")
    mean, se = float(np.mean(differences)), sd / math.sqrt(n)
    return frame.decided(mean, se, n - 1.0, sd, sign_flip_p(differences), least_p=2.0 ** (1 - n))


def compare_unpaired(
    metric: str,
    a: Sequence[float],
    b: Sequence[float],
    *,
    better: Better,
    scale: Scale,
    threshold: float | None = None,
    confidence: float = 0.95,
) -> Comparison:
    """Compares runs that were not planned as pairs, as found on a disk: Welch's t interval (scipy's `ttest_ind` with
    `equal_var=False`) and an exact permutation test. A drift between the arms cannot be told from an effect, and a
    note says so. Arguments and errors as in `compare_pairs`, the lengths may differ."""
    of_a, of_b = _checked(metric, "A", a, scale), _checked(metric, "B", b, scale)
    frame = _Frame.of(metric, better, scale, of_a, of_b, threshold, confidence, n_pairs=None)
    if np.ptp(of_a) == np.ptp(of_b) == 0:
        return frame.exactly()
    one, two = _analysed(of_a, scale), _analysed(of_b, scale)
    var_a, var_b = float(np.var(one, ddof=1)), float(np.var(two, ddof=1))
    sd = math.sqrt(var_a + var_b)
    if sd <= _rounding(of_a, of_b, scale):
        return frame.undecided("the runs of each arm differ by rounding only: not independent runs")
    se_squared = var_a / len(one) + var_b / len(two)
    share = var_a / len(one) / se_squared
    df = 1 / (share**2 / (len(one) - 1) + (1 - share) ** 2 / (len(two) - 1))
    least_p = 2 / math.comb(len(one) + len(two), len(one))
    mean, se = float(np.mean(two) - np.mean(one)), math.sqrt(se_squared)
    found = frame.decided(mean, se, df, sd, permutation_p(one, two), least_p)
    return replace(found, notes=(*found.notes, "not paired: a drift between the arms would look like an effect"))


def correct(comparisons: Sequence[Comparison], primary: str) -> list[Comparison]:
    """Holm's correction (1979) over the metrics besides the primary one, in the order given.

    A better or worse that does not survive becomes inconclusive. Exact comparisons have no error to correct.
    Raises ValueError where no comparison is of the primary metric.
    """
    _of(comparisons, primary)
    tested = [item for item in comparisons if item.metric != primary and item.p_value is not None]
    adjusted: dict[str, float] = {}
    running = 0.0
    for rank, item in enumerate(sorted(tested, key=lambda item: item.p_value or 0.0)):
        running = max(running, min(1.0, (len(tested) - rank) * (item.p_value or 0.0)))
        adjusted[item.metric] = running
    return [_survivor(item, adjusted.get(item.metric), len(tested)) for item in comparisons]


def verdict_of(comparisons: Sequence[Comparison], primary: str) -> Verdict:
    """The verdict on the setting: that of the primary metric, which was named before the experiment.

    Where that one is shown not to differ, the other metrics decide if they agree: memory saved at equal speed is
    better; some better and some worse is inconclusive. This second chance must not cost the 5 %: metrics that are not
    exact have to pass at half the level, by Bonferroni's correction. Raises ValueError as `correct` does.
    """
    main = _of(comparisons, primary).verdict
    if main != "no difference":
        return main
    tested = sum(item.p_value is not None for item in comparisons) - 1
    others = {
        item.verdict
        for item in comparisons
        if item.verdict in ("better", "worse")
        and (item.p_value is None or 2 * tested * item.p_value <= 1 - item.confidence)
    }
    return others.pop() if len(others) == 1 else ("inconclusive" if others else "no difference")


def detectable_effect_pct(
    a_a_pairs: Sequence[tuple[float, float]], pairs: int, *, confidence: float = 0.95, power: float = POWER
) -> float:
    """What a rig can see: the smallest effect (percent) that `pairs` pairs find with probability `power`, from the
    pairs of an experiment with the same arm twice. The deviation is estimated without bias of the median (χ²), so
    that half of such statements are too small: six A/A pairs know it to about ±35 %. Raises ValueError as
    `compare_pairs` does."""
    if pairs < 2:
        raise ValueError(f"pairs is {pairs}: an interval needs at least 2")
    one = _checked("A/A", "A", [pair[0] for pair in a_a_pairs], "ratio")
    two = _checked("A/A", "B", [pair[1] for pair in a_a_pairs], "ratio")
    df, differences = len(one) - 1, np.log(two) - np.log(one)
    sd = float(np.std(differences, ddof=1)) * math.sqrt(df / float(chdtri(df, 0.5)))
    return _percent_of_log(detectable_effect(sd, pairs, confidence=confidence, power=power))


@dataclass(frozen=True, slots=True)
class _Frame:
    """What a comparison states whatever its verdict is."""

    metric: str
    better: Better
    scale: Scale
    a: float
    b: float
    threshold: float
    confidence: float
    n_pairs: int | None

    @classmethod
    def of(
        cls,
        metric: str,
        better: Better,
        scale: Scale,
        a: Floats,
        b: Floats,
        threshold: float | None,
        confidence: float,
        n_pairs: int | None,
    ) -> _Frame:
        if not 0.5 < confidence < 1:
            raise ValueError(f"confidence is {confidence}: it must lie between 0.5 and 1")
        mean_a, mean_b = _mean(a, scale), _mean(b, scale)
        if threshold is None:
            of_bytes = max(1, round(min(THRESHOLD_BYTES, mean_a * THRESHOLD_PCT / 100)))
            threshold = {"ratio": THRESHOLD_PCT, "points": THRESHOLD_POINTS, "bytes": of_bytes}[scale]
        if not (math.isfinite(threshold) and threshold > 0):
            raise ValueError(f"{metric}: the threshold is {threshold}: it must be positive")
        return cls(metric, better, scale, mean_a, mean_b, threshold, confidence, n_pairs)

    def exactly(self) -> Comparison:
        """Every trial of an arm gave the same value: what is seen is the effect, without an interval's width."""
        effect, note = difference(self.a, self.b, self.scale), "exact: all trials of an arm agree"
        if abs(effect) >= self.threshold:
            return self._comparison(self._direction(effect), (note,), effect, (effect,) * 4, exact=True)
        notes = (note, f"detectable but negligible: within ±{self._amount()}") if effect else (note,)
        return self._comparison("no difference", notes, effect, (effect,) * 4, exact=True)

    def undecided(self, note: str) -> Comparison:
        return self._comparison("inconclusive", (note,), difference(self.a, self.b, self.scale), None)

    def decided(self, mean: float, se: float, df: float, sd: float, exact_p: float, least_p: float) -> Comparison:
        """The verdict by the module's rules; `mean`, `se` and `sd` as analysed, `least_p` what the exact test can
        reach at best with so few runs."""
        alpha = 1 - self.confidence
        half = float(stdtrit(df, 1 - alpha / 2)) * se
        tost = float(stdtrit(df, 1 - alpha)) * se
        p_value = 2 * float(stdtr(df, -abs(mean) / se))
        effect = self._unit_of(mean)
        bounds = low, high, inner_low, inner_high = [self._unit_of(mean + x) for x in (-half, half, -tost, tost)]
        real = not low <= 0 <= high
        needed = None
        notes: list[str] = []
        verdict: Verdict = "inconclusive"
        if max(-inner_low, inner_high) < self.threshold:
            verdict = "no difference"
            if real:
                notes.append(f"detectable but negligible: within ±{self._amount()}")
            elif max(-low, high) >= self.threshold:
                notes.append(f"two one-sided tests: {inner_low:+.3g} to {inner_high:+.3g} is within ±{self._amount()}")
        elif real and exact_p <= alpha:
            verdict = self._direction(effect)
            if abs(effect) < self.threshold:
                notes.append(
                    f"the estimate is within ±{self._amount()}, its interval is not: the effect may not matter"
                )
        else:
            needed = self._needed(sd)
            if real and least_p > alpha:
                notes.append(f"too few runs: the exact test cannot reach p ≤ {alpha:.2g} (at best {least_p:.2g})")
            elif real:
                notes.append(f"t test and exact test disagree (p {p_value:.2g} and {exact_p:.2g}): see the single runs")
            notes.append(f"about {needed:,} pairs would find {self._amount()}")
        found = self._comparison(verdict, tuple(notes), effect, bounds)
        return replace(found, sd=sd, p_value=p_value, sign_flip_p=exact_p, needed_pairs=needed)

    def _comparison(
        self,
        verdict: Verdict,
        notes: tuple[str, ...],
        effect: float,
        bounds: Sequence[float] | None,
        *,
        exact: bool = False,
    ) -> Comparison:
        low, high, inner_low, inner_high = [self._whole(bound) for bound in bounds] if bounds else [None] * 4
        return Comparison(
            metric=self.metric,
            a=self._whole(self.a),
            b=self._whole(self.b),
            better=self.better,
            scale=self.scale,
            unit=UNITS[self.scale],
            effect_pct=self._pct(effect),
            ci_low_pct=self._pct(bounds[0] if bounds else None),
            ci_high_pct=self._pct(bounds[1] if bounds else None),
            effect=self._whole(effect),
            ci_low=low,
            ci_high=high,
            equivalence_low=inner_low,
            equivalence_high=inner_high,
            threshold=self.threshold,
            confidence=self.confidence,
            sd=0.0,
            p_value=None,
            sign_flip_p=None,
            n_pairs=self.n_pairs,
            verdict=verdict,
            exact=exact,
            needed_pairs=None,
            notes=notes,
        )

    def _direction(self, effect: float) -> Verdict:
        return "better" if (effect < 0) == (self.better == "lower") else "worse"

    def _needed(self, sd: float) -> int:
        """Pairs for the threshold at 80 % power; where there were as many and chance was against them, as many as
        make an interval that cannot both hold 0 and leave ±threshold (half-width of half the threshold)."""
        effect = math.log1p(self.threshold / 100) if self.scale == "ratio" else self.threshold
        enough = needed_pairs(sd, effect, confidence=self.confidence)
        if self.n_pairs is None or enough > self.n_pairs:
            return enough
        surely = math.ceil((2 * float(stdtrit(self.n_pairs - 1, (1 + self.confidence) / 2)) * sd / effect) ** 2)
        return min(max(surely, self.n_pairs + 1), MOST_PAIRS)

    def _whole(self, value: float) -> float:
        return round(value) if self.scale == "bytes" else value

    def _unit_of(self, analysed: float) -> float:
        return _percent_of_log(analysed) if self.scale == "ratio" else analysed

    def _pct(self, effect: float | None) -> float | None:
        if effect is None or self.scale == "ratio":
            return effect
        share = 100 * effect / self.a if self.a else math.inf
        return share if math.isfinite(share) else None

    def _amount(self) -> str:
        return size(int(self.threshold)) if self.scale == "bytes" else f"{self.threshold:,.4g} {UNITS[self.scale]}"


def _checked(metric: str, arm: str, values: Sequence[float], scale: Scale) -> Floats:
    if len(values) < 2:
        raise ValueError(f"{metric}: arm {arm} has {len(values)} of the at least 2 trials that an interval needs")
    for number, value in enumerate(values, 1):
        if value is None or not math.isfinite(value) or abs(value) > LARGEST:
            raise ValueError(f"{metric}: trial {number} of arm {arm} is {value}: not a number to compare")
        if value < 0 or (value == 0 and scale == "ratio"):
            need = "ratios need positive values" if scale == "ratio" else "it cannot be negative"
            raise ValueError(f"{metric}: trial {number} of arm {arm} is {value}: {need}")
    return np.asarray(values, dtype=np.float64)


def _analysed(values: Floats, scale: Scale) -> Floats:
    return np.log(values) if scale == "ratio" else values


def _mean(values: Floats, scale: Scale) -> float:
    if np.ptp(values) == 0:
        return float(values[0])
    return float(np.exp(np.mean(np.log(values)))) if scale == "ratio" else float(np.mean(values))


def _rounding(a: Floats, b: Floats, scale: Scale) -> float:
    """How far differences can be apart by rounding alone, as analysed."""
    largest = max(float(np.max(np.abs(_analysed(values, scale)))) for values in (a, b))
    return ROUNDING * max(largest, 1.0 if scale == "ratio" else 0.0)


def _percent_of_log(ratio: float) -> float:
    """100·(exp(x) − 1); ratios beyond what a float holds stay at its end."""
    return 100 * math.expm1(min(ratio, 700.0))


def _of(comparisons: Sequence[Comparison], primary: str) -> Comparison:
    found = next((item for item in comparisons if item.metric == primary), None)
    if found is None:
        known = ", ".join(item.metric for item in comparisons) or "none"
        raise ValueError(f"the primary metric {primary} is not among the compared ones: {known}")
    return found


def _survivor(item: Comparison, adjusted_p: float | None, tested: int) -> Comparison:
    if adjusted_p is None or adjusted_p <= 1 - item.confidence or item.verdict not in ("better", "worse"):
        return item
    effect = math.log1p(item.threshold / 100) if item.scale == "ratio" else item.threshold
    note = f"does not survive Holm's correction over {tested} metrics (p {adjusted_p:.2g})"
    needed = needed_pairs(item.sd, effect, confidence=1 - (1 - item.confidence) / tested)
    return replace(item, verdict="inconclusive", needed_pairs=needed, notes=(*item.notes, note))
