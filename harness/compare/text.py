"""A comparison for people: a terminal's text, and Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from harness.compare.against_ledger import Communication
from harness.compare.gate import GateResult
from harness.compare.runs import Comparison, MetricComparison
from harness.text import printable, quantity, signed_percent, table

VALUE_SHOWN = 60
SIGN = {"better": "better", "worse": "WORSE", "no difference": "same", "inconclusive": "inconclusive"}


def render(comparison: Comparison, gate: list[GateResult]) -> str:
    """Verdict, figures, what the runs differ in, notes, gates."""
    lines = [f"{comparison.verdict}{'' if comparison.comparable else ' (the runs are not comparable)'}"]
    lines += [f"  {arm['name']}  {printable(arm['path'])}   mode {arm['mode']}" for arm in comparison.arms]
    rows = [[item.metric, *_figures(item), SIGN[item.verdict]] for item in _known(comparison)]
    lines += ["", *table(["metric", "A", "B", "change", ""], rows)]
    if comparison.differences:
        lines += ["", "What the runs differ in"]
        differ = [[printable(item.what), _short(item.a), f" {_short(item.b)}"] for item in comparison.differences]
        lines += table(["", "A", " B"], differ, left=2, last_left=True)
    else:
        lines += ["", "The runs state nothing they differ in"]
    lines += ["", *(f"note: {printable(note)}" for note in comparison.notes)] if comparison.notes else []
    lines += ["", *(f"gate {item.bound}: {_state(item)}, {item.reason}" for item in gate)] if gate else []
    return "\n".join(lines)


def markdown(comparison: Comparison, gate: list[GateResult]) -> str:
    """The same as tables of GitHub's Markdown; long lists are folded."""
    state = "" if comparison.comparable else " (the runs are not comparable)"
    lines = [f"### meshscope compare: {comparison.verdict}{state}", ""]
    lines += [f"- {arm['name']}: {_code(arm['path'])}, mode {arm['mode']}" for arm in comparison.arms]
    lines += ["", "| metric | A | B | change | verdict |", "|---|---:|---:|---:|---|"]
    lines += [
        f"| {item.metric} | {' | '.join(_figures(item))} | {_bold(item.verdict)} |" for item in _known(comparison)
    ]
    if gate:
        lines += ["", "| gate | | |", "|---|---|---|"]
        lines += [f"| {_code(item.bound)} | {_bold(_state(item))} | {_cell(item.reason)} |" for item in gate]
    if comparison.differences:
        lines += [
            "",
            f"<details><summary>What the runs differ in: {len(comparison.differences)}</summary>",
            "",
            "| | A | B |",
            "|---|---|---|",
        ]
        lines += [f"| {_cell(d.what)} | {_code(_short(d.a))} | {_code(_short(d.b))} |" for d in comparison.differences]
        lines += ["", "</details>"]
    if comparison.notes:
        lines += ["", *(f"- {_cell(note)}" for note in comparison.notes)]
    return "\n".join(lines)


def collectives(rows: Sequence[Communication], *, compared: bool) -> Iterator[str]:
    """What each rank sends in a step, beside what was predicted if it is compared; nothing without rows."""
    if not rows:
        return
    what = "predicted and recorded" if compared else "recorded"
    yield f"Collectives of each rank and step, {what}; bytes of the full (unsharded) side"
    staged = any(row.pipeline_rank is not None for row in rows)
    cells = []
    for row in rows:
        figures = [row.measured_count, row.measured_bytes]
        if compared:
            figures = [row.predicted_count, row.measured_count, row.predicted_bytes, row.measured_bytes]
        agree = {True: "equal", False: "DIFFERS", None: "n/a"}[row.agree]
        counts = ["n/a" if figure is None else f"{figure:,}" for figure in figures]
        stage = ["" if row.pipeline_rank is None else str(row.pipeline_rank)] if staged else []
        cells.append([*stage, row.dimension, row.kind, *counts, *([agree] if compared else [])])
    headers = ["predicted", "recorded", "predicted bytes", "recorded bytes", ""] if compared else ["count", "bytes"]
    yield from table([*(["pp rank"] if staged else []), "dimension", "kind", *headers], cells, left=2 + staged)


def _known(comparison: Comparison) -> list[MetricComparison]:
    """Metrics that neither run states are in --json only."""
    return [item for item in comparison.metrics if item.a is not None or item.b is not None]


def _figures(item: MetricComparison) -> list[str]:
    change = signed_percent(item.effect_pct)
    if item.metric.endswith("_pct") and item.a is not None and item.b is not None:
        change = signed_percent(item.b - item.a).replace("%", "points")
    return [quantity(item.metric, item.a), quantity(item.metric, item.b), change]


def _state(item: GateResult) -> str:
    return "passed" if item.passed else "FAILED"


def _short(value: Any) -> str:
    text = "not stated" if value is None else printable(str(value))
    return text if len(text) <= VALUE_SHOWN else f"{text[: VALUE_SHOWN - 2]}.."


def _bold(text: str) -> str:
    return f"**{text}**" if text in ("worse", "better", "FAILED") else text


def _cell(text: str) -> str:
    """A stranger's text in a Markdown table: no markup, one line."""
    text = printable(text)
    for mark in ("&", "<", ">"):
        text = text.replace(mark, {"&": "&amp;", "<": "&lt;", ">": "&gt;"}[mark])
    for mark in ("\\", "|", "`", "*", "_", "[", "]", "@", "#"):
        text = text.replace(mark, f"\\{mark}")
    return text


def _code(text: str) -> str:
    return f"`{printable(text).replace('`', chr(39)).replace('|', chr(92) + '|')}`"
