"""`ledger --against`: what was measured beside each line and each collective, and what is there when little was."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from harness import compare, recording
from harness.cli import main
from harness.compare.lines import put_lines_beside
from harness.config import Trainer
from harness.config_json import to_dict
from harness.ledger import Prediction, predict
from harness.recipes.debug import tiny

TINY = ("ledger", "--module", "debug", "--config", "tiny", "--against")


def by_line(prediction: Prediction) -> dict[str, int]:
    return {entry.category: entry.at_peak_bytes for entry in prediction.ranks[0].entries}


def write(directory: Path, *, phase: str = "forward", composition: list[dict[str, Any]] | None = None) -> Path:
    """A CPU recording of `tiny` whose ranks have the predicted peak in step 2, in a phase, of a composition."""
    peak = predict(tiny(), "cpu").ranks[0].peak_allocated_bytes
    mesh = {"dp_shard": [0, 2], "tp": [0, 1]}
    about = {"mode": "cpu", "world_size": 4, "config": to_dict(tiny()), "mesh": mesh}
    recording.merge_manifest(directory, about)
    recording.write_status(directory, "complete")
    for rank in range(4):
        row: dict[str, Any] = {"step": 2, "memory_source": "tensor_storages", "peak_allocated_bytes": peak}
        row |= {"phases": {phase: {"peak_allocated_bytes": peak}, "other": {"peak_allocated_bytes": peak - 1}}}
        row |= {} if composition is None else {"peak_composition": composition}
        first = {"step": 1, "memory_source": "tensor_storages", "peak_allocated_bytes": peak - 5}
        first |= {"peak_composition": [{"category": "parameter", "bytes": 1}]}
        path = recording.steps_path(directory, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{json.dumps(first)}\n{json.dumps(row)}\n")
    return directory


def composition() -> list[dict[str, Any]]:
    """As the storages of a forward are labelled, the optimizer states 4 bytes more than predicted."""
    lines = by_line(predict(tiny(), "cpu"))
    activations = sum(size for name, size in lines.items() if name.startswith("activations: "))
    found = {
        "parameter": lines["parameters"] + lines["unsharded parameters"],
        "optimizer_state": lines["optimizer states"] + 4,
        "activation": activations + lines["logits and loss"] + lines["all-gather output"],
        "other": 12,
    }
    return [{"category": name, "bytes": size} for name, size in found.items()]


def test_lines_that_a_peak_was_measured_to_consist_of(tmp_path, capsys):
    assert main([*TINY, str(write(tmp_path, composition=composition())), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    lines = by_line(predict(tiny(), "cpu"))
    for rank in printed["ranks"]:
        entries = {entry["category"]: entry for entry in rank["entries"]}
        states = entries["optimizer states"]
        assert states["measured_bytes"] == lines["optimizer states"] + 4
        assert states["error_pct"] == pytest.approx(-400 / (lines["optimizer states"] + 4))
        assert [name for name, entry in entries.items() if entry["measured_bytes"] is not None] == ["optimizer states"]
        sums = {tuple(one["measured_as"]): one for one in rank["sums"]}
        assert set(sums) == {("parameter",), ("optimizer_state",), ("activation",)}
        assert sorted(sums["parameter",]["lines"]) == ["parameters", "unsharded parameters"]
        assert sums["activation",]["predicted_bytes"] == sums["activation",]["measured_bytes"]
        assert sums["activation",]["error_pct"] == 0
        assert "logits and loss" in sums["activation",]["lines"]


def test_sums_are_in_the_text(tmp_path, capsys):
    assert main([*TINY, str(write(tmp_path, composition=composition()))]) == 0
    out = capsys.readouterr().out
    assert "rank 0's peak, as it was measured" in out
    (line,) = (line for line in out.splitlines() if line.startswith("  activations + logits and loss "))
    assert line.split()[-2:] == ["0.00", "%"]


def test_what_a_phase_allocates_is_not_compared_with_a_peak_in_another(tmp_path):
    prediction = predict(tiny(), "cpu")
    assert prediction.ranks[0].at.startswith("forward")
    put_lines_beside(prediction, compare.measure(write(tmp_path, phase="backward", composition=composition())))
    assert [one.measured_as for one in prediction.ranks[0].sums] == [["parameter"], ["optimizer_state"]]


def test_without_a_composition_no_line_is_measured(tmp_path):
    (tmp_path / "run").mkdir()
    prediction = predict(tiny(), "cpu")
    directory = write(tmp_path / "run", composition=[])
    for rank in range(4):
        path = recording.steps_path(directory, rank)
        path.write_text(path.read_text().splitlines()[1] + "\n")
    put_lines_beside(prediction, compare.measure(directory))
    assert all(rank.sums == [] for rank in prediction.ranks)
    assert {entry.measured_bytes for rank in prediction.ranks for entry in rank.entries} == {None}


def with_wide_logits() -> Trainer.Config:
    """`tiny` with a vocabulary that makes the forward's end its peak on CUDA, too."""
    config = tiny()
    config.model.vocab_size = 8192
    return config


