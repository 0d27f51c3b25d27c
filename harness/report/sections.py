"""The sections of the HTML report: each a function from a report to markup, empty where it has no input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from harness.compare import METRICS
from harness.compare.difference import devices
from harness.compare.steps import PEAKS
from harness.ledger.prediction import RankMemory
from harness.report import figures
from harness.report.build import Report
from harness.report.drawing import BLUE
from harness.report.finding import NOT_A_CLUSTER
from harness.report.legend import band, drawn, line, swatch
from harness.report.markup import Html, figure_cell, listing, table, tag
from harness.report.sections_lifetime import lifetime
from harness.report.sections_time import time_of_step
from harness.report.sections_trace import overlap
from harness.report.text import evidence_text, layout, stacked
from harness.text import counted, in_ranges, quantity

STEPS_LISTED = 60
RANKS_LISTED = 128
SITES_LISTED = 10


@dataclass(frozen=True, slots=True)
class Section:
    anchor: str
    title: str
    body: Callable[[Report], list[Html]]
    needs: str
    of_time: bool = False

    def why_empty(self, report: Report) -> str:
        rehearsed = self.of_time and report.mode == "rehearsal"
        return "a rehearsal has neither times nor communication" if rehearsed else self.needs


def title(report: Report) -> str:
    return report.config.name if report.config is not None else report.path.resolve().name


def head(report: Report) -> list[Html]:
    """Name, mode, state and the run's figures."""
    recording = report.recording
    badges = [f"mode {report.mode}"]
    if recording is not None and recording.status is not None:
        abandoned = report.standing is not None and report.standing.abandoned
        badges.append(f"{recording.status.state}{', abandoned' if abandoned else ''}")
    if report.ranks:
        badges.append(f"{counted(len(report.ranks), 'rank')}, {counted(len(report.steps), 'step')}")
    if recording is not None and (names := devices(recording.ranks.values())):
        badges.append(names)
    parts = [
        tag("h1", title(report)),
        tag("p", str(report.path), class_="soft path"),
        tag("p", *(tag("span", badge, class_="badge") for badge in badges)),
    ]
    if why := NOT_A_CLUSTER.get(report.mode):
        parts.append(tag("p", why[0].upper() + why[1:] + "."))
    tiles = [
        tag(
            "div",
            tag("b", quantity(name, value.value), data_figure=name, data_value=repr(value.value)),
            tag("span", tag("code", name), Html("<br>"), METRICS[name].what, Html("<br>"), f"from {value.source}"),
            class_="tile",
        )
        for name, value in report.metrics.items()
        if value.value is not None
    ]
    return [*parts, tag("div", *tiles, class_="tiles")]


def findings(report: Report) -> list[Html]:
    return [
        tag(
            "div",
            tag("h3", tag("span", finding.severity, class_="severity"), finding.title),
            tag("p", finding.where, class_="soft"),
            tag("p", *_evidence(finding.evidence), class_="evidence") if finding.evidence else Html(""),
            tag("p", finding.advice),
            class_=f"finding {finding.severity}",
        )
        for finding in report.findings
    ]


def _evidence(evidence: dict[str, Any]) -> list[str]:
    parts: list[str] = []
    for name, value in evidence.items():
        parts += [", " if parts else "", tag("code", name), " ", evidence_text(name, value)]
    return parts


def run(report: Report) -> list[Html]:
    """Configuration and provenance."""
    recording = report.recording
    if recording is None:
        return []
    manifest = recording.manifest
    rows: list[tuple[str, Any]] = []
    if report.config is not None:
        rows += list(layout(report.config).items())
    if report.float8 is not None:
        rows.append(("float8", report.float8.words()))
    if report.compilation is not None:
        rows.append(("compile", report.compilation.words()))
    versions = manifest.get("versions")
    for name, value in versions.items() if isinstance(versions, dict) else ():
        rows.append((name, value))
    git = manifest.get("git")
    if isinstance(git, dict):
        rows.append(("git", f"{git['sha']}{', modified' if git.get('dirty') else ''}" if git.get("sha") else None))
    rows.append(("devices", devices(recording.ranks.values())))
    rows.append(("peak of the device", manifest.get("peak_tflops_source")))
    argv = manifest.get("argv")
    rows.append(("command", " ".join(map(str, argv)) if isinstance(argv, list) else None))
    if report.standing is not None:
        rows.append(("state", "; ".join([report.standing.headline(), *report.standing.details()])))
    rows.append(("ranks without a step", in_ranges(recording.missing_ranks) or "none"))
    body = [[name, "not recorded" if value is None else str(value)] for name, value in rows]
    return [tag("div", table(["", ""], body), class_="key")]


