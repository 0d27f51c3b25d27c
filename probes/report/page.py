"""An experiment as one HTML file that needs nothing else, with the looks of a run's report."""

from __future__ import annotations

from harness import __version__, compare
from harness.report import Report
from harness.report.html import document
from harness.report.markup import Html, listing, table, tag
from harness.report.sections import fold
from harness.report.sections import run as run_section
from harness.text import counted, in_ranges
from probes.analysis import Analysis
from probes.experiment import scale_of
from probes.report import sections, sections_side
from probes.report.amounts import around_zero
from probes.report.data import measure_middle, sampled_gpus
from probes.report.sections import Content, Section
from probes.stats import UNITS


def page(analysis: Analysis) -> str:
    """The whole document; reads traces and snapshots of one trial of each arm."""
    content = Content(analysis=analysis, runs=measure_middle(analysis))
    shown = [(section, body) for section in SECTIONS if (body := section.body(content))]
    missing = [section for section in SECTIONS if section not in [one for one, _ in shown]]
    left_out = Html("")
    if missing:
        why = [f"{section.title}: {section.why_empty}" for section in missing]
        left_out = tag("section", tag("h2", "Not in this report"), listing(why), id="left-out")
    return document(
        title=f"{analysis.experiment.knob.name}: {analysis.verdict}",
        header=sections.head(content),
        body=[(section.anchor, section.title, body) for section, body in shown],
        left_out=left_out,
        footer=[definitions(), tag("p", f"Written by meshscope {__version__}; figures as in report --json.")],
    )


def provenance(content: Content) -> list[Html]:
    """The plan, what the trials ran on, and what their GPUs did meanwhile."""
    experiment, config = content.analysis.experiment, content.analysis.experiment.config
    scale = scale_of(experiment.primary)
    threshold = experiment.thresholds.get(experiment.primary)
    windows = {"traced": config.recorder.trace.steps, "memory": config.recorder.memory.steps}
    matters = "the smaller of 1 % and 64 MiB" if threshold is None else around_zero(threshold, UNITS[scale])
    plan = [
        ["mode", experiment.mode],
        ["hypothesis", experiment.knob.hypothesis],
        ["decided by", f"{experiment.primary}; what matters is {matters}"],
        [
            "order",
            f"{counted(experiment.pairs, 'pair')} of trials, drawn by seed {experiment.seed} before the first ran",
        ],
        [
            "steps of a trial",
            f"{config.training.steps}: {experiment.warmup} of warm-up discarded, "
            + ", ".join(f"{steps} {name}" for name, steps in windows.items())
            + ", the rest measured",
        ],
        ["known of it", "; ".join(experiment.knob.known) or "nothing"],
    ]
    if ranks := experiment.starts[experiment.baseline.name].rehearsed:
        plan.append(["ranks rehearsed", f"{in_ranges(ranks)} of {config.world_size}"])
    body = [tag("h3", "The plan"), tag("div", table(["", ""], plan), class_="key")]
    run = next(iter(content.runs.values()), None)
    if run is not None and run.recording is not None:
        report = Report(measured=run, config=compare.recorded_config(run.recording))
        body += [tag("h3", "What ran"), *run_section(report)]
    return [*body, *_gpus(content)]


def _gpus(content: Content) -> list[Html]:
    experiment = content.analysis.experiment
    found = sampled_gpus(list(content.analysis.progress.trials), experiment)
    if not found:
        return []
    rows = [
        [
            str(gpu["index"]),
            gpu["uuid"],
            *(_span(gpu[name]) for name in ("sm_clock_mhz", "temperature_c", "power_w")),
            ", ".join(gpu["clock_reasons"]) or "none",
        ]
        for gpu in found
    ]
    headers = ["GPU", "UUID", "SM clock, MHz", "temperature, °C", "power, W", "clock lowered by"]
    return [table(headers, rows, left=2, caption="Lowest and highest that NVML said while the trials ran")]


def _span(value: tuple[float, float] | None) -> str:
    return "n/a" if value is None else f"{value[0]:g} to {value[1]:g}"


def definitions() -> Html:
    return fold(
        "How these figures are defined",
        listing(
            [
                "A trial is a process tree of its own and counts once: with the median time of its plain steps, its "
                "highest peak after warm-up, the overlap of its traced steps. Steps of one run are no samples.",
                "The trials of a pair ran next to each other, in an order drawn before the first; differences are "
                "taken within pairs, so a slow drift of the machine does not side with an arm.",
                "Times are compared as ratios (log scale), shares in points, memory in bytes; means of times are "
                "geometric. p is the paired t test's, exact p that of the sign-flip test over all patterns of signs.",
                "No difference: two one-sided tests at 5 % show the effect to be smaller than what matters. Better or "
                "worse: 0 lies outside the interval and the exact test agrees. Else inconclusive.",
                "Metrics besides the one that decides are corrected together (Holm).",
            ]
        ),
    )


SECTIONS = (
    Section("verdict", "Verdict", sections.verdict, "no arm has been compared"),
    Section("metrics", "Metrics", sections.metrics, "fewer than two pairs have ended, or nothing was measured"),
    Section("steps", "Steps", sections.steps, "no trial states the time of its steps, or a rehearsal, which has none"),
    Section("arms", "Arms", sections.arms, "there is none"),
    Section(
        "memory",
        "Memory side by side",
        sections_side.memory,
        "no two arms have a trial that states its memory",
    ),
    Section(
        "lanes",
        "One step side by side",
        sections_side.lanes,
        "no step of one rank is traced whole in two arms, or a rehearsal, in which nothing was sent",
    ),
    Section("trials", "Trials", sections.trials, "no trial was planned"),
    Section("provenance", "Provenance", provenance, "nothing is known"),
)