def write_snapshot(directory: Path, *, before: int = 0) -> Path:
    """rank 0's allocator in the predicted forward peak, labelled; `before` bytes from before it."""
    lines = by_line(predict(with_wide_logits(), "cuda"))
    forward = sum(size for name, size in lines.items() if name.startswith(("activations: ", "logits")))
    sizes = {
        "parameter": lines["parameters"],
        "optimizer_state": lines["optimizer states"],
        "unsharded_parameter": lines["unsharded parameters"],
        "activation": forward - 7,
        "logits_loss": 7,
    }
    events, blocks = [], []
    for number, (name, size) in enumerate([*sizes.items(), *([("", before)] if before else [])]):
        address = (1 << 40) + (number << 32)
        block = {"address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": []}
        event = {"action": "alloc", "addr": address, "size": size, "stream": 0, "time_us": number, "frames": []}
        blocks.append(block)
        events += [event | {"user_metadata": f"category={name}"}] if name else []
    total = sum(block["size"] for block in blocks)
    segment = {"device": 0, "address": 1 << 40, "total_size": total, "stream": 0, "blocks": blocks}
    path = recording.snapshot_path(directory, 3, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [events]}, protocol=4))
    return directory


@pytest.mark.parametrize("before", [0, 4096])
def test_lines_of_a_labelled_snapshot(tmp_path, before):
    """Memory from before the history could hold parameters and states, too: then they were not measured."""
    prediction = predict(with_wide_logits(), "cuda")
    assert prediction.ranks[0].at.startswith("forward")
    directory = write(tmp_path)
    path = recording.steps_path(directory, 0)
    path.write_text(path.read_text().replace("tensor_storages", "cuda_allocator"))
    put_lines_beside(prediction, compare.measure(write_snapshot(directory, before=before)))
    found = {tuple(one.measured_as): one for one in prediction.ranks[0].sums}
    held = [] if before else [("parameter",), ("optimizer_state",)]
    assert list(found) == [*held, ("unsharded_parameter",), ("activation", "logits_loss")]
    assert all(one.measured_bytes == one.predicted_bytes > 0 and one.error_pct == 0 for one in found.values())
    measured = {entry.category for entry in prediction.ranks[0].entries if entry.measured_bytes is not None}
    assert measured == {"unsharded parameters"} | (set() if before else {"parameters", "optimizer states"})
    assert all(rank.sums == [] for rank in prediction.ranks[1:]), "no snapshot of theirs"


def write_trace(directory: Path, rank: int, *, fewer: int = 0) -> None:
    """The predicted collectives of step 2; `fewer` all-gathers over tp than predicted."""
    events: list[dict[str, Any]] = [{"name": "ProfilerStep#2", "ts": 0, "dur": 90_000}]
    for collective in predict(tiny(), "cpu").collectives:
        less = fewer if (collective.dimension, collective.kind) == ("tp", "all_gather") else 0
        for _ in range(collective.count - less):
            each = collective.bytes // collective.count
            name = f"comm:{collective.kind}:mesh_{collective.dimension}:{len(events)}:{each}"
            events.append({"name": name, "ts": len(events) * 5, "dur": 2})
    shared = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1}
    path = recording.trace_path(directory, 3, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [shared | e for e in events], "distributedInfo": {"rank": rank}}, file)


@pytest.mark.parametrize("fewer", [0, 1])
def test_measured_collectives_beside_predicted(tmp_path, capsys, fewer):
    write_trace(write(tmp_path), 0, fewer=fewer)
    assert main([*TINY, str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["communication"]
    assert len(rows) == 6
    for row in rows:
        one = (row["dimension"], row["kind"]) == ("tp", "all_gather")
        assert row["measured_count"] == row["count"] - fewer * one
        assert row["measured_bytes"] == row["bytes"] - fewer * one * 131_072
        assert row["agree"] == (not (fewer and one))
    assert main([*TINY, str(tmp_path)]) == 0
    assert ("DIFFERS" in capsys.readouterr().out) == bool(fewer)


def test_collectives_of_an_incomplete_step_are_not_measured(tmp_path, capsys):
    write_trace(write(tmp_path), 0)
    path = recording.steps_path(tmp_path, 0)
    path.write_text(path.read_text().splitlines()[0] + "\n")
    assert main([*TINY, str(tmp_path)]) == 0
    assert "communication was not measured" in capsys.readouterr().out


def test_without_traces_nothing_is_measured_of_communication(tmp_path, capsys):
    assert main([*TINY, str(write(tmp_path)), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["communication"]
    assert {(row["measured_count"], row["measured_bytes"], row["agree"]) for row in rows} == {(None, None, None)}


def test_a_folder_that_is_no_recording_still_gets_the_prediction(tmp_path, capsys):
    write_trace(tmp_path / "run", 0)
    folder = tmp_path / "run" / "profiling"
    assert main([*TINY, str(folder), "--target", "cpu", "--json"]) == 4
    said = capsys.readouterr()
    printed = json.loads(said.out)
    assert printed["ranks"][0]["peak_allocated_bytes"] == predict(tiny(), "cpu").ranks[0].peak_allocated_bytes
    assert [error["file"] for error in printed["errors"]] == [str(folder)]
    assert all(row["agree"] for row in printed["communication"])
    assert said.err.count("\n") == 1


def test_a_run_before_its_first_step_still_gets_the_prediction(tmp_path, capsys):
    write(tmp_path)
    for rank in range(4):
        recording.steps_path(tmp_path, rank).write_text("")
    recording.write_status(tmp_path, "failed", "rank 0: ValueError: bad")
    assert main([*TINY, str(tmp_path)]) == 4
    said = capsys.readouterr()
    assert said.out.startswith("Predicted")
    assert said.err.count("\n") == 1
    assert "states no allocated peak" in said.err