def steps(report: Report) -> list[Html]:
    if not any(item["wall_ns"] for item in report.steps):
        return []
    median = report.metrics["step_wall_ns"].value
    picture = figures.step_times(report.steps, None if median is None else int(median))
    letters = dict.fromkeys(tag_ for item in report.steps for tag_ in item["tags"])
    words = "; ".join(f"{figures.letters([tag_])} {tag_}" for tag_ in letters)
    caption = (
        "Time of the slowest rank. Filled: plain steps, which the median is of. Hatched: the first step and steps "
        f"that were traced, tracked or follow an export. {f'Letters: {words}.' if words else ''}"
    )
    listed = report.steps[-STEPS_LISTED:]
    rows: list[list[str]] = [
        [
            str(item["step"]),
            *(figure_cell(k, item[k]) for k in ("wall_ns", "tokens_per_s", "mfu_pct")),
            _decimals(item["loss"]),
            _decimals(item["grad_norm"]),
            " ".join(item["tags"]),
        ]
        for item in listed
    ]
    said = f"The last {len(listed)} of {len(report.steps)} steps" if len(listed) < len(report.steps) else None
    headers = ["step", "time", "tokens/s/device", "MFU", "loss", "gradient norm", "tags"]
    return [drawn(picture, caption), fold("Steps as a table", table(headers, rows, caption=said))]


def _decimals(value: float | None) -> Html:
    return tag("td", "n/a" if value is None else f"{value:.4f}", class_="n")


def memory(report: Report) -> list[Html]:
    """Peaks by rank and phase, and the timeline of a snapshot or the peaks of the steps."""
    body: list[Html] = []
    if any(item["peak_allocated_bytes"] for item in report.ranks):
        phases = figures.phase_colours(report.ranks)
        key = [swatch(colour, name) for name, colour in phases.items()]
        key += peak_lines(report.ranks)
        caption = f"Allocated peak by phase; peaks of the whole run across.{figures.cut(report.ranks)}"
        body += [drawn(figures.peaks(report.ranks), caption, key)]
    if report.ranks:
        known = [peak for peak in PEAKS if any(item[peak] is not None for item in report.ranks)]
        names = dict.fromkeys(name for item in report.ranks for name in item["peak_allocated_bytes_by_phase"])
        rows: list[list[str]] = [
            [
                str(item["rank"]),
                figure_cell("median_step_wall_ns", item["median_step_wall_ns"]),
                *(figure_cell(peak, item[peak]) for peak in known),
                *(figure_cell(f"{n}_bytes", item["peak_allocated_bytes_by_phase"].get(n)) for n in names),
            ]
            for item in report.ranks[:RANKS_LISTED]
        ]
        headers = ["rank", "median step", *(peak.removesuffix("_bytes").replace("_", " ") for peak in known), *names]
        body.append(table(headers, rows, caption="Highest peaks of each rank; by phase those of allocated"))
    timelines = [
        (source, device)
        for source, device in (report.snapshots.devices if report.snapshots else [])
        if device.timeline is not None
    ]
    if timelines:
        source, device = max(
            timelines, key=lambda pair: pair[1].timeline.peak("active").bytes if pair[1].timeline else 0
        )
        assert device.timeline is not None
        rank = "rank unknown" if source.rank is None else f"rank {source.rank}"
        key = [swatch(BLUE, "allocated"), band("pending: freed, not reusable yet"), line("5 3", "reserved")]
        caption = (
            f"{rank}, device {device.index}, {len(device.timeline.allocated):,} events of {source.path.name}; "
            "requested bytes, reserved in real ones. Each column shows its highest values."
        )
        body += [tag("h3", "Memory over time"), drawn(figures.memory_timeline(device.timeline), caption, key)]
        body += snapshot_tables(report)
    elif any(p["peak_allocated_bytes"] for item in report.steps for p in item["ranks"].values()):
        key = peak_lines([peaks for item in report.steps for peaks in item["ranks"].values()])
        caption = "Highest peak over the ranks. There is no memory history here to draw a timeline from."
        body += [tag("h3", "Peaks of the steps"), drawn(figures.step_peaks(report.steps), caption, key)]
    return body


