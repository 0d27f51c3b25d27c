"""`benchmarks/multi_gpu_study.py` on CPUs: what it chooses, its limits, a whole study, and going on."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.report import build
from probes.inference import MIN_PAIRS

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "multi_gpu_study.py"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import multi_gpu_study

    return multi_gpu_study


def call(work: Path, *words: str) -> subprocess.CompletedProcess[str]:
    folders = ["--out", str(work / "out"), "--work", str(work / "work")]
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--mode", "cpu", *folders, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )


def test_folder_that_cannot_be_made_is_said_before_anything_runs(tmp_path):
    (tmp_path / "out").write_text("a file")
    done = call(tmp_path, "--budget-s", "5")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"--out {tmp_path / 'out'}: File exists: name another folder" in line


def test_layouts_use_every_rank(study):
    for ranks, mode in ((2, "cpu"), (2, "real"), (4, "real"), (8, "real"), (8, "shared-gpu")):
        layouts = study.layouts_of(ranks, mode)
        for layout in layouts:
            degrees = [n for name, n in layout.fields.items() if name.startswith("parallelism.") and isinstance(n, int)]
            assert math.prod(degrees) == ranks
        assert len({layout.name for layout in layouts}) == len(layouts)
    tail = "_fsdp2_tp2"
    names = ["fsdp4_tp2", "fsdp8", "tp8", *(f"{name}{tail}" for name in ("hsdp2", "cp2", "cp2_ring"))]
    assert [layout.name for layout in layouts] == [*names, *(f"pp2_{name}{tail}" for name in ("1f1b", "zbv"))]
    probes = study.probes_of(study.layouts_of(4, "real"), False)
    assert [probe.layout.name for probe in probes] == [*["fsdp4"] * 6, "fsdp2_tp2"]
    assert len({probe.step for probe in probes}) == len(probes)


@pytest.mark.parametrize(
    ("arms", "metric", "pairs"), [(2, None, 6), (3, None, 7), (4, None, 7), (5, None, 8), (2, "peak_reserved_bytes", 2)]
)
def test_fewest_pairs_can_reach_a_verdict(study, arms, metric, pairs):
    """The exact p of n pairs of one sign is 2·2⁻ⁿ; with one pair less it is above 5 % shared by the comparisons."""
    assert study.least_pairs(arms, metric) == pairs
    if metric is None:
        assert 2 * 2.0**-pairs <= 0.05 / (arms - 1) < 2 * 2.0 ** -(pairs - 1) or pairs == MIN_PAIRS


def test_plans_of_all_modes_are_ones_that_can_run(study, tmp_path):
    """Every command's own parser takes what the study says, for any number of GPUs; nothing is started."""
    from harness.cli import build_parser, split_overrides
    from harness.recipes.arguments import config_from
    from probes.knobs import find_knob

    for mode, ranks in (("real", 8), ("real", 4), ("real", 2), ("shared-gpu", 4), ("cpu", 2)):
        planned = study.Study(mode, ranks, tmp_path, time.monotonic() + 1e6, 900, 8, 40, None, [])
        for layout in study.layouts_of(ranks, mode):
            for probe in [None, *study.probes_of(study.layouts_of(ranks, mode), mode == "cpu")]:
                model = probe.model if probe else ()
                words = ["run", *planned.recipe(probe.layout if probe else layout, model)]
                rest, overrides = split_overrides(words)
                args = build_parser("run").parse_args(rest, study.argparse.Namespace(overrides=overrides))
                assert config_from(args).world_size == ranks
            for probe in study.probes_of(study.layouts_of(ranks, mode), mode == "cpu"):
                knob, _ = find_knob(probe.knob)
                for arms in probe.choices:
                    assert len(knob.arms(arms)) == len(arms)


def test_command_is_ended_at_its_limit(study, tmp_path):
    words = ["run", "--module", "debug", "--config", "single", "--mode", "cpu", "--training.steps", "100000"]

    code = study.command([*words, "--out", str(tmp_path / "run")], tmp_path / "logs" / "run.log", None, 4.0)

    assert code is None
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in path.read_bytes()]
    assert left == []


def test_predictions_can_be_written_without_a_gpu(tmp_path):
    done = call(tmp_path, "--mode", "real", "--ranks", "2", "--predict", "--layouts", "fsdp2,pp2_1f1b")

    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    found = json.loads((tmp_path / "out" / "predicted.json").read_text())["layouts"]
    assert [layout["name"] for layout in found] == ["fsdp2", "pp2_1f1b"]
    pipeline = found[1]
    assert [rank["rank"] for rank in pipeline["ranks"]] == [0, 1]
    assert all(rank["peak_allocated_bytes"] > 2**30 for layout in found for rank in layout["ranks"])
    assert {row["kind"] for row in pipeline["communication"]} >= {"send", "recv"}


