"""How far the verdicts of probes can be trusted, on simulated experiments: false positives, power, order of trials.

    python benchmarks/probe_statistics.py [--experiments 1000] [--seed 1]

Prints the tables of docs/benchmarks.md, "Probe statistics" (about a minute). A simulated run has steps whose noise
is autocorrelated, an effect of the run itself (another place in memory, other clocks) and its part of a linear drift
over the session: what makes a test over all steps, or AAABBB, find differences that are not there.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter  # type: ignore[import-untyped]
from scipy.stats import mannwhitneyu, ttest_ind  # type: ignore[import-untyped]

from probes.plan import Arm, order
from probes.stats import Comparison, compare_pairs, compare_unpaired, correct, detectable_effect_pct, verdict_of

Floats = NDArray[np.float64]
Order = Callable[[int, int], list[Arm]]


@dataclass(frozen=True, slots=True)
class Rig:
    """A simulated machine. Standard deviations, drift (over the whole session) and effects are shares of the step
    time; step noise is AR(1) with coefficient `phi` and stationary deviation `step_sd`."""

    steps: int = 50
    phi: float = 0.7
    step_sd: float = 0.02
    run_sd: float = 0.003
    drift: float = 0.03
    step_time_ms: float = 165.0


def blocks(pairs: int, seed: int) -> list[Arm]:
    return [trial.arm for trial in order(pairs, seed)]


def one_after_the_other(pairs: int, seed: int) -> list[Arm]:
    """AAABBB, as when an arm is finished before the other is begun."""
    first: list[Arm] = ["A"] * pairs
    return first + ["B"] * pairs


def session(rig: Rig, arms: Sequence[Arm], effect: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Step times (ms) of the runs of A and of B, [run, step], B slower by `effect`, run in the given order."""
    runs = len(arms)
    shocks = rng.standard_normal((runs, rig.steps)) * rig.step_sd * np.sqrt(1 - rig.phi**2)
    shocks[:, 0] = rng.standard_normal(runs) * rig.step_sd  # starts in the stationary distribution
    noise = lfilter([1.0], [1.0, -rig.phi], shocks, axis=1)
    when = (np.arange(runs)[:, None] + np.arange(rig.steps)[None, :] / rig.steps) / runs
    is_b = np.array([arm == "B" for arm in arms])
    of_run = np.exp(rng.standard_normal(runs) * rig.run_sd) * np.where(is_b, 1 + effect, 1.0)
    times = rig.step_time_ms * of_run[:, None] * (1 + rig.drift * when) * (1 + noise)
    return times[~is_b], times[is_b]


def step_time(a: Floats, b: Floats) -> Comparison:
    """As an experiment reduces runs: the median over steps is the trial's number."""
    return compare_pairs(
        "step_wall_ns", np.median(a, axis=1).tolist(), np.median(b, axis=1).tolist(), better="lower", scale="ratio"
    )


def comparisons(
    rig: Rig, pairs: int, effect: float, experiments: int, seed: int, by: Order = blocks
) -> list[Comparison]:
    """The step time of `experiments` simulated experiments; the same for the same arguments, and independent of those
    for others."""
    rng = np.random.default_rng([seed, pairs, rig.steps, *(round(1e6 * x) for x in (rig.run_sd, rig.drift, effect))])
    return [step_time(*session(rig, by(pairs, number), effect, rng)) for number in range(experiments)]


def decided(found: Sequence[Comparison]) -> int:
    return sum(item.verdict in ("better", "worse") for item in found)


def false_positives(experiments: int, seed: int) -> None:
    print("\nA/A: share of experiments that find a difference (8 pairs, 50 steps, run sd 0.3 %)\n")
    print("| order | drift | all steps, Welch | all steps, Mann-Whitney | runs, Welch | paired t | verdict |")
    print("|---|---|---|---|---|---|---|")
    for name, by in (("AAABBB", one_after_the_other), ("ABBA/BAAB", blocks)):
        for drift in (0.0, 0.03):
            rig, rng = Rig(drift=drift), np.random.default_rng([seed, len(name), round(1e6 * drift)])
            counts: Counter[str] = Counter()
            for number in range(experiments):
                a, b = session(rig, by(8, number), 0.0, rng)
                paired = step_time(a, b)
                counts["steps t"] += ttest_ind(a.ravel(), b.ravel(), equal_var=False).pvalue < 0.05
                counts["steps u"] += mannwhitneyu(a.ravel(), b.ravel()).pvalue < 0.05
                runs = compare_unpaired(
                    "x", np.median(a, 1).tolist(), np.median(b, 1).tolist(), better="lower", scale="ratio"
                )
                counts["runs t"] += (runs.p_value or 0.0) < 0.05
                counts["paired t"] += (paired.p_value or 0.0) < 0.05
                counts["verdict"] += paired.verdict in ("better", "worse")
            shares = [counts[key] / experiments for key in ("steps t", "steps u", "runs t", "paired t", "verdict")]
            print(f"| {name} | {drift:.0%} | " + " | ".join(f"{100 * share:.1f} %" for share in shares) + " |")


