"""What `multi_gpu_study` found: predictions beside measurements, verdicts, and what of it is small enough to keep."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.recording import Recording, read_json, read_recording, write_json
from harness.report import build
from harness.text import counted, quantity, signed_percent, size

TRIM = Path(__file__).resolve().parents[1] / "runs" / "trim.py"
SAME_PCT = 0.1
"""How far a rehearsed peak may be from the real rank's."""


@dataclass(frozen=True)
class Layout:
    """`fields` of the run's configuration, by their full names."""

    name: str
    ranks: int
    fields: dict[str, int | str]


@dataclass(frozen=True)
class Probe:
    """A knob on a layout. `choices` are arms, the first that the budget allows is taken; `metric` replaces the knob's
    own, `model` the study's. `known_ahead`: a build that ignores the setting says so, and no trial is needed."""

    knob: str
    layout: Layout
    choices: list[list[str]]
    metric: str | None = None
    model: tuple[str, ...] = ()
    known_ahead: bool = False

    @property
    def folder(self) -> str:
        return self.step.partition(": ")[2].replace(" ", "-")

    @property
    def step(self) -> str:
        return " ".join([f"{self.layout.name}: probe {self.knob}", *(["of", self.model[-1]] if self.model else [])])


def step_seconds(recording: Path) -> tuple[float, int]:
    """The median time of a step, and how many there were. Raises `InputError` if there is no recording."""
    report = build(recording)
    value = report.metrics["step_wall_ns"].value
    return (value or 0) / 1e9, len(report.steps)