def peak_lines(items: Sequence[dict[str, Any]]) -> list[Html]:
    """The legend of the lines that `figures.peaks` and `figures.step_peaks` draw for what is known."""
    dashes = {"allocated": "none", "active": "5 3", "reserved": "1.5 2"}
    return [line(d, name) for name, d in dashes.items() if any(i[f"peak_{name}_bytes"] is not None for i in items)]


def snapshot_tables(report: Report) -> list[Html]:
    """Every snapshot's peaks and stacking; what the highest peak consists of; where stacked blocks come from."""
    entries = [(file["rank"], d) for file in (report.memory or {"files": []})["files"] for d in file["devices"]]
    columns = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes")
    rows: list[list[str]] = [
        [
            "?" if rank is None else str(rank),
            str(device["device"]),
            device["history"],
            *(figure_cell(name, device[name]) for name in columns),
            *stacking_cells(device["stacking"]),
        ]
        for rank, device in entries
    ]
    headers = ["rank", "device", "history", "allocated", "active", "reserved", "stacked blocks", "most pending"]
    body = [table(headers, rows, left=3, caption="Snapshots: peaks and stacking")]
    composed = [pair for pair in entries if pair[1]["peak_composition"]]
    if composed:
        rank, device = max(composed, key=lambda pair: pair[1]["peak_allocated_bytes"] or 0)
        shares: list[list[str]] = [
            [share["category"], figure_cell("bytes", share["bytes"])] for share in device["peak_composition"]
        ]
        body.append(table(["category", "bytes"], shares, caption=f"The allocated peak of rank {rank} consists of"))
    sites = [(rank, site) for rank, device in entries for site in device["stacking"]["sites"]]
    if sites:
        sites = sorted(sites, key=lambda pair: -pair[1]["bytes"])[:SITES_LISTED]
        listed: list[list[str]] = [
            [site["site"], str(rank), figure_cell("blocks", site["blocks"]), figure_cell("bytes", site["bytes"])]
            for rank, site in sites
        ]
        body.append(table(["allocated at", "rank", "blocks", "bytes"], listed, caption="Stacked blocks by site"))
    return body


def stacking_cells(stacking: dict[str, Any]) -> list[Html]:
    names = ("blocks", "max_pending_bytes")
    return [
        tag(
            "td", text, class_="n", data_figure=name, data_value=None if stacking[name] is None else str(stacking[name])
        )
        for name, text in zip(names, stacked(stacking), strict=True)
    ]


