"""The sections of an experiment's page: each a function to markup, empty where it has no input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.compare import Measured
from harness.report.finding import NOT_A_CLUSTER
from harness.report.legend import drawn
from harness.report.markup import Html, escaped, figure_cell, listing, table, tag
from harness.report.sections import fold
from harness.text import counted, quantity
from probes import text
from probes.analysis import Analysis, ArmComparison
from probes.report import figures
from probes.report.amounts import amount, around_zero
from probes.report.data import (
    Distribution,
    Paired,
    TrialRow,
    deciding,
    differing,
    distributions,
    paired_differences,
    run_order,
    step_traces,
)
from probes.report.legends import arms_legend, differences_legend
from probes.report.words import explained, setting_of
from probes.stats import Comparison

SEVERITY_OF = {"better": "low", "worse": "high", "inconclusive": "medium"}
STEPS_LISTED = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What a page is made of: the analysis, and one measured trial of each arm that ran."""

    analysis: Analysis
    runs: Mapping[str, Measured] = field(default_factory=dict)

    @property
    def arms(self) -> list[str]:
        return [arm.name for arm in self.analysis.experiment.run_arms]

    @property
    def mode(self) -> str:
        """What every caption says of where its figures come from."""
        mode = self.analysis.experiment.mode
        why = ": times are not a cluster's" if mode in NOT_A_CLUSTER else ""
        return f"Mode {mode}{why}."


@dataclass(frozen=True, slots=True)
class Section:
    anchor: str
    title: str
    body: Callable[[Content], list[Html]]
    why_empty: str


def head(content: Content) -> list[Html]:
    analysis = content.analysis
    experiment = analysis.experiment
    ended, lines = len(analysis.progress.trials), list(text.unfinished(analysis))
    badges = [
        f"mode {experiment.mode}",
        experiment.config.name,
        counted(len(experiment.arms), "arm"),
        f"{ended} of {counted(len(experiment.order()), 'trial')}" if ended or lines else "no trial was needed",
    ]
    parts = [
        tag("h1", f"{experiment.knob.name}: {analysis.verdict}"),
        *([tag("p", str(experiment.directory), class_="soft path")] if ended or lines else []),
        tag("p", *(tag("span", badge, class_="badge") for badge in badges)),
    ]
    if not analysis.comparable:
        parts.append(tag("p", tag("b", "The arms are not comparable"), f": {_first_reason(analysis)}"))
    if why := NOT_A_CLUSTER.get(experiment.mode):
        parts.append(tag("p", why[0].upper() + why[1:] + "."))
    if lines:
        parts += [tag("p", tag("b", lines[0][0].upper() + lines[0][1:] + ".")), listing(lines[1:])]
    tiles = [_tile(item, metric) for item in analysis.comparisons if (metric := deciding(analysis, item))]
    return [*parts, tag("div", *tiles, class_="tiles")]


def _first_reason(analysis: Analysis) -> str:
    reasons = [note for note in analysis.notes if "not comparable" in note or "refused" in note]
    return (reasons or ["see the notes"])[0]


def _tile(item: ArmComparison, metric: Comparison) -> Html:
    words = [
        tag("code", metric.metric),
        Html("<br>"),
        f"{item.arm}: {item.verdict}",
        Html("<br>"),
        text.interval(metric),
    ]
    return tag("div", tag("b", amount(metric.effect, metric.unit)), tag("span", *words), class_="tile")


def verdict(content: Content) -> list[Html]:
    """Every arm's verdict in plain words, the setting to use, and what is to be known of the whole."""
    analysis = content.analysis
    experiment = analysis.experiment
    body = [
        tag(
            "div",
            tag("h3", tag("span", item.verdict, class_="severity"), f" {item.arm} against {experiment.baseline.name}"),
            *(tag("p", sentence) for sentence in explained(analysis, item)),
            class_=f"finding {SEVERITY_OF.get(item.verdict, 'info')}",
        )
        for item in analysis.comparisons
    ]
    best = analysis.recommended()
    if best is not None:
        body += [
            tag("h3", "To use it"),
            tag("p", f"{best.arm} is better than {experiment.baseline.name}{text.because(analysis, best)}."),
            preformatted(text.setting(experiment, best.arm)),
        ]
    if analysis.queues is not None:
        body += [tag("h3", "Hardware queues of each arm's context"), preformatted(analysis.queues.text().splitlines())]
    if analysis.sees_pct:
        seen: list[list[str]] = [[name, figure_cell("sees_pct", value)] for name, value in analysis.sees_pct.items()]
        what = f"The smallest change that {counted(experiment.pairs, 'pair')} find four times in five"
        body.append(table(["metric", "change"], seen, caption=what))
    if analysis.notes:
        body.append(fold(counted(len(analysis.notes), "note"), listing(analysis.notes)))
    return body


