"""What an experiment says, part by part, from what `extract.experiment` holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from dashboard import states, tables
from dashboard.ab import charts
from dashboard.charts import show
from dashboard.pages.compare import VERDICTS
from harness.report.finding import NOT_A_CLUSTER
from harness.text import counted, printable, quantity
from probes.report.amounts import amount, around_zero

Values = Mapping[str, Any]

LOOKS: dict[str, tuple[str, Any]] = {
    **VERDICTS,
    "ignored by this build": ("∅ ignored by this build", "gray"),
    "unavailable in this build": ("∅ unavailable in this build", "gray"),
}
NO_VERDICT: tuple[str, Any] = ("◐ no verdict yet", "orange")


def mode_words(values: Values) -> str:
    """What every caption says of where its figures come from."""
    mode = values["analysis"]["mode"]
    why = ": times are not a cluster's" if mode in NOT_A_CLUSTER else ""
    return f"Mode {mode}{why}."


def head(values: Values) -> None:
    analysis = values["analysis"]
    plan = analysis["experiment"]
    words, colour = NO_VERDICT if values["unfinished"] else LOOKS[analysis["verdict"]]
    ended, planned = len(analysis["trials"]), len(plan["order"])
    st.header(f"{states.escaped(plan['knob'])}: {analysis['verdict'] if not values['unfinished'] else 'not finished'}")
    with st.container(horizontal=True, gap="small"):
        st.badge(words, color=colour)
        st.badge(f"mode {analysis['mode']}", color="orange" if analysis["mode"] in NOT_A_CLUSTER else "blue")
        st.badge(states.escaped(values["name"]), color="gray")
        st.badge(counted(len(plan["arms"]), "arm"), color="gray")
        st.badge(f"{ended} of {counted(planned, 'trial')}" if planned else "no trial", color="gray")
        if not analysis["comparable"]:
            st.badge("✗ not comparable", color="red")
    if why := NOT_A_CLUSTER.get(analysis["mode"]):
        st.caption(f"{why[0].upper()}{why[1:]}.")
    for line in values["failures"]:
        st.error(states.escaped(line), icon=":material/error:")
    if not analysis["comparable"]:
        reasons = [note for note in analysis["notes"] if "not comparable" in note or "refused" in note]
        st.error(
            states.escaped((reasons or ["The arms are not comparable: see the notes"])[0]), icon=":material/error:"
        )


def unfinished(values: Values) -> None:
    """What is left, and why there is no verdict yet."""
    if not values["unfinished"]:
        return
    first, *rest = values["unfinished"]
    why = (
        "The figures below are those so far. No verdict is drawn from them: who may look after every pair and stop "
        "finds a difference where there is none far more often than 5 % of the time."
    )
    lines = "".join(f"\n- {states.escaped(line)}" for line in rest)
    st.warning(f"{states.escaped(first[0].upper() + first[1:])}.{lines}\n\n{why}", icon=":material/hourglass_top:")


def verdict(values: Values) -> None:
    """What is said of each arm, and what that rests on."""
    analysis = values["analysis"]
    st.markdown(f"*{states.escaped(analysis['experiment']['hypothesis'])}*")
    for item in analysis["comparisons"]:
        # What an arm does instead of running is known before the end, all else with the last trial.
        open_yet = values["unfinished"] and item["verdict"] == "inconclusive"
        words, colour = NO_VERDICT if open_yet else LOOKS[item["verdict"]]
        with st.container(border=True, gap="small"):
            with st.container(horizontal=True, gap="small", vertical_alignment="center"):
                st.badge(words, color=colour)
                st.markdown(f"**{states.escaped(item['arm'])}** against {states.escaped(item['baseline'])}")
            st.markdown("  \n".join(states.escaped(line) for line in values["explained"][item["arm"]]))
    if not analysis["comparisons"] and not values["unfinished"]:
        st.caption("No arm was compared.")


def recommended(values: Values) -> None:
    """The setting to use as lines for a shell, with its evidence."""
    best = values["analysis"]["recommended"]
    if best is None:
        if not values["unfinished"] and values["analysis"]["comparisons"]:
            baseline = values["analysis"]["comparisons"][0]["baseline"]
            st.caption(f"No arm is better than {states.escaped(baseline)}: nothing to change.")
        return
    st.subheader("To use it")
    baseline = values["analysis"]["comparisons"][0]["baseline"]
    because = states.escaped(values["because"][best["arm"]])
    st.markdown(f"{states.escaped(best['arm'])} is better than {states.escaped(baseline)}{because}.")
    st.code("\n".join(values["settings"][best["arm"]]), language="sh")
    st.caption(mode_words(values))


def comparisons(values: Values, arm: str) -> None:
    """Every metric of an arm against the baseline."""
    primary = values["analysis"]["experiment"]["primary"]
    found = [item["comparison"] for item in values["paired"] if item["arm"] == arm]
    if not found:
        return
    rows = [
        {
            "metric": one["metric"] + (" (decides)" if one["metric"] == primary else ""),
            "a": quantity(one["metric"], one["a"]),
            "b": quantity(one["metric"], one["b"]),
            "effect": amount(one["effect"], one["unit"]),
            "low": "exact" if one["exact"] else amount(one["ci_low"], one["unit"]),
            "high": "exact" if one["exact"] else amount(one["ci_high"], one["unit"]),
            "threshold": around_zero(one["threshold"], one["unit"]),
            "p": "n/a" if one["p_value"] is None else f"{one['p_value']:.2g}",
            "exact_p": "n/a" if one["sign_flip_p"] is None else f"{one['sign_flip_p']:.2g}",
            "verdict": LOOKS[one["verdict"]][0],
        }
        for one in found
    ]
    baseline = next(item["baseline"] for item in values["paired"])
    headers = {
        "metric": "metric",
        "a": printable(baseline),
        "b": printable(arm),
        "effect": "change",
        "low": f"from ({100 * found[0]['confidence']:.3g} %)",
        "high": "to",
        "threshold": "matters",
        "p": "p",
        "exact_p": "exact p",
    }
    if not values["unfinished"]:
        headers["verdict"] = "verdict"
    tables.show(rows, headers, words=f"Every metric of {arm} against {baseline}")
    pairs = max(one["n_pairs"] or 0 for one in found)
    st.caption(f"{counted(pairs, 'pair')} of trials that ran next to each other. {mode_words(values)}")
    if notes := [f"{one['metric']}: {note}" for one in found for note in one["notes"]]:
        with st.expander(f"{counted(len(notes), 'note')} on these metrics"):
            st.markdown("\n".join(f"- {states.escaped(note)}" for note in notes))


def metrics_of(values: Values) -> list[str]:
    """Those that a picture can be drawn of, the deciding one first. A rehearsal has no times and no overlap."""
    found = dict.fromkeys(item["metric"] for item in (*values["paired"], *values["distributions"]))
    known = [name for name in found if values["analysis"]["mode"] != "rehearsal" or name.endswith("_bytes")]
    primary = values["analysis"]["experiment"]["primary"]
    return sorted(known, key=lambda name: name != primary)


def one_metric(values: Values, metric: str) -> None:
    """The trials of each arm, the differences of the pairs, the order in which they ran; and the same as tables."""
    arms = run_arms(values)
    distributions = [item for item in values["distributions"] if item["metric"] == metric]
    paired = [item for item in values["paired"] if item["metric"] == metric]
    drawn = False
    if paired and all(item["comparison"]["exact"] for item in paired):
        st.caption("Every trial of an arm gave the same value: there is no spread to draw.")
    elif distributions:
        drawn = True
        left, middle, right = st.columns([3, 4, 4], gap="medium")
        with left:
            st.markdown("**Trials of each arm**")
            show(charts.trials(metric, arms, distributions, paired), f"{metric} of the trials of each arm")
        with middle:
            st.markdown("**Difference of each pair**")
            if paired:
                words = f"{metric}: differences of the pairs, their mean, interval and the band that does not matter"
                show(charts.differences(arms, paired), words)
            else:
                st.caption("An interval needs two pairs.")
        with right:
            st.markdown("**In the order in which they ran**")
            show(charts.in_order(metric, arms, distributions, values["order"]), f"{metric} in the order of the trials")
        st.caption(
            "Thin lines join the trials of a pair, grey bars are means. Diamond: mean difference with its interval, "
            "thick that of the two one-sided tests, an arrow where it goes on; grey band: less than matters. A slope "
            f"of all arms over the trials is a drift; ✕ is a run that does not count. {mode_words(values)}"
        )
    with st.expander("Pairs and trials as tables", expanded=not drawn):
        pairs_and_trials(metric, distributions, paired)


def pairs_and_trials(metric: str, distributions: Sequence[Values], paired: Sequence[Values]) -> None:
    left, right = st.columns(2, gap="medium")
    unit = {"bytes": "difference_bytes", "points": "difference_points"}
    with left:
        for item in paired:
            field = unit.get(item["comparison"]["unit"], "difference_pct")
            rows = [
                {"pair": pair["pair"], f"a_{metric}": pair["a"], f"b_{metric}": pair["b"], field: pair["difference"]}
                for pair in item["pairs"]
            ]
            arms = {f"a_{metric}": printable(item["baseline"]), f"b_{metric}": printable(item["arm"])}
            label = "difference, points" if field.endswith("points") else "difference"
            words = f"{metric}, {item['arm']} against {item['baseline']}, pair by pair"
            tables.show(rows, {"pair": "pair", **arms, field: label}, words=words)
    with right:
        points = [
            {"trial": point["index"], "arm": point["arm"], "pair": point["pair"], metric: point["value"]}
            for item in distributions
            for point in item["points"]
        ]
        rows = sorted(points, key=lambda row: row["trial"])
        headers = {"trial": "trial", "arm": "arm", "pair": "pair", metric: metric}
        tables.show(rows, headers, words=f"{metric} in the order of the trials")


def run_arms(values: Values) -> list[str]:
    """The arms that trials are spent on, the baseline first."""
    plan = values["analysis"]["experiment"]
    return [arm["name"] for arm in plan["arms"] if arm["name"] not in plan["not_run"]]


def differing(values: Values) -> None:
    """What the arms differ in and nothing else; then those that did not run, and why."""
    st.subheader("What the arms differ in")
    arms = [arm["name"] for arm in values["analysis"]["experiment"]["arms"]]
    keys = {f"arm{place}": arm for place, arm in enumerate(arms)}
    rows = [
        {"what": item["what"], **{key: item["values"][arm] for key, arm in keys.items()}, "declared": item["declared"]}
        for item in values["differing"]
        if len(set(item["values"].values())) > 1
    ]
    if rows:
        names = {key: printable(arm) for key, arm in keys.items()}
        tables.show(rows, {"what": "", **names, "declared": ""}, words="What the arms differ in")
        st.caption("Everything else that the middle trials of the arms state is the same.")
    else:
        st.caption("The arms are one setting: this is an A/A. What it finds is the spread of this machine.")
    for name, known in values["analysis"]["experiment"]["not_run"].items():
        words = f"{name}: {known['verdict']}, known without a trial: {known['reason']}"
        st.info(states.escaped(words), icon=":material/info:")


def sees(values: Values) -> None:
    """Of an A/A: what this machine can tell apart."""
    found = values["analysis"]["sees_pct"]
    if not found:
        return
    st.subheader("What this machine can see")
    pairs = values["analysis"]["experiment"]["pairs"]
    rows = [{"metric": name, "change_pct": value} for name, value in found.items()]
    words = f"The smallest change that {counted(pairs, 'pair')} find four times in five"
    tables.show(rows, {"metric": "metric", "change_pct": "change"}, words=words)
    st.caption(f"{words}. {mode_words(values)}")
