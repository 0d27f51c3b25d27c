"""One line per run for the list of them: what it says of itself and of its steps, without reading a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

from dashboard import data
from dashboard.discover import Run, files_of, is_input
from harness.compare import Measured, recorded_config, run_metrics
from harness.compare.difference import devices
from harness.errors import InputError
from harness.recording import read_json
from harness.report.finding import SEVERITIES
from harness.report.text import layout
from harness.sources import SNAPSHOT_NAME
from harness.text import counted
from probes.experiment import ANALYSIS

GOING_ON = ("planned", "running")


def summary(root: Path, run: Run) -> dict[str, Any]:
    """Fields of a row: `run`, `state`, `mode`, `world_size`, `layout`, `steps`, metrics of the step rows, `torch`,
    `nccl`, `devices`, `experiment`, `findings` (of a run that was analysed before), `started_unix_ns`."""
    row = {"run": run.name or ".", "experiment": run.experiment}
    found = said(run, data.stamps(run)) if run.kind == "recording" else of_folder(run)
    live = found["state"] in GOING_ON
    if live and not data.is_live(run):  # its writer went away without a word
        live, found = False, found | {"state": "abandoned"}
    return row | found | {"findings": findings(root, run, live=live)}


def says_it_goes_on(run: Run) -> bool:
    return run.kind == "recording" and said(run, data.stamps(run))["state"] in GOING_ON


@st.cache_data(max_entries=10_000, show_spinner=False)
def said(run: Run, stamps: str) -> dict[str, Any]:
    """What a recording says of itself, kept while its files stay as they are; rows themselves are not kept."""
    try:
        rows = data.rows(run)
    except InputError as error:
        return {"state": "unreadable", "note": error.reason}
    return {} if rows is None else of_recording(run, rows)


def of_recording(run: Run, rows: data.Rows) -> dict[str, Any]:
    recording, manifest = rows.recording, rows.recording.manifest
    config = recorded_config(recording)
    versions = manifest.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    measured = Measured(
        path=run.path,
        mode=recording.mode or "imported",
        recording=recording,
        standing=rows.standing,
        steps=rows.steps,
        ranks=rows.ranks,
    )
    metrics = {name: value.value for name, value in run_metrics(measured).items()}
    started = manifest.get("started_unix_ns")
    return {
        "state": state_of(rows),
        "mode": recording.mode,
        "world_size": manifest.get("world_size"),
        "layout": layout(config)["layout"] if config is not None else None,
        "name": config.name if config is not None else None,
        "steps": len(rows.steps),
        **{name: metrics[name] for name in ("step_wall_ns", "tokens_per_s", "peak_allocated_bytes")},
        "torch": versions.get("torch"),
        "nccl": versions.get("nccl"),
        "devices": devices(recording.ranks.values()),
        "started": started if isinstance(started, int) else None,
        "note": rows.standing.reason,
    }


def state_of(rows: data.Rows) -> str:
    """`complete`, `running`, …; `abandoned` for a run that says it runs and does not, `partial` for a complete one that
    lacks ranks."""
    if rows.standing.abandoned:
        return "abandoned"
    if rows.standing.state == "complete" and rows.recording.missing_ranks:
        return "partial"
    return rows.standing.state or "unknown"


def of_folder(run: Run) -> dict[str, Any]:
    found = [path for path in files_of(run.path) if is_input(path)]
    snapshots = sum(bool(SNAPSHOT_NAME.search(path.name)) for path in found)
    held = [counted(len(found) - snapshots, "trace")] if len(found) > snapshots else []
    held += [counted(snapshots, "snapshot")] if snapshots else []
    return {"state": "files", "mode": "imported", "layout": ", ".join(held)}


def findings(root: Path, run: Run, *, live: bool) -> str | None:
    """`2 high, 1 medium` of a run whose analysis is on disk; None where it is not."""
    if not data.is_prepared(run, live=live):
        return None
    try:
        found = [finding["severity"] for finding in data.extract(root, run, "report").values["findings"]]
    except InputError:
        return None
    counts = [f"{found.count(severity)} {severity}" for severity in SEVERITIES if severity in found]
    return ", ".join(count for count in counts if not count.endswith("info")) or "none"


@st.cache_data(ttl=3, show_spinner=False)
def experiment(run: Run) -> dict[str, Any]:
    """What an experiment's files say of it; the figures are those of `meshscope probe --json`."""
    row: dict[str, Any] = {"run": run.name or "."}
    try:
        plan = read_json(run.path / "experiment.json")
    except InputError as error:
        return row | {"verdict": "unreadable", "note": error.reason}
    row |= {"knob": plan.get("knob"), "mode": plan.get("mode"), "pairs": plan.get("pairs")}
    row["primary"] = plan.get("primary")
    try:
        analysis = read_json(run.path / ANALYSIS)
    except InputError:
        return row | {"verdict": "not analysed yet"}
    return row | {"verdict": analysis.get("verdict"), "recommended": (analysis.get("recommended") or {}).get("arm")}
