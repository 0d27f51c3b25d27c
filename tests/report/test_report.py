"""The report over recordings written here: complete, failed, partial, of other trainers, and of files alone."""

from __future__ import annotations

import json

import pytest
from written import MIB, write_recording, write_trace

from harness import compare, recording
from harness.cli import main
from harness.config import Parallelism, Trainer
from harness.config_json import to_dict
from harness.errors import UsageError
from harness.ledger import predict
from harness.report import build
from harness.report.text import render

CONFIG = Trainer.Config(name="written", world_size=2, parallelism=Parallelism.Config(tp=2))


def test_steps_ranks_and_prediction_of_a_recording(tmp_path):
    report = build(write_recording(tmp_path, config=to_dict(CONFIG)))
    assert [step["wall_ns"] for step in report.steps] == [11_000_000, 12_000_000, 13_000_000]
    assert report.steps[2]["ranks"][1]["peak_allocated_bytes"] == 3 * MIB + 1
    assert [rank["median_step_wall_ns"] for rank in report.ranks] == [11_500_000, 12_500_000]
    assert report.ranks[0]["peak_allocated_bytes_by_phase"] == {"forward": 2 * MIB}
    expected = predict(CONFIG, "cpu").ranks[1].peak_allocated_bytes
    assert report.prediction.ranks[1].peak_allocated_bytes == expected
    assert report.prediction.ranks[1].measured_peak_allocated_bytes == 3 * MIB + 1
    assert report.prediction.ranks[1].error_pct == pytest.approx(100 * (expected / (3 * MIB + 1) - 1))
    text = render(report)
    assert "written: 2 ranks, dp_shard 1 × tp 2 with sequence parallel" in text
    assert "torch 9.9" in text
    assert json.loads(json.dumps(report.to_json()))["ledger"]["ranks"][1]["peak_allocated_bytes"] == expected


def test_the_first_step_is_not_held_against_the_steady_peak(tmp_path):
    report = build(write_recording(tmp_path, config=to_dict(CONFIG), steps=1))
    assert report.prediction.ranks[0].measured_peak_allocated_bytes is None
    assert report.prediction.ranks[0].error_pct is None


