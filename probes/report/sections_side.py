"""Both arms of a comparison side by side: memory over time and the lanes of one step, of their middle trials."""

from __future__ import annotations

from collections.abc import Mapping

from harness.compare import Measured
from harness.report.drawing import BLUE
from harness.report.figures import step_name
from harness.report.legend import band, drawn, line, swatch
from harness.report.markup import Html, figure_cell, table, tag
from harness.report.sections import fold, stacking_cells
from harness.report.sections_trace import LANE_HEADERS, lane_rows, lanes_caption, lanes_key, rank_in_words
from probes.report import figures
from probes.report.data import AlignedLanes, AlignedMemory, aligned_lanes, aligned_memory, peaks_by_step
from probes.report.legends import arms_legend
from probes.report.sections import Content, comparisons_of

# Legends' dashes, as `figures.PEAK_LINES` draws them.
PEAK_DASHES = {
    "peak_rss_bytes": "7 2 1.5 2",
    "peak_allocated_bytes": "none",
    "peak_active_bytes": "5 3",
    "peak_reserved_bytes": "1.5 2",
}


def memory(content: Content) -> list[Html]:
    body: list[Html] = []
    for number, (arm, runs) in enumerate(comparisons_of(content)):
        found = aligned_memory(runs)
        part = (
            _histories(content, runs, found, f"memory{number}") if found else _steps(content, runs, f"memory{number}")
        )
        if part:
            body += [tag("h3", f"{arm} beside {content.analysis.experiment.baseline.name}"), *part]
    return body


def _histories(content: Content, runs: Mapping[str, Measured], found: AlignedMemory, name: str) -> list[Html]:
    key = [swatch(BLUE, "allocated"), band("pending: freed, not reusable yet"), line("5 3", "reserved")]
    caption = (
        f"{rank_in_words(found.rank).capitalize()}, device {found.device}, in the middle trial of each arm, from the "
        "first event of its history on; requested bytes, reserved in real ones. Each column shows its highest values. "
        f"{content.mode}"
    )
    columns = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes")
    rows: list[list[str]] = []
    for arm, run in runs.items():
        device = next(
            device
            for file in (run.memory or {"files": []})["files"]
            if file["file"] == found.files[arm]
            for device in file["devices"]
            if device["device"] == found.device
        )
        rows.append(
            [arm, *(figure_cell(f"history_{c}", device[c]) for c in columns), *stacking_cells(device["stacking"])]
        )
    headers = ["arm", "allocated", "active", "reserved", "stacked blocks", "most pending"]
    return [drawn(figures.memory(found, name), caption, key), table(headers, rows, caption="Peaks of the histories")]


def _steps(content: Content, runs: Mapping[str, Measured], name: str) -> list[Html]:
    """Where there is no history to draw."""
    found = {arm: peaks_by_step(run, content.analysis.experiment.warmup) for arm, run in runs.items()}
    every = [step for steps in found.values() for step in steps]
    keys = [key for key in PEAK_DASHES if any(step[key] is not None for step in every)]
    if not keys:
        return []
    caption = (
        "Highest peaks over the ranks in the middle trial of each arm; there is no memory history to draw a timeline "
        f"from. {content.mode}"
    )
    words = {key: key.removesuffix("_bytes").replace("_", " ") for key in keys}
    of_step = {arm: {step["step"]: step for step in steps} for arm, steps in found.items()}
    rows: list[list[str]] = [
        [
            str(number),
            *(figure_cell(key, of_arm.get(number, {}).get(key)) for key in keys for of_arm in of_step.values()),
        ]
        for number in sorted({step["step"] for step in every})
    ]
    key = [*arms_legend(list(found)), *(line(PEAK_DASHES[name], words[name]) for name in keys)]
    headers = ["step", *(f"{arm}: {words[key]}" for key in keys for arm in found)]
    return [
        drawn(figures.peaks_by_step(found, keys, name), caption, key),
        fold("Peaks as a table", table(headers, rows)),
    ]


def lanes(content: Content) -> list[Html]:
    body: list[Html] = []
    for number, (arm, runs) in enumerate(comparisons_of(content)):
        if found := aligned_lanes(runs):
            body += [tag("h3", f"{arm} beside {content.analysis.experiment.baseline.name}")]
            body += _lanes(content, found, f"lanes{number}")
    return body


def _lanes(content: Content, found: AlignedLanes, name: str) -> list[Html]:
    pictures = found.pictures
    longest = max(pictures.values(), key=lambda picture: picture.span_ns)
    step = step_name(longest)
    caption = (
        f"{step.capitalize()} of {rank_in_words(found.rank)} in the middle trial of each arm, from its first event on. "
        f"{lanes_caption(longest, content.analysis.experiment.mode)}"
    )
    rows = [[arm, *row] for arm, picture in pictures.items() for row in lane_rows(picture)]
    return [
        drawn(figures.lanes(found, name), caption, lanes_key(list(pictures.values()))),
        table(["arm", *LANE_HEADERS], rows, left=2),
    ]