def preformatted(lines: Iterable[str]) -> Html:
    return tag("pre", tag("code", Html("\n".join(map(escaped, lines)))))


def metrics(content: Content) -> list[Html]:
    """The comparisons of each arm, then a picture and the pairs of each metric that varies."""
    analysis = content.analysis
    body = [_comparisons(analysis, item) for item in analysis.comparisons if item.metrics]
    values, paired, rows = distributions(analysis), paired_differences(analysis), run_order(analysis)
    for metric in dict.fromkeys([*(item.metric for item in paired), *(item.metric for item in values)]):
        mine = [item for item in paired if item.metric == metric]
        of_metric = [item for item in values if item.metric == metric]
        content_ = _one_metric(content, metric, of_metric, mine, rows)
        if metric == analysis.experiment.primary:
            body += [tag("h3", f"{metric}, which decides"), *content_]
        else:
            body.append(fold(metric, *content_))
    return body


def _comparisons(analysis: Analysis, item: ArmComparison) -> Html:
    baseline = analysis.experiment.baseline.name
    rows = [
        [
            metric.metric + (" (decides)" if metric.metric == analysis.experiment.primary else ""),
            _cell("a", metric.a, quantity(metric.metric, metric.a)),
            _cell("b", metric.b, quantity(metric.metric, metric.b)),
            _cell("effect", metric.effect, amount(metric.effect, metric.unit)),
            *_bounds(metric),
            _cell("threshold", metric.threshold, around_zero(metric.threshold, metric.unit)),
            _cell("p_value", metric.p_value, _probability(metric.p_value)),
            _cell("sign_flip_p", metric.sign_flip_p, _probability(metric.sign_flip_p)),
            tag("td", metric.verdict),
        ]
        for metric in item.metrics
    ]
    confidence = 100 * item.metrics[0].confidence
    headers = [
        "metric",
        baseline,
        item.arm,
        "change",
        f"from ({confidence:.3g} %)",
        "to",
        "matters",
        "p",
        "exact p",
        "",
    ]
    pairs = max(metric.n_pairs or 0 for metric in item.metrics)
    notes = [f"{metric.metric}: {note}" for metric in item.metrics for note in metric.notes]
    caption = f"{item.arm} against {baseline}, {counted(pairs, 'pair')}, mode {analysis.experiment.mode}"
    return tag("div", table(headers, rows, caption=caption), *([listing(notes, class_="soft")] if notes else []))


def _bounds(metric: Comparison) -> list[Html]:
    words = ["exact", "exact"] if metric.exact else [amount(x, metric.unit) for x in (metric.ci_low, metric.ci_high)]
    return [_cell("ci_low", metric.ci_low, words[0]), _cell("ci_high", metric.ci_high, words[1])]


def _probability(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2g}"


def _cell(name: str, value: float | None, words: str) -> Html:
    """`data-value` is the value itself, as in --json."""
    return tag("td", words, class_="n", data_figure=name, data_value=None if value is None else repr(value))


def _one_metric(
    content: Content, metric: str, values: list[Distribution], paired: list[Paired], rows: list[TrialRow]
) -> list[Html]:
    body: list[Html] = []
    exact = all(item.comparison.exact for item in paired) if paired else False
    if exact:
        body.append(tag("p", "Every trial of an arm gave the same value: there is no spread to draw."))
    elif values:
        caption = (
            "Left: each trial; thin lines join the trials of a pair, bars are means. Middle: the differences of the "
            "pairs, their mean and intervals. Right: the order in which the trials ran; a slope of all arms is a drift."
            f" {content.mode}"
        )
        key = [*arms_legend(content.arms), *differences_legend()]
        body.append(drawn(figures.metric_panels(metric, content.arms, values, paired, rows), caption, key))
    for item in paired:
        listed = [
            [
                str(pair.pair),
                _cell("pair_a", pair.a, quantity(metric, pair.a)),
                _cell("pair_b", pair.b, quantity(metric, pair.b)),
                _cell("difference", pair.difference, amount(pair.difference, pair.unit)),
            ]
            for pair in item.pairs
        ]
        caption = f"{metric}, {item.arm} against {item.baseline}, pair by pair"
        body.append(table(["pair", item.baseline, item.arm, "difference"], listed, caption=caption))
    return body