def predicted(report: Report) -> list[Html]:
    """The ledger beside the measurement: peaks, its lines with formulas, communication."""
    prediction = report.prediction
    if prediction is None:
        return []
    reserves = any(rank.peak_reserved_bytes is not None for rank in prediction.ranks)
    rows: list[list[str]] = [
        [
            str(rank.rank),
            figure_cell("predicted_bytes", rank.peak_allocated_bytes),
            figure_cell("measured_bytes", rank.measured_peak_allocated_bytes),
            figure_cell("error_pct", rank.error_pct),
            *(_reserved(rank) if reserves else []),
            rank.at,
        ]
        for rank in prediction.ranks[:RANKS_LISTED]
    ]
    what = "Allocated and reserved peaks" if reserves else "Allocated peak"
    caption = f"{what} from the second step on, target {prediction.target}"
    of, also = ("allocated", ["reserved", "measured", "error"]) if reserves else ("predicted", [])
    headers = ["rank", of, "measured", "error", *also, "predicted at"]
    body = [table(headers, rows, caption=caption)]
    for _, group in groupby(prediction.ranks, key=lambda rank: rank.alike_rank):
        alike = list(group)
        lines: list[list[str]] = [
            [
                e.category,
                figure_cell("at_peak_bytes", e.at_peak_bytes),
                figure_cell("bytes", e.bytes),
                tag("code", e.formula),
            ]
            for e in alike[0].entries
        ]
        who = f"rank {alike[0].rank}" if len(alike) == 1 else f"ranks {alike[0].rank} to {alike[-1].rank}"
        said = f"What {who} should hold at the peak, and at most"
        body.append(table(["line", "at the peak", "at most", "formula of its most"], lines, caption=said))
    return body + time_of_step(prediction.time)


def _reserved(rank: RankMemory) -> list[Html]:
    return [
        figure_cell("predicted_reserved_bytes", rank.peak_reserved_bytes),
        figure_cell("measured_reserved_bytes", rank.measured_peak_reserved_bytes),
        figure_cell("reserved_error_pct", rank.reserved_error_pct),
    ]


def communication(report: Report) -> list[Html]:
    if not report.communication:
        return []
    state = {True: ("equal", None), False: ("differs", "differs"), None: ("n/a", None)}
    staged = any(row.pipeline_rank is not None for row in report.communication)
    rows: list[list[str]] = [
        [
            *(["" if row.pipeline_rank is None else str(row.pipeline_rank)] if staged else []),
            row.dimension,
            row.kind,
            *(
                figure_cell(name, getattr(row, name))
                for name in ("predicted_count", "measured_count", "predicted_bytes", "measured_bytes")
            ),
            tag("td", state[row.agree][0], class_=state[row.agree][1]),
        ]
        for row in report.communication
    ]
    headers = ["dimension", "kind", "predicted", "recorded", "predicted bytes", "recorded bytes", ""]
    return [
        tag("p", "Collectives of each rank and step; bytes of the full, unsharded side."),
        table([*(["pipeline rank"] if staged else []), *headers], rows, left=2 + staged),
    ]


def fold(summary: str, *content: Html) -> Html:
    return tag("details", tag("summary", summary), *content)


def definitions() -> Html:
    return fold(
        "How these figures are defined",
        listing(
            [
                "Communication: kernels of collectives, whatever stream they run on; compute: every other kernel. Both "
                "as unions over all streams of a device, so nothing is counted twice.",
                "Exposed: communication while no kernel computed. Hidden share: 100 · hidden / communication. Exposed "
                "times of dimensions that communicate at once need not add up.",
                "A traced step has the events whose launch lies in its host window, from the first start to the last "
                "end. Traced steps carry the profiler's overhead.",
                "Allocated: handed out. Active: allocated and freed blocks that wait for a stream. Reserved: held from "
                "the driver. A memory history records requested sizes, a little below the allocator's rounded ones.",
                "Plain steps: without the first and those that were traced, tracked or follow an export.",
            ]
        ),
    )


SECTIONS = (
    Section("findings", "Findings", findings, "nothing stood out"),
    Section("run", "Run", run, "no manifest, so configuration and versions are unknown"),
    Section(
        "steps",
        "Steps",
        steps,
        "no step states its time: record the run with harness.record.Recorder or meshscope run",
        of_time=True,
    ),
    Section(
        "overlap",
        "Communication and overlap",
        overlap,
        "no trace: record a trace window, or profile with torch.profiler",
        of_time=True,
    ),
    Section("lifetime", "Life of a parameter", lifetime, "no trace with a whole step of FSDP2's ranges", of_time=True),
    Section("memory", "Memory", memory, "no step states memory and there is no allocator snapshot"),
    Section("predicted", "Predicted beside measured", predicted, "no configuration that the ledger knows"),
    Section("communication", "Collectives", communication, "no trace and no prediction", of_time=True),
)