def summary(
    work: Path, mode: str, layouts: Sequence[Layout], probes: Sequence[Probe], steps: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Everything as one object: bytes and ns are integers, unknown is null."""
    found = [_layout(work / layout.name, layout, steps) for layout in layouts]
    return {
        "schema_version": 1,
        "mode": mode,
        "machine": next((item["machine"] for item in found if item["machine"]), None),
        "layouts": found,
        "probes": [_probe(work / probe.layout.name / probe.folder, probe, steps) for probe in probes],
        "steps": {name: {k: v for k, v in step.items() if k != "arguments"} for name, step in steps.items()},
    }


def _layout(folder: Path, layout: Layout, steps: dict[str, dict[str, Any]]) -> dict[str, Any]:
    path = folder / "prediction.json"
    known = _state(steps, f"{layout.name}: ledger") == "done"
    predicted = {rank["rank"]: rank["peak_allocated_bytes"] for rank in read_json(path)["ranks"]} if known else {}
    found: dict[str, Any] = asdict(layout) | {"machine": None, "metrics": {}, "communication": []}
    run = rehearsed = None
    if _state(steps, f"{layout.name}: run") == "done":
        report = build(folder / "run")
        run = report.recording
        found["metrics"] = {name: value.value for name, value in report.metrics.items()}
        found["communication"] = [asdict(row) for row in report.communication]
        found["machine"] = run and _machine(run)
    if _state(steps, f"{layout.name}: rehearsal") == "done":
        rehearsed = read_recording(folder / "rehearsal")
    peaks = {name: steady(run, f"peak_{name}_bytes") for name in ("allocated", "reserved")}
    copies = {name: steady(rehearsed, f"peak_{name}_bytes") for name in ("allocated", "reserved")}
    found["peaks"] = [
        {
            "rank": rank,
            "predicted_allocated_bytes": predicted.get(rank),
            "measured_allocated_bytes": peaks["allocated"].get(rank),
            "ledger_error_pct": _apart(predicted.get(rank), peaks["allocated"].get(rank)),
            "measured_reserved_bytes": peaks["reserved"].get(rank),
            "rehearsed_allocated_bytes": copies["allocated"].get(rank),
            "rehearsed_reserved_bytes": copies["reserved"].get(rank),
            "rehearsed_allocated_error_pct": _apart(copies["allocated"].get(rank), peaks["allocated"].get(rank)),
            "rehearsed_reserved_error_pct": _apart(copies["reserved"].get(rank), peaks["reserved"].get(rank)),
        }
        for rank in range(layout.ranks)
    ]
    names = ("rehearsed_allocated_error_pct", "rehearsed_reserved_error_pct")
    errors = [peak[name] for peak in found["peaks"] for name in names if peak[name] is not None]
    found["rehearsal_is_the_run"] = all(abs(error) <= SAME_PCT for error in errors) if errors else None
    return found


def steady(recording: Recording | None, name: str) -> dict[int, int]:
    """Rank -> its highest peak of steps from the second on, where rows state it."""
    rows_of = recording.steps if recording else {}
    known = {
        rank: [row[name] for row in rows if row.get("step", 0) >= 1 and isinstance(row.get(name), int)]
        for rank, rows in rows_of.items()
    }
    return {rank: max(values) for rank, values in known.items() if values}


def _apart(value: int | None, measured: int | None) -> float | None:
    return None if value is None or not measured else 100 * (value - measured) / measured


def _machine(run: Recording) -> dict[str, Any]:
    versions = run.manifest.get("versions") or {}
    devices = [(document.get("device") or {}).get("name") for _, document in sorted(run.ranks.items())]
    return {"devices": devices} | {name: versions.get(name) for name in ("torch", "cuda", "nccl", "driver")}


def _probe(folder: Path, probe: Probe, steps: dict[str, dict[str, Any]]) -> dict[str, Any]:
    step = steps.get(probe.step, {})
    found: dict[str, Any] = {"knob": probe.knob, "layout": probe.layout.name, "model": list(probe.model) or None}
    found |= {"state": step.get("state", "not begun"), "reason": step.get("reason"), "seconds": step.get("seconds")}
    said = _said(Path(f"{folder}.json"))
    if "verdict" not in said:
        return found | {"verdict": None, "metric": None, "pairs": None, "arms": [], "trials": 0}
    metric = said["experiment"]["primary"]
    deciding = {item["arm"]: item for item in said["metrics"] if item["metric"] == metric}
    names = ("a", "b", "effect", "ci_low", "ci_high", "unit", "exact")
    arms = [item | {name: deciding.get(item["arm"], {}).get(name) for name in names} for item in said["comparisons"]]
    return found | {
        "verdict": said["verdict"],
        "metric": metric,
        "pairs": said["experiment"]["pairs"],
        "arms": arms,
        "trials": len(said["trials"]),
    }


def _said(path: Path) -> dict[str, Any]:
    """What a probe printed; nothing of one that has not ended, or failed before it had anything to say."""
    try:
        return read_json(path)
    except InputError:
        return {}


def _state(steps: dict[str, dict[str, Any]], name: str) -> str:
    return str(steps.get(name, {}).get("state"))


def markdown(found: dict[str, Any]) -> str:
    """The same for people."""
    machine = found["machine"] or {}
    devices = ", ".join(dict.fromkeys(str(name) for name in machine.get("devices", [])))
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "cuda", "nccl", "driver") if machine.get(name))
    lines = [f"# Study, mode {found['mode']}", "", "; ".join(filter(None, [devices, versions])), "", "## Layouts", ""]
    headers = [
        "layout",
        "rank",
        "predicted",
        "measured",
        "error",
        "reserved",
        "rehearsed",
        "rehearsed reserved",
        "step",
        "hidden",
    ]
    rows = []
    for layout in found["layouts"]:
        metrics = layout["metrics"]
        for peak in [p for p in layout["peaks"] if p["measured_allocated_bytes"] or p["rehearsed_allocated_bytes"]]:
            rows.append(
                [
                    layout["name"],
                    str(peak["rank"]),
                    size(peak["predicted_allocated_bytes"]),
                    size(peak["measured_allocated_bytes"]),
                    signed_percent(peak["ledger_error_pct"]),
                    size(peak["measured_reserved_bytes"]),
                    _rehearsed(peak, "allocated"),
                    _rehearsed(peak, "reserved"),
                    quantity("step_wall_ns", metrics.get("step_wall_ns")),
                    quantity("overlap_pct", metrics.get("overlap_pct")),
                ]
            )
    lines += [*_table(headers, rows), "", "## Probes", ""]
    headers = ["knob", "layout", "arm", "verdict", "pairs", "change", "interval", "took"]
    rows = []
    for probe in found["probes"]:
        took = "" if probe["seconds"] is None else f"{probe['seconds']:.0f} s"
        if not probe["arms"]:
            why = probe["verdict"] or f"{probe['state']}: {probe['reason'] or ''}"
            rows.append([probe["knob"], probe["layout"], "", why, "", "", "", took])
        for arm in probe["arms"]:
            unit = arm["unit"] or ""
            effect = "" if arm["effect"] is None else f"{probe['metric']} {arm['effect']:+,.4g} {unit}"
            low, high = arm["ci_low"], arm["ci_high"]
            interval = "exact" if arm["exact"] else "" if low is None else f"{low:+,.4g} to {high:+,.4g}"
            verdict = arm["verdict"] + (f" ({arm['reason']})" if arm["reason"] else "")
            against = f"{arm['arm']} against {arm['baseline']}"
            rows.append([probe["knob"], probe["layout"], against, verdict, str(probe["pairs"]), effect, interval, took])
    lines += _table(headers, rows)
    left = [f"{name}: {step['state']}: {step['reason']}" for name, step in found["steps"].items() if step["reason"]]
    lines += ["", "## Not done", "", *(f"- {line}" for line in left)] if left else []
    if kept := found.get("archive"):
        lines += ["", f"{counted(kept['files'], 'file')}, {kept['bytes'] / 1e6:.1f} MB."]
        lines += [f"Left on the machine: {', '.join(kept['left'])}."] if kept["left"] else []
    return "\n".join(lines)


def _rehearsed(peak: dict[str, Any], kind: str) -> str:
    value, error = peak[f"rehearsed_{kind}_bytes"], peak[f"rehearsed_{kind}_error_pct"]
    return "n/a" if value is None else f"{size(value)} ({signed_percent(error)})"


def _table(headers: list[str], rows: list[list[str]]) -> list[str]:
    cells = [headers, ["---"] * len(headers), *rows]
    return ["| " + " | ".join(re.sub(r"([|\n])", " ", cell) for cell in row) + " |" for row in cells]


def archive(found: dict[str, Any], work: Path, out: Path, most_bytes: int, *, until: float, trims: bool) -> None:
    """Fills `out` with summary, pages, predictions, verdicts and logs, then recordings, in order, while they fit and
    until a moment of time.monotonic(); `trims` leaves out of them what no analysis of device traces reads. What stays
    behind is named in the summary."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "summary.json", found)
    left: list[str] = []
    kept = (out / "summary.json").stat().st_size
    small = [
        p
        for pattern in ("*/prediction.json", "*/probe-*.json", "*/*/experiment.json", "logs/*.log", "*/*.html")
        for p in sorted(work.glob(pattern))
    ]
    for path in small:
        kept += _keep_file(path, out / path.relative_to(work), most_bytes - kept, left, work)
    for recording in sorted(path.parent for path in work.glob("*/r[eu]*/manifest.json")):
        target = out / recording.relative_to(work)
        shutil.rmtree(target, ignore_errors=True)
        if time.monotonic() > until or not _copy_recording(recording, target, trims, until):
            left.append(f"{recording.relative_to(work)} (no time was left)")
            continue
        taken = folder_bytes(target)
        if kept + taken > most_bytes:
            shutil.rmtree(target, ignore_errors=True)
            left.append(f"{recording.relative_to(work)} ({taken / 1e6:.1f} MB)")
        else:
            kept += taken
    found["archive"] = {"bytes": kept, "files": sum(1 for _ in _files(out)), "left": left}
    write_json(out / "summary.json", found)
    (out / "summary.md").write_text(markdown(found) + "\n", encoding="utf-8")


def _keep_file(path: Path, target: Path, room: int, left: list[str], work: Path) -> int:
    taken = path.stat().st_size
    if taken > room:
        left.append(f"{path.relative_to(work)} ({taken / 1e6:.1f} MB)")
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
    return taken


def _copy_recording(recording: Path, target: Path, trims: bool, until: float) -> bool:
    """Whether it was done in time; nothing is left of a copy that was not, nor of one that is interrupted."""
    words = [sys.executable, str(TRIM), str(recording), str(target)]
    try:
        if trims:
            target.parent.mkdir(parents=True, exist_ok=True)
            if subprocess.run(words, capture_output=True, timeout=max(1.0, until - time.monotonic())).returncode == 0:
                return True
        shutil.copytree(recording, target)
    except subprocess.TimeoutExpired:
        shutil.rmtree(target, ignore_errors=True)
        return False
    except KeyboardInterrupt:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return True


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def folder_bytes(folder: Path) -> int:
    return sum(os.path.getsize(path) for path in _files(folder))