def steps(content: Content) -> list[Html]:
    """Every step of every trial."""
    traces = step_traces(content.analysis)
    if not traces:
        return []
    warmup = content.analysis.experiment.warmup
    caption = (
        "Faint: each trial; strong: the median over an arm's trials. Grey: warm-up, and the steps of the traced and "
        f"memory windows, which no time comes from. {content.mode}"
    )
    picture = figures.step_traces(content.arms, traces, warmup)
    numbers = sorted({step for trace in traces for step in trace.steps})
    listed = numbers[-STEPS_LISTED:]
    walls = [dict(zip(trace.steps, trace.wall_ns, strict=True)) for trace in traces]
    rows: list[list[str]] = [
        [str(step), *(figure_cell("wall_ns", of_trial.get(step)) for of_trial in walls)] for step in listed
    ]
    said = f"The last {len(listed)} of {len(numbers)} steps" if len(listed) < len(numbers) else None
    headers = ["step", *(f"{trace.index}: {trace.arm}" for trace in traces)]
    return [
        drawn(picture, caption, arms_legend(content.arms)),
        fold("Steps as a table", table(headers, rows, caption=said)),
    ]


def arms(content: Content) -> list[Html]:
    """What the arms differ in, and nothing else."""
    experiment = content.analysis.experiment
    found = differing(experiment, content.runs)
    names = [arm.name for arm in experiment.arms]
    rows = [
        [
            item.what,
            *(setting_of(item, name) for name in names),
            "set by the arms" if item.declared else "differs as well",
        ]
        for item in found
    ]
    body = [tag("p", "The arms are one setting: this is an A/A.")] if not rows else []
    if rows:
        said = "All that the arms differ in; the recordings of their middle trials share everything else"
        body.append(table(["", *names, ""], rows, caption=said if content.runs else "All that the arms differ in"))
    known = [f"{name}: {known.verdict}: {known.reason}" for name, known in experiment.not_run.items()]
    known += [f"{name} {kind}: {reason}" for name, (kind, reason) in content.analysis.progress.outcomes.items()]
    return [*body, *([tag("h3", "Arms that did not run"), listing(known)] if known else [])]


def trials(content: Content) -> list[Html]:
    """Every run, those that do not count too."""
    rows = run_order(content.analysis)
    if not rows:
        return []
    names = [
        name
        for name in dict.fromkeys(name for row in rows for name in row.values)
        if any(row.values.get(name) is not None for row in rows)
    ]
    cells: list[list[str]] = [
        [
            f"{row.index}" + (f", run {row.number + 1}" if row.number else ""),
            row.arm,
            str(row.pair),
            row.state,
            *(figure_cell(f"trial_{name}", row.values.get(name)) for name in names),
            row.reason or "",
        ]
        for row in rows
    ]
    headers = ["trial", "arm", "pair", "", *names, "why"]
    return [table(headers, cells, left=4, caption=f"In the order in which they ran. {content.mode}")]


def listed_arms(runs: Mapping[str, Measured], baseline: str, arm: str) -> dict[str, Measured]:
    """The two that a comparison is of, as far as they ran."""
    return {name: runs[name] for name in (baseline, arm) if name in runs}


def comparisons_of(content: Content) -> Sequence[tuple[str, dict[str, Measured]]]:
    """Arm -> the measured trials of it and of the baseline, for arms that both have one."""
    baseline = content.analysis.experiment.baseline.name
    pairs = ((arm, listed_arms(content.runs, baseline, arm)) for arm in content.arms[1:])
    return [(arm, runs) for arm, runs in pairs if len(runs) == 2]
