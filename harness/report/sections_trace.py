"""The HTML report's section on communication and compute: where the time goes, per dimension, and one step drawn."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report import figures
from harness.report.build import Report
from harness.report.drawing import BLUE, GREY, RED
from harness.report.finding import ranks_text
from harness.report.lanes import LanePicture, most_exposed
from harness.report.legend import legend, swatch
from harness.report.markup import Html, figure_cell, table, tag
from harness.report.over_ranks import incomplete_steps, waited_for_all
from harness.text import in_ranges
from harness.trace.analysis import HOST_WAITED

NOTES_LISTED = 12


def overlap(report: Report) -> list[Html]:
    if report.overlap is None:
        return []
    body: list[Html] = []
    incomplete = [tag("p", f"{sentence[0].upper()}{sentence[1:]}.") for sentence in incomplete_steps(report.captures)]
    if report.complete_overlap is None:
        return [tag("p", "No complete step is in the traces."), *incomplete, *notes(report)]
    entries = report.complete_overlap["ranks"]
    steps = {item["step"] for item in report.step_parts}
    sources = sorted({entry["source"] for entry in entries})
    what = f"Traced steps {in_ranges(steps)}" if steps else "Whole files, which name no steps,"
    ranks = ranks_text([entry["rank"] for entry in entries])
    body.append(tag("p", f"{what} of {ranks}; {' and '.join(sources)} time, mode {report.mode}."))
    if "host" in sources:
        body.append(
            tag("p", "Host time is what the calls took on the CPU: there are no device events in a gloo trace.")
        )
        if waited_for_all(report.dimensions):
            body.append(tag("p", f"{HOST_WAITED[0].upper()}{HOST_WAITED[1:]}."))
    body += incomplete
    if report.mean_parts:
        body += parts(report)
    body += dimensions(report)
    picture = most_exposed(report.complete_captures)
    if picture is not None:
        body += lanes(picture, report.mode)
    return body + notes(report)


def parts(report: Report) -> list[Html]:
    looks = figures.looks(report.mean_parts)
    key = [swatch(colour, name, hatch) for name, (colour, hatch) in looks.items()]
    rows: list[list[str]] = []
    for item in report.mean_parts:
        values = figures.part_values(item)
        cells = (figure_cell(f"{name}_ns", values.get(name, 0)) for name in looks)
        rows.append([figures.rank_name(item["rank"]), *cells, figure_cell("span_ns", item["span_ns"])])
    caption = f"The parts of a bar add up to the span of the rank's mean traced step.{figures.cut(report.mean_parts)}"
    return [
        tag("h3", "Where a traced step goes, by rank"),
        tag("figure", legend(key), tag("div", figures.step_parts(report.mean_parts), class_="scroll")),
        table(["rank", *looks, "span"], rows, caption=caption),
    ]


def dimensions(report: Report) -> list[Html]:
    rows: list[list[str]] = []
    for item in report.dimensions:
        most = item["kinds"][0]["kind"] if item["kinds"] else "n/a"
        names = ("comm_ns", "overlap_ns", "exposed_ns", "lowest_overlap_pct", "highest_overlap_pct")
        rows.append([item["dimension"], *(figure_cell(name, item[name]) for name in names), most])
    headers = ["dimension", "communication", "hidden", "exposed", "lowest share hidden", "highest", "most exposed"]
    caption = "Means over the traced ranks, whole files; hidden shares of the worst and the best rank"
    kinds: list[list[str]] = [
        [
            item["dimension"],
            kind["kind"],
            *(figure_cell(name, kind[name]) for name in ("count", "comm_ns", "exposed_ns")),
        ]
        for item in report.dimensions[1:]
        for kind in item["kinds"]
    ]
    body = [tag("h3", "By mesh dimension"), table(headers, rows, caption=caption)]
    if kinds:
        by_kind = ["dimension", "kind", "collectives", "communication", "exposed"]
        body.append(table(by_kind, kinds, left=2, caption="By kind of collective, means over the traced ranks"))
    return body


def lanes(picture: LanePicture, mode: str) -> list[Html]:
    what = f"{figures.step_name(picture)} of {rank_in_words(picture.rank)}, where most communication is exposed"
    return [
        tag("h3", what.capitalize()),
        tag(
            "figure",
            legend(lanes_key([picture])),
            tag("div", figures.lanes(picture), class_="scroll"),
            tag("figcaption", lanes_caption(picture, mode)),
        ),
        table(LANE_HEADERS, lane_rows(picture)),
    ]


LANE_HEADERS = ["lane", "streams", "events", "busy", "exposed"]


def rank_in_words(rank: int | None) -> str:
    return "a rank that is not named" if rank is None else f"rank {rank}"


def lanes_key(pictures: Sequence[LanePicture]) -> list[Html]:
    key = [swatch(BLUE, "compute")]
    for lane in (lane for picture in pictures for lane in picture.lanes):
        colour = figures.COLOUR_OF_KIND.get(lane.kind, figures.OTHER_KIND)
        if lane.exposed_ns is not None and lane.kind != "exposed":
            key.append(swatch(colour, lane.kind))
    key.append(swatch(GREY, "pale: hidden by compute", opacity=0.35))
    key.append(swatch(RED, "all exposed communication"))
    return list(dict.fromkeys(key))


def lanes_caption(picture: LanePicture, mode: str) -> str:
    return (
        f"A lane's height is the share of each {picture.column_ns / 1e3:.0f} µs column in which it ran: strong while "
        "nothing computed, pale while compute hid it. The thin line below marks every column in which it ran at all. "
        f"{picture.source.capitalize()} time, mode {mode}."
    )


def lane_rows(picture: LanePicture) -> list[list[str]]:
    return [
        [
            lane.label,
            ", ".join(map(str, lane.streams)) or "n/a",
            figure_cell("count", lane.count),
            figure_cell("busy_ns", lane.busy_ns),
            figure_cell("exposed_ns", lane.exposed_ns),
        ]
        for lane in picture.lanes
    ]


def notes(report: Report) -> list[Html]:
    """What the analysis says about the files, each once."""
    assert report.overlap is not None
    entries = report.overlap["ranks"]
    found = dict.fromkeys(note for entry in entries for note in entry["notes"])
    found |= dict.fromkeys(report.overlap["cross_rank"]["notes"])
    found |= dict.fromkeys(f"{n} device events dropped: {why}" for e in entries for why, n in e["dropped"].items())
    if not found:
        return []
    more = len(found) - NOTES_LISTED
    listed = [*list(found)[:NOTES_LISTED], *([f"{more} more: meshscope overlap"] if more > 0 else [])]
    items = tag("ul", *(tag("li", note) for note in listed))
    return [tag("details", tag("summary", "Notes on the traces"), items)]
