"""Joins: a recording with the ledger's prediction for its configuration, and one run with another.

`against_ledger` puts measured peaks and collectives beside predicted ones, `time` measured times. `measured` reads a
path, `metrics` reduces it to one number each, `runs` compares two of them, `gate` decides `--fail-on`.
"""

from harness.compare.against_ledger import (
    Communication,
    axis_of,
    communication,
    config_errors,
    ledger_json,
    put_beside,
    recorded_config,
    recorded_settings,
    recorded_target,
    require_same,
    steady_peaks,
)
from harness.compare.gate import Bound, GateResult, check, parse_bound
from harness.compare.lifetime import Lifetime, Wanted, lifetime_of
from harness.compare.lines import put_lines_beside
from harness.compare.measured import Measured, measure
from harness.compare.metrics import METRICS, Value, run_metrics
from harness.compare.runs import Comparison, compare_runs
from harness.compare.standing import Standing, standing
from harness.compare.time import time_of

__all__ = [
    "METRICS",
    "Bound",
    "Communication",
    "Comparison",
    "GateResult",
    "Lifetime",
    "Measured",
    "Standing",
    "Value",
    "Wanted",
    "axis_of",
    "check",
    "communication",
    "compare_runs",
    "config_errors",
    "ledger_json",
    "lifetime_of",
    "measure",
    "parse_bound",
    "put_beside",
    "put_lines_beside",
    "recorded_config",
    "recorded_settings",
    "recorded_target",
    "require_same",
    "run_metrics",
    "standing",
    "steady_peaks",
    "time_of",
]
