"""What is kept of an analysed run: name -> the function that makes it, `Report -> Extract`, as `module:function`.

All are made in one go from one `harness.report.build`, in a process of its own (`prepare`), so a run is parsed once
whatever pages are opened. A new analysis is a line here and its function beside its page.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict
from typing import cast

from dashboard.store import Extract
from harness.report import Report
from harness.report.pipeline import describe, modules, render
from harness.report.text import layout

EXTRACTS = {
    "report": "dashboard.extracts:report",
    "overlap": "dashboard.extracts:overlap",
    "memory": "dashboard.extracts:memory",
    "pipeline": "dashboard.extracts:pipeline",
    "timeline": "dashboard.lanes.timeline:memory_timeline",
}

EXPERIMENT = "experiment"
"""What an experiment of `meshscope probe` has instead (`dashboard.ab.extract`)."""

OWN = ("overlap", "memory", "pipeline")
"""Parts of a report's JSON that are extracts."""

Extractor = Callable[[Report], Extract]


def extractor(name: str) -> Extractor:
    module, _, function = EXTRACTS[name].partition(":")
    return cast(Extractor, getattr(importlib.import_module(module), function))


def report(report: Report) -> Extract:
    """The object of `meshscope report --json` without what has an extract of its own (`OWN`).

    `read`: how many inputs were readable; `metric_values`: where each metric is from, or why it is unknown; `layout`
    and `not_predicted` as the report's text says them; `mean_parts`: where each rank's mean traced step goes.
    """
    values = {name: value for name, value in report.to_json().items() if name not in OWN}
    return Extract(
        values=values
        | {
            "read": report.read,
            "metric_values": {name: asdict(value) for name, value in report.metrics.items()},
            "layout": layout(report.config) if report.config is not None else None,
            "not_predicted": report.not_predicted,
            "mean_parts": report.mean_parts,
        }
    )


def overlap(report: Report) -> Extract:
    """`overlap`: the object of `meshscope overlap --json`; `complete_overlap`: the same without steps that a trace
    holds in part, True where there are none such. Null without a trace."""
    same = report.complete_overlap is report.overlap
    return Extract(values={"overlap": report.overlap, "complete_overlap": same or report.complete_overlap})


def memory(report: Report) -> Extract:
    """The object of `meshscope memory --json`, null without a snapshot."""
    return Extract(values=report.memory)


def pipeline(report: Report) -> Extract:
    """`pipeline` of `meshscope report --json`, null without one, and as the report's text says it: `words` about the
    plan (null without one), `modules` of each pipeline rank, `text` in lines."""
    found = report.pipeline
    if found is None:
        return Extract()
    plan = found.plan
    return Extract(
        values=found.to_json()
        | {
            "words": describe(plan, found.passes) if plan else None,
            "modules": [modules(plan, rank) for rank in range(plan.ranks)] if plan else [],
            "text": list(render(found)),
        }
    )
