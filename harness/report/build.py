"""Collects what every analysis says about one path. No figure is computed here that an analysis computes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness import compare
from harness.compare import Lifetime, Measured, Standing, Value, Wanted, lifetime_of, measure, run_metrics
from harness.compare.measured import Reader
from harness.compare.pipeline import Pipeline, pipeline_of
from harness.config import Trainer
from harness.errors import InputError, UsageError
from harness.ledger import Prediction, predict
from harness.memory import Analysis
from harness.recording import Recording
from harness.report.compilation import Compilation, compilation_of
from harness.report.finding import Finding
from harness.report.findings import find
from harness.report.float8 import Float8, float8_of
from harness.report.over_ranks import by_dimension, mean_parts, step_parts
from harness.report.reserved import Unused, unused_of
from harness.trace import Capture, read_captures

SCHEMA_VERSION = 1
ANY_UNIT = Wanted()


@dataclass(kw_only=True, slots=True)
class Report:
    """What was measured (`compare.Measured`), what the ledger says of the same configuration, and what follows.

    `not_predicted` says why there is no prediction for a configuration of this trainer, `no_lifetime` why no life of
    a unit is shown.
    """

    measured: Measured
    config: Trainer.Config | None = None
    prediction: Prediction | None = None
    not_predicted: str | None = None
    communication: list[compare.Communication] = field(default_factory=list)
    pipeline: Pipeline | None = None
    float8: Float8 | None = None
    compilation: Compilation | None = None
    lifetime: Lifetime | None = None
    no_lifetime: str | None = None
    unused: Unused | None = None
    metrics: dict[str, Value] = field(default_factory=dict)
    dimensions: list[dict[str, Any]] = field(default_factory=list)
    step_parts: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.measured.path

    @property
    def mode(self) -> str:
        return self.measured.mode

    @property
    def recording(self) -> Recording | None:
        return self.measured.recording

    @property
    def standing(self) -> Standing | None:
        return self.measured.standing

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self.measured.steps

    @property
    def ranks(self) -> list[dict[str, Any]]:
        return self.measured.ranks

    @property
    def captures(self) -> list[Capture]:
        return self.measured.captures

    @property
    def complete_captures(self) -> list[Capture]:
        return self.measured.complete_captures

    @property
    def snapshots(self) -> Analysis | None:
        return self.measured.snapshots

    @property
    def overlap(self) -> dict[str, Any] | None:
        return self.measured.overlap

    @property
    def complete_overlap(self) -> dict[str, Any] | None:
        return self.measured.complete_overlap

    @property
    def memory(self) -> dict[str, Any] | None:
        return self.measured.memory

    @property
    def mean_parts(self) -> list[dict[str, Any]]:
        return mean_parts(self.step_parts)

    @property
    def errors(self) -> list[InputError]:
        return self.measured.errors

    @property
    def read(self) -> int:
        """How many inputs were readable."""
        return self.measured.read

    def to_json(self) -> dict[str, Any]:
        """The object of `meshscope report --json`; bytes and nanoseconds are integers, unknown is null."""
        return {
            "schema_version": SCHEMA_VERSION,
            "mode": self.mode,
            "path": str(self.path),
            "status": self.standing.to_json() if self.standing else None,
            "missing_ranks": self.recording.missing_ranks if self.recording else [],
            "metrics": {name: value.value for name, value in self.metrics.items()},
            "findings": [asdict(finding) for finding in self.findings],
            "dimensions": self.dimensions,
            "step_parts": self.step_parts,
            "steps": self.steps,
            "ranks": self.ranks,
            "overlap": self.overlap,
            "memory": self.memory,
            "ledger": compare.ledger_json(self.prediction, self.communication) if self.prediction else None,
            "communication": [asdict(row) for row in self.communication],
            "pipeline": self.pipeline.to_json() if self.pipeline else None,
            "float8": self.float8.to_json() if self.float8 else None,
            "compile": self.compilation.to_json() if self.compilation else None,
            "lifetime": self.lifetime.to_json() if self.lifetime else None,
            "errors": [error.to_json() for error in self.errors],
        }


def build(path: Path, read: Reader = read_captures, wanted: Wanted = ANY_UNIT) -> Report:
    """Everything about `path`; raises `InputError` if it holds nothing that can be read, `UsageError` if it lacks the
    `wanted` unit or parameter. `read` reads the traces."""
    report = Report(measured=measure(path, read))
    recording = report.recording
    if recording is not None:
        report.config = compare.recorded_config(recording)
    if recording is not None and report.config is not None:
        target = compare.recorded_target(recording) or ("cpu" if recording.mode == "cpu" else "cuda")
        try:
            settings = compare.recorded_settings(recording)
            report.prediction = predict(report.config, target, settings=settings)
        except UsageError as error:  # a layout that the ledger does not cover
            report.not_predicted = str(error)
        else:
            compare.put_beside(report.prediction, recording)
            compare.put_lines_beside(report.prediction, report.measured)
            report.prediction.time = compare.time_of(report.config, target, report.measured)
    if report.mode != "rehearsal":  # in which nothing was sent
        report.communication = compare.communication(report.prediction, report.captures)
    report.pipeline = pipeline_of(report.config, report.captures)
    report.float8 = float8_of(report)
    report.compilation = compilation_of(report)
    life = lifetime_of(report.config, report.complete_captures, report.snapshots, wanted)
    report.lifetime, report.no_lifetime = (None, life) if isinstance(life, str) else (life, None)
    report.unused = unused_of(report)
    report.metrics = run_metrics(report.measured)
    report.dimensions = by_dimension(report.complete_overlap)
    report.step_parts = step_parts(report.complete_captures)
    report.findings = find(report)
    return report
