"""Verdicts: against scipy, on hand-made trials, and on simulated experiments (as benchmarks/probe_statistics.py)."""

import importlib.util
import math
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy.stats import binom, permutation_test, ttest_1samp, ttest_ind  # type: ignore[import-untyped]

from harness.sources import find_sources
from harness.trace import analyse
from probes.inference import needed_pairs, permutation_p, sign_flip_p, t_power
from probes.stats import Comparison, Scale, compare_pairs, compare_unpaired, correct, detectable_effect_pct, verdict_of

MIB = 2**20
A = [100.0, 100.3, 99.8, 100.1, 99.9, 100.2, 100.4, 99.7]


def times(a: list[float], b: list[float], **settings: float) -> Comparison:
    return compare_pairs("step_wall_ns", a, b, better="lower", scale="ratio", **settings)


def scaled(percent: float, jitter: float = 0.05) -> list[float]:
    """A's trials, slower by `percent`, with a jitter (percent) of alternating sign."""
    return [value * (1 + (percent + jitter * (-1) ** k) / 100) for k, value in enumerate(A)]


# Against scipy


@pytest.mark.parametrize("n", [2, 3, 6, 8, 11])
def test_interval_and_p_values_are_scipys(n: int) -> None:
    rng = np.random.default_rng(n)
    a, b = np.exp(0.01 * rng.standard_normal(n)), np.exp(0.004 + 0.01 * rng.standard_normal(n))
    found = times(a.tolist(), b.tolist())
    ratios = np.log(b / a)
    expected = ttest_1samp(ratios, 0)
    interval, inner = expected.confidence_interval(0.95), expected.confidence_interval(0.90)
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    assert (found.ci_low_pct, found.ci_high_pct) == pytest.approx([100 * math.expm1(x) for x in interval], rel=1e-9)
    assert (found.equivalence_low, found.equivalence_high) == pytest.approx([100 * math.expm1(x) for x in inner])
    exact = permutation_test((ratios,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=True)
    assert found.sign_flip_p == pytest.approx(exact.pvalue)
    assert found.effect_pct == pytest.approx(100 * (found.b - found.a) / found.a)


@pytest.mark.parametrize(("n", "m"), [(2, 2), (3, 3), (4, 7)])
def test_unpaired_is_welch_with_an_exact_permutation_test(n: int, m: int) -> None:
    rng = np.random.default_rng(n * m)
    a, b = rng.uniform(30, 50, n), rng.uniform(35, 55, m)
    found = compare_unpaired("overlap_pct", a.tolist(), b.tolist(), better="higher", scale="points")
    expected = ttest_ind(b, a, equal_var=False)
    interval = expected.confidence_interval(0.95)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert (found.ci_low, found.ci_high) == pytest.approx((interval.low, interval.high))
    exact = permutation_test(
        (b, a),
        lambda x, y, axis: np.abs(np.mean(x, axis) - np.mean(y, axis)),
        n_resamples=np.inf,
        alternative="greater",
    )
    assert found.sign_flip_p == pytest.approx(exact.pvalue)


def test_exact_tests_with_many_runs_draw_and_agree_with_the_t_test() -> None:
    rng = np.random.default_rng(4)
    differences = 0.5 + rng.standard_normal(40)
    assert sign_flip_p(differences) == pytest.approx(ttest_1samp(differences, 0).pvalue, abs=0.01)
    a, b = rng.standard_normal(30), 0.6 + rng.standard_normal(30)
    assert permutation_p(a, b) == pytest.approx(ttest_ind(a, b).pvalue, abs=0.01)


def test_power_is_that_of_simulated_t_tests() -> None:
    samples = 0.8 + np.random.default_rng(2).standard_normal((20_000, 8))
    share = float(np.mean(ttest_1samp(samples, 0, axis=1).pvalue < 0.05))
    assert t_power(0.8 * math.sqrt(8), 8) == pytest.approx(share, abs=0.01)


def test_needed_pairs_are_the_fewest_with_the_power() -> None:
    for ratio in (0.3, 0.7, 1.0):
        n = needed_pairs(1.0, ratio)
        assert t_power(ratio * math.sqrt(n), n) >= 0.8 > t_power(ratio * math.sqrt(n - 1), n - 1)
    assert needed_pairs(1e30, 1e-300) == 1_000_000, "no end"
    assert needed_pairs(0.01, 1.0) == 6, "fewer can never be decided by the exact test"
    assert needed_pairs(50.0, 1.0) == pytest.approx((1.96 + 0.8416) ** 2 * 50**2, rel=1e-3)


@pytest.mark.parametrize(
    ("run_sd", "pairs", "percent"),
    [(0.003, 6, 0.60), (0.003, 8, 0.49), (0.005, 8, 0.82), (0.01, 8, 1.63), (0.01, 12, 1.26)],
)
def test_detectable_effect_of_a_rig(run_sd: float, pairs: int, percent: float) -> None:
    """The table of the reference simulation; A/A pairs whose log ratios have a standard deviation of √2·run sd."""
    size = run_sd * math.sqrt(2)
    a_a = [(1.0, math.exp(size)), (1.0, math.exp(-size))] * 500
    assert detectable_effect_pct(a_a, pairs) == pytest.approx(percent, abs=0.025)


def test_detectable_effect_is_unbiased_and_bad_rigs_are_refused() -> None:
    rng = np.random.default_rng(9)
    stated = [
        detectable_effect_pct([(1.0, math.exp(x)) for x in 0.005 * math.sqrt(2) * rng.standard_normal(6)], 8)
        for _ in range(400)
    ]
    too_small = sum(percent < 0.82 for percent in stated)
    assert binom.ppf(0.001, 400, 0.5) <= too_small <= binom.ppf(0.999, 400, 0.5)
    assert detectable_effect_pct([(1.0, 1.0)] * 3, 8) == pytest.approx(0)
    with pytest.raises(ValueError, match="arm A has 0"):
        detectable_effect_pct([], 8)
    with pytest.raises(ValueError, match="pairs is 1"):
        detectable_effect_pct([(1.0, 1.0)] * 3, 1)


# The rules


def test_better_and_worse_follow_the_metric() -> None:
    assert times(A, scaled(2)).verdict == "worse"
    assert times(A, scaled(-2)).verdict == "better"
    faster = compare_pairs("tokens_per_s", A, scaled(2), better="higher", scale="ratio")
    assert (faster.verdict, faster.needed_pairs, faster.notes) == ("better", None, ())


def test_no_difference_has_to_be_shown() -> None:
    close = times(A, scaled(0, jitter=0.3))
    assert close.verdict == "no difference"
    wide = times(A, scaled(0, jitter=3))
    assert wide.verdict == "inconclusive"
    assert wide.needed_pairs is not None
    assert wide.needed_pairs > 8
    assert any("pairs would find 1 %" in note for note in wide.notes)


def test_an_effect_below_the_threshold_is_negligible_where_the_interval_says_so() -> None:
    small = times(A, scaled(0.3))
    assert small.verdict == "no difference"
    assert small.ci_low_pct is not None
    assert small.ci_low_pct > 0
    assert small.notes == ("detectable but negligible: within ±1 %",)
    assert times(A, scaled(0.3), threshold=0.1).verdict == "worse"
    may_matter = times(A, scaled(0.9, jitter=0.4))
    assert may_matter.verdict == "worse"
    assert "the effect may not matter" in may_matter.notes[0]


def test_tests_that_disagree_decide_nothing() -> None:
    """Five pairs cannot reach p ≤ .05 by signs; in eight, a few against the rest can leave the exact test above it."""
    few = times(A[:5], scaled(2)[:5])
    assert (few.verdict, few.sign_flip_p) == ("inconclusive", 0.0625)
    assert "too few runs" in few.notes[0]
    values = [102.0, 101.8, 101.2, 102.3, 99.8, 99.4, 100.0, 101.1]
    torn = compare_pairs("x", [100] * 8, values, better="lower", scale="points", threshold=0.5)
    assert torn.p_value is not None
    assert torn.sign_flip_p is not None
    assert torn.p_value < 0.05 < torn.sign_flip_p
    assert torn.verdict == "inconclusive"
    assert "disagree" in torn.notes[0]


def test_memory_that_repeats_to_the_byte_needs_two_pairs() -> None:
    def peaks(a: list[int], b: list[int]) -> Comparison:
        return compare_pairs("peak_active_bytes", a, b, better="lower", scale="bytes")

    more = peaks([352 * MIB] * 2, [3808 * MIB] * 2)
    assert (more.verdict, more.exact, more.effect) == ("worse", True, 3456 * MIB)
    assert more.effect_pct == more.ci_low_pct == more.ci_high_pct == pytest.approx(981.8, abs=0.1)
    assert (more.p_value, more.sign_flip_p) == (None, None)
    assert peaks([352 * MIB] * 2, [352 * MIB] * 2).verdict == "no difference"
    negligible = peaks([352 * MIB] * 2, [352 * MIB + 512] * 2)
    assert negligible.verdict == "no difference"
    assert negligible.effect == 512
    assert "detectable but negligible" in negligible.notes[1]
    varying = peaks([352 * MIB, 353 * MIB], [3808 * MIB, 3807 * MIB])
    assert (varying.verdict, varying.exact) == ("inconclusive", False), "two pairs that vary show nothing"
    assert all(isinstance(value, int) for value in (varying.a, varying.b, varying.effect, varying.ci_low))


def test_shares_compare_in_points() -> None:
    hidden = compare_pairs(
        "overlap_pct",
        [82, 84, 88, 81, 90, 85, 86, 84],
        [30, 33, 41, 28, 44, 35, 36, 31],
        better="higher",
        scale="points",
    )
    assert hidden.verdict == "worse"
    assert hidden.effect == pytest.approx(-50.25)
    assert hidden.effect_pct == pytest.approx(100 * -50.25 / 85)
    never = compare_pairs("overlap_pct", [0.0, 0.0], [0.0, 0.0], better="higher", scale="points")
    assert (never.verdict, never.effect, never.effect_pct) == ("no difference", 0, None)


# Input that is not what it should be


@pytest.mark.parametrize(
    ("a", "b", "scale", "says"),
    [
        ([1.0], [1.0], "ratio", "arm A has 1 of the at least 2 trials"),
        ([], [], "ratio", "arm A has 0"),
        ([1.0, 2.0], [1.0, 2.0, 3.0], "ratio", "2 trials of A and 3 of B"),
        ([1.0, 0.0], [1.0, 1.0], "ratio", r"trial 2 of arm A is 0\.0: ratios need positive"),
        ([1.0, 1.0], [1.0, -1.0], "points", "trial 2 of arm B is -1.0: it cannot be negative"),
        ([1.0, math.nan], [1.0, 1.0], "bytes", "trial 2 of arm A is nan"),
        ([1.0, 1.0], [math.inf, 1.0], "bytes", "trial 1 of arm B is inf"),
        ([1.0, None], [1.0, 1.0], "points", "trial 2 of arm A is None"),
    ],
)
def test_bad_trials_are_named_in_one_line(a: list[float], b: list[float], scale: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        compare_pairs("m", a, b, better="lower", scale=scale)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_settings_that_make_no_sense_are_refused() -> None:
    for threshold in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="threshold"):
            times(A, A, threshold=threshold)
    for confidence in (0.0, 0.5, 1.0, 95):
        with pytest.raises(ValueError, match="confidence"):
            times(A, A, confidence=confidence)


def test_differences_without_variance_decide_nothing() -> None:
    found = times(A, [1.02 * value for value in A])
    assert (found.verdict, found.p_value, found.ci_low_pct) == ("inconclusive", None, None)
    assert "same difference" in found.notes[0]
    assert found.effect_pct == pytest.approx(2)


def test_no_input_makes_nan_or_infinity() -> None:
    rng = np.random.default_rng(8)
    extremes = [0.0, 5e-324, 1e-9, 1.0, 1 + 1e-15, 1e9, 2.0**53, 1e30]
    scales: tuple[Scale, ...] = ("ratio", "points", "bytes")
    seen = set()
    for _ in range(600):
        n, scale = int(rng.integers(2, 9)), scales[rng.integers(3)]
        a, b = rng.choice(extremes[scale == "ratio" :], (2, n)).tolist()
        for compare in (compare_pairs, compare_unpaired):
            found = compare("m", a, b, better="lower", scale=scale)
            seen.add(found.verdict)
            numbers = [value for value in asdict(found).values() if isinstance(value, float)]
            assert all(math.isfinite(value) for value in numbers), found
    assert {"inconclusive", "no difference"} <= seen


# Several metrics


def made(metric: str, p_value: float | None, verdict: str = "worse") -> Comparison:
    return replace(times(A, scaled(2)), metric=metric, p_value=p_value, verdict=verdict)  # type: ignore[arg-type]


def test_holm_over_the_metrics_besides_the_primary_one() -> None:
    found = correct(
        [made("time", 0.04), made("x", 0.010), made("y", 0.030), made("z", 0.021), made("bytes", None)], "time"
    )
    # Holm: .010·3 = .03, .021·2 = .042, .030·1 raised to .042: all survive; the primary and the exact stay.
    assert [item.verdict for item in found] == ["worse"] * 5
    found = correct(
        [made("time", 0.04), made("x", 0.010), made("y", 0.030), made("z", 0.026), made("bytes", None)], "time"
    )
    # .026·2 = .052 fails, and so does .030 after it, though .030·1 < .05.
    assert [item.verdict for item in found] == ["worse", "worse", "inconclusive", "inconclusive", "worse"]
    assert "Holm's correction over 3 metrics (p 0.052)" in found[2].notes[-1]
    assert found[2].needed_pairs is not None
    with pytest.raises(ValueError, match="primary metric loss is not among"):
        correct(found, "loss")


@pytest.mark.parametrize(
    ("primary", "others", "overall"),
    [
        ("better", ["worse", "worse"], "better"),
        ("inconclusive", ["better"], "inconclusive"),
        ("no difference", ["no difference", "inconclusive"], "no difference"),
        ("no difference", ["better", "inconclusive"], "better"),
        ("no difference", ["better", "worse"], "inconclusive"),
    ],
)
def test_the_primary_metric_decides(primary: str, others: list[str], overall: str) -> None:
    items = [made("time", 0.01, primary), *(made(f"m{k}", 0.01, verdict) for k, verdict in enumerate(others))]
    assert verdict_of(items, "time") == overall


# Simulated experiments: what the issue asks for


@pytest.fixture(scope="module")
def simulation() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "probe_statistics.py"
    spec = importlib.util.spec_from_file_location("probe_statistics", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


EXPERIMENTS = 1000


@pytest.mark.parametrize("drift", [0.0, 0.03])
@pytest.mark.parametrize("run_sd", [0.003, 0.01])
def test_at_most_one_a_a_experiment_in_twenty_finds_a_difference(
    simulation: ModuleType, drift: float, run_sd: float
) -> None:
    rig = simulation.Rig(drift=drift, run_sd=run_sd)
    assert (rig.phi, rig.step_sd, rig.steps) == (0.7, 0.02, 50)
    found = simulation.comparisons(rig, 8, 0.0, EXPERIMENTS, seed=1)
    assert simulation.decided(found) <= 0.05 * EXPERIMENTS
    # The t test itself is at its level, neither idle nor too eager: within what 1,000 draws at 5 % give.
    by_t = sum(item.p_value < 0.05 for item in found)
    assert by_t <= binom.ppf(0.999, EXPERIMENTS, 0.05)
    if drift == 0:
        assert by_t >= binom.ppf(0.001, EXPERIMENTS, 0.05)


def test_one_percent_is_found_at_the_default_repeats(simulation: ModuleType) -> None:
    """Eight pairs, 200 measured steps, run effect sd 0.3 %, drift 3 %, the default threshold of 1 %."""
    rig = simulation.Rig(run_sd=0.003, steps=200, drift=0.03)
    found = simulation.comparisons(rig, 8, 0.01, EXPERIMENTS, seed=2)
    verdicts = [item.verdict for item in found]
    assert verdicts.count("worse") >= 0.8 * EXPERIMENTS
    assert verdicts.count("better") == 0
    # An effect as large as the threshold is called none at most as often as two one-sided tests allow, 5 %.
    assert verdicts.count("no difference") <= binom.ppf(0.999, EXPERIMENTS, 0.05)
    covered = sum(item.ci_low_pct <= 1 <= item.ci_high_pct for item in found)
    assert covered >= binom.ppf(0.001, EXPERIMENTS, 0.95)


def test_more_pairs_find_more(simulation: ModuleType) -> None:
    rig = simulation.Rig(run_sd=0.01, steps=200)
    found = [simulation.decided(simulation.comparisons(rig, n, 0.015, 300, seed=3)) for n in (6, 10, 16)]
    assert all(more > fewer + 15 for fewer, more in pairwise(found)), found


def test_drift_fools_one_arm_after_the_other_and_not_the_blocks(simulation: ModuleType) -> None:
    rig = simulation.Rig(drift=0.03)
    fooled = simulation.comparisons(rig, 8, 0.0, 200, seed=4, by=simulation.one_after_the_other)
    assert simulation.decided(fooled) > 100
    held = simulation.comparisons(rig, 8, 0.0, 200, seed=4)
    assert simulation.decided(held) <= binom.ppf(0.999, 200, 0.05)


def test_correction_keeps_further_metrics_at_five_percent() -> None:
    rng = np.random.default_rng(6)
    raw = corrected = 0
    for _ in range(500):
        found = [
            compare_pairs(
                name,
                np.exp(0.05 * rng.standard_normal(8)).tolist(),
                np.exp(0.05 * rng.standard_normal(8)).tolist(),
                better="lower",
                scale="ratio",
            )
            for name in ("time", "a", "b", "c", "d")
        ]
        raw += any(item.verdict != "inconclusive" for item in found[1:])
        corrected += any(item.verdict != "inconclusive" for item in correct(found, "time")[1:])
    assert raw > binom.ppf(0.999, 500, 0.05), "without correction four metrics find too much"
    assert corrected <= 0.05 * 500


# Recordings made outside an experiment


@pytest.mark.shared_data
def test_c63_two_arms_of_three_recordings_with_the_same_overlap(cases: Path) -> None:
    arms = {
        arm: [
            entry["window"]["overlap_pct"]
            for path in sorted((cases / "files" / "e12-ab-runs").glob(f"{arm}_run*.json"))
            for entry in analyse(find_sources(path))["ranks"]
        ]
        for arm in "AB"
    }
    assert [sorted(values) for values in arms.values()] == [[39.0, 40.0, 41.0]] * 2
    found = compare_unpaired("overlap_pct", arms["A"], arms["B"], better="higher", scale="points")
    assert (found.a, found.b, found.verdict) == (40, 40, "no difference")
    assert any("two one-sided tests" in note for note in found.notes)