@pytest.mark.parametrize(("extra", "agree"), [(0, True), (1, False)])
def test_collectives_agree_only_when_every_count_does(tmp_path, extra, agree):
    write_recording(tmp_path, config=to_dict(CONFIG))
    sent = [(c.kind, c.count, c.bytes // c.count) for c in predict(CONFIG, "cpu").collectives]
    kind, count, size = sent[0]
    write_trace(tmp_path, 0, [(kind, count + extra, size), *sent[1:]])
    rows = build(tmp_path).communication
    assert {row.dimension for row in rows} == {"tp"}
    assert {row.kind: row.agree for row in rows} == {
        name: agree or name != kind for name in ("all_gather", "all_reduce", "reduce_scatter")
    }


def test_a_collective_nobody_predicted_differs(tmp_path):
    write_recording(tmp_path, config=to_dict(CONFIG))
    write_trace(tmp_path, 0, [("broadcast", 2, 64)])
    by_kind = {row.kind: row for row in build(tmp_path).communication}
    assert (by_kind["broadcast"].predicted_count, by_kind["broadcast"].measured_count) == (0, 2)
    assert by_kind["broadcast"].agree is False
    assert by_kind["all_gather"].measured_count == 0
    assert by_kind["all_gather"].agree is False


def test_another_trainers_recording_has_no_ledger(tmp_path):
    write_recording(tmp_path, config={"model": "ours", "lr": 1})
    write_trace(tmp_path, 0, [("all_gather", 3, 64)])
    report = build(tmp_path)
    assert report.prediction is None
    (row,) = report.communication
    assert (row.predicted_count, row.measured_count, row.measured_bytes, row.agree) == (None, 3, 192, None)
    assert "predicted" not in render(report)


def test_what_is_missing_is_said(tmp_path, capsys):
    write_recording(tmp_path, config=to_dict(CONFIG), ranks=1)
    recording.write_status(tmp_path, "failed", "rank 1 exited: out of memory")
    with open(recording.steps_path(tmp_path, 0), "a") as file:
        file.write('{"step": 3, "wa')
    assert main(["report", str(tmp_path)]) == 4
    out, err = capsys.readouterr()
    assert "failed: rank 1 exited: out of memory" in out
    assert "without a step: rank 1" in out
    assert "rank1.jsonl: has no step" in err
    assert "torn" in err
    assert all(line.startswith("meshscope report: error: ") for line in err.splitlines())


def test_rows_without_known_memory_are_not_zero(tmp_path):
    report = build(write_recording(tmp_path, memory_source="rss", peak_allocated_bytes=None, phases={}))
    assert report.ranks[0]["peak_allocated_bytes"] is None
    assert "n/a" in render(report)


def test_a_folder_of_traces_alone(tmp_path, capsys):
    write_trace(tmp_path, 0, [("all_reduce", 1, 8)])
    assert main(["report", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mode"] == "imported"
    assert report["status"] is None
    assert report["overlap"]["ranks"][0]["rank"] == 0
    assert report["ledger"] is None


def test_nothing_readable_is_one_line_and_exit_3(tmp_path, capsys):
    (tmp_path / "broken.json").write_text("")
    assert main(["report", str(tmp_path)]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1


def test_a_configuration_that_differs_is_named():
    other = Trainer.Config(world_size=2, parallelism=Parallelism.Config(tp=2))
    other.model.dim = 512
    with pytest.raises(UsageError, match=r"model\.dim 256, here 512"):
        compare.require_same(to_dict(CONFIG), other)


@pytest.mark.parametrize(
    ("section", "field", "value", "reason"),
    [
        ("parallelism", "tp", 0, "parallelism.tp=0 must be at least 1"),
        ("parallelism", "tp", 3, "is not divisible by"),
        ("model", "dim", "wide", "model.dim: Expected `int`, got `str`"),
        ("model", "of_a_later_version", 1, "no field model.of_a_later_version"),
    ],
)
def test_a_configuration_that_cannot_be_is_named_and_the_rest_reported(tmp_path, capsys, section, field, value, reason):
    tree = to_dict(CONFIG)
    tree[section][field] = value
    write_recording(tmp_path, config=tree)
    assert main(["report", str(tmp_path)]) == 4
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert f"{recording.manifest_path(tmp_path)}: config: " in said.err
    assert reason in said.err
    assert "3.000 MiB" in said.out, "the measured peak of rank 0"


def test_a_peak_of_nothing_is_no_peak(tmp_path, capsys):
    write_recording(tmp_path, config=to_dict(CONFIG), peak_allocated_bytes=0)
    arguments = ["--module", "debug", "--config", "single", "--nproc", "2", "--parallelism.dp_shard=1"]
    overrides = [f"--model.{name}={value}" for name, value in to_dict(CONFIG)["model"].items() if name != "name"]
    overrides += [f"--training.{name}={value}" for name, value in to_dict(CONFIG)["training"].items()]
    assert main(["ledger", *arguments, "--parallelism.tp=2", *overrides, "--against", str(tmp_path)]) == 4
    assert "states no allocated peak" in capsys.readouterr().err


def test_nothing_that_a_recording_says_reaches_the_terminal_as_a_command(tmp_path, capsys):
    write_recording(tmp_path, memory_source="\x1b[31mred\n", tags=["\x1b]0;title\x07"], phases={"\x1b[2J": {}})
    recording.write_status(tmp_path, "failed", "because\x1b[31m\nof")
    assert main(["report", str(tmp_path)]) in (0, 4)
    said = capsys.readouterr().out
    assert "red" in said
    assert all(line.isprintable() for line in said.split("\n"))