@pytest.mark.distributed
def test_whole_study_and_going_on_with_it(tmp_path):
    options = ["--layouts", "fsdp2", "--knobs", "threads", "--step-limit-s", "36", "--archive-mb", "3"]

    done = call(tmp_path, "--budget-s", "120", *options)

    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    states = {name: step["state"] for name, step in found["steps"].items()}
    assert states == {
        "fsdp2: ledger": "done",
        "fsdp2: run": "done",
        "fsdp2: rehearsal": "done",
        "fsdp2: report": "done",
        "fsdp2: probe threads": "skipped",  # twelve trials in 36 s
    }
    (layout,) = found["layouts"]
    recorded = tmp_path / "work" / "fsdp2" / "run"
    written = (recorded.parent / "prediction.json").stat().st_mtime_ns
    assert written < (recorded / "config.json").stat().st_mtime_ns
    report = build(recorded)
    assert layout["metrics"] == {name: value.value for name, value in report.metrics.items()}
    assert all(row["agree"] for row in layout["communication"])
    assert [peak["rank"] for peak in layout["peaks"]] == [0, 1]
    assert all(abs(peak["ledger_error_pct"]) < 5 for peak in layout["peaks"]), "gloo may hold what it gathered"
    rehearsed, predicted = (layout["peaks"][0][f"{name}_allocated_bytes"] for name in ("rehearsed", "predicted"))
    assert rehearsed == pytest.approx(predicted, rel=1e-3)
    (probe,) = found["probes"]
    assert (probe["state"], probe["verdict"]) == ("skipped", None)
    assert "12 trials of about" in probe["reason"]
    assert found["archive"]["left"] == []
    kept = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert kept <= 3e6
    assert build(tmp_path / "out" / "fsdp2" / "run").metrics == report.metrics
    text = (tmp_path / "out" / "summary.md").read_text()
    assert text.strip() in done.stdout
    assert "| fsdp2 | 0 |" in text

    moment = (recorded / "status.json").stat().st_mtime_ns
    again = call(tmp_path, "--budget-s", "1", *options, "--archive-mb", "0.02")

    assert again.returncode == 0, again.stderr
    assert (recorded / "status.json").stat().st_mtime_ns == moment, "what is done ran again"
    trimmed = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {name: step["state"] for name, step in trimmed["steps"].items()} == states
    assert any(line.startswith("fsdp2/run ") for line in trimmed["archive"]["left"])
    assert not (tmp_path / "out" / "fsdp2" / "run").exists()

    other = call(tmp_path, "--budget-s", "1", "--training.seq_len", "64")
    assert other.returncode == 2
    assert "holds another study" in other.stderr


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["--budget-s", "0"], 2, "--budget-s must be above 0"),
        (["--budget-s", "9", "--layouts", "fsdp3"], 2, "--layouts fsdp3: there are fsdp2, tp2, hsdp2, cp2, cp2_ring"),
        (["--budget-s", "9", "--knobs", "nccl"], 2, "--knobs nccl: there are fsdp.reshard, threads"),
        (["--budget-s", "9", "training.steps", "3"], 2, "are given as --section.field VALUE"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, words, code, reason):
    done = call(tmp_path, *words)

    assert (done.returncode, done.stdout) == (code, "")
    assert reason in done.stderr.splitlines()[-1]


def test_verdicts_are_those_of_the_probes(study, tmp_path):
    """A finished probe, one whose verdict is known without a trial, and one that ended without a word."""
    layout = study.Layout("fsdp2", 2, {"parallelism.dp_shard": 2})
    probes = [study.Probe(knob, layout, [["1", "2"]]) for knob in ("threads", "record_streams", "fsdp.reshard")]
    metric = {"arm": "2", "metric": "step_wall_ns", "a": 10, "b": 9, "effect": -10.0, "ci_low": -12.0, "ci_high": -8.0}
    said = {
        "verdict": "better",
        "experiment": {"primary": "step_wall_ns", "pairs": 6},
        "metrics": [{**metric, "unit": "%", "exact": False}],
        "comparisons": [{"arm": "2", "baseline": "1", "verdict": "better", "reason": None}],
        "trials": [{}] * 12,
    }
    dead = {**said, "verdict": "ignored by this build", "metrics": [], "comparisons": [], "trials": []}
    steps = {}
    for probe, text in zip(probes, (json.dumps(said), json.dumps(dead), ""), strict=True):
        path = tmp_path / "fsdp2" / f"{probe.folder}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        steps[probe.step] = {"state": "done" if text else "failed", "seconds": 60.0, "reason": None if text else "why"}

    found = study.study_summary.summary(tmp_path, "cpu", [], probes, steps)
    lines = study.study_summary.markdown(found).splitlines()

    assert [probe["verdict"] for probe in found["probes"]] == ["better", "ignored by this build", None]
    assert "| threads | fsdp2 | 2 against 1 | better | 6 | step_wall_ns -10 % | -12 to -8 | 60 s |" in lines
    assert any(line.startswith("| record_streams | fsdp2 |  | ignored by this build |") for line in lines)
    assert any(line.startswith("| fsdp.reshard | fsdp2 |  | failed: why |") for line in lines)