def power(experiments: int, seed: int) -> None:
    print(
        "\nVerdicts by true effect (drift 3 %, threshold 1 %); sd: of a run's median, steps and run effect together\n"
    )
    print(
        "| run effect sd | steps | sd | pairs | A/A: decided | no difference | +1 %: worse | if the estimate had to "
        "reach 1 % | +2 %: worse |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for run_sd in (0.003, 0.005, 0.01):
        for steps in (50, 200):
            rig = Rig(run_sd=run_sd, steps=steps)
            sd = run_median_sd(rig, seed)
            for pairs in (6, 8, 12, 16):
                none, one, two = (comparisons(rig, pairs, e, experiments, seed) for e in (0.0, 0.01, 0.02))
                cells = [
                    decided(none),
                    sum(item.verdict == "no difference" for item in none),
                    sum(item.verdict == "worse" for item in one),
                    sum(item.verdict == "worse" and item.effect >= 1 for item in one),
                    sum(item.verdict == "worse" for item in two),
                ]
                shares = " | ".join(f"{100 * cell / experiments:.1f} %" for cell in cells)
                print(f"| {run_sd:.1%} | {steps} | {sd:.2%} | {pairs} | {shares} |")


def run_median_sd(rig: Rig, seed: int) -> float:
    """Of the logarithm of a run's median step time, without drift."""
    a, _ = session(replace(rig, drift=0.0), ["A"] * 4000, 0.0, np.random.default_rng(seed))
    return float(np.std(np.log(np.median(a, axis=1)), ddof=1))


def several_metrics(experiments: int, seed: int) -> None:
    print("\nA/A with four more metrics (noise 0.3, 1, 3, 5 %; 8 pairs): share with any of them, and with the overall")
    print("verdict, better or worse\n")
    print("| run effect sd | a further metric, uncorrected | corrected (Holm) | overall verdict |")
    print("|---|---|---|---|")
    for run_sd in (0.003, 0.005, 0.01):
        rng = np.random.default_rng([seed, round(1e6 * run_sd)])
        counts: Counter[str] = Counter()
        for number in range(experiments):
            raw = [step_time(*session(Rig(run_sd=run_sd), blocks(8, number), 0.0, rng))]
            for noise in (0.003, 0.01, 0.03, 0.05):
                a, b = (np.exp(noise * rng.standard_normal(8)).tolist() for _ in "AB")
                raw.append(compare_pairs(f"noise {noise}", a, b, better="lower", scale="ratio"))
            corrected = correct(raw, "step_wall_ns")
            counts["raw"] += decided(raw[1:]) > 0
            counts["corrected"] += decided(corrected[1:]) > 0
            counts["overall"] += verdict_of(corrected, "step_wall_ns") in ("better", "worse")
        shares = (f"{100 * counts[key] / experiments:.1f} %" for key in ("raw", "corrected", "overall"))
        print(f"| {run_sd:.1%} | " + " | ".join(shares) + " |")


def detectable(experiments: int, seed: int) -> None:
    print("\nSmallest effect found with 80 % probability, as A/A experiments of 6 pairs state it (median of them, and")
    print("the middle 80 %), and how often such an effect was found (200 steps, drift 0)\n")
    print("| run effect sd | pairs | stated | middle 80 % | t test finds the median |")
    print("|---|---|---|---|---|")
    for run_sd in (0.003, 0.005, 0.01):
        rig = Rig(run_sd=run_sd, steps=200, drift=0.0)
        rng = np.random.default_rng([seed, round(1e6 * run_sd)])
        sessions = [session(rig, blocks(6, number), 0.0, rng) for number in range(experiments)]
        medians: list[Any] = [list(zip(np.median(a, 1), np.median(b, 1), strict=True)) for a, b in sessions]
        for pairs in (6, 8, 12):
            stated = np.quantile([detectable_effect_pct(item, pairs) for item in medians], (0.1, 0.5, 0.9))
            found = comparisons(rig, pairs, float(stated[1]) / 100, experiments, seed)
            share = sum((item.p_value or 0.0) < 0.05 for item in found) / experiments
            print(f"| {run_sd:.1%} | {pairs} | {stated[1]:.2f} % | {stated[0]:.2f}–{stated[2]:.2f} % | {share:.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--experiments", type=int, default=1000, help="simulated experiments per row")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for table in (false_positives, power, several_metrics, detectable):
        table(arguments.experiments, arguments.seed)


if __name__ == "__main__":
    with warnings.catch_warnings(action="error"):
        main()
