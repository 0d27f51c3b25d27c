"""`meshscope ledger`: arguments, `--against`, exit codes and the two outputs."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.commands import ledger
from harness.compare import time_of
from harness.config_json import to_dict
from harness.errors import EXIT_OK, EXIT_PARTIAL, InputError, UsageError
from harness.ledger import predict
from harness.ledger.hardware import SHIPPED
from harness.recipes.debug import tiny
from harness.recording import manifest_path, rank_path, steps_path, write_json


def run(*words: str, overrides: tuple[tuple[str, str], ...] = ()) -> int:
    parser = argparse.ArgumentParser()
    ledger.add_arguments(parser)
    args = parser.parse_args(["--module", "debug", "--config", "tiny", *words])
    args.overrides = list(overrides)
    return ledger.run(args)


def record(directory: Path, peaks: dict[int, list[int | None]], **config: Any) -> Path:
    """A recording of `tiny` in which rank r's step i had the peak peaks[r][i]."""
    tree = to_dict(tiny())
    for name, value in config.items():
        tree["training"][name] = value
    write_json(manifest_path(directory), {"schema_version": 1, "world_size": 4, "config": tree, "mode": "cpu"})
    for rank, values in peaks.items():
        rows = [
            {"step": step, "peak_allocated_bytes": peak, "memory_source": "tensor_storages" if peak else "rss"}
            for step, peak in enumerate(values)
        ]
        steps_path(directory, rank).parent.mkdir(exist_ok=True)
        steps_path(directory, rank).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_json_is_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json", "--target", "cpu") == EXIT_OK
    printed = json.loads(capsys.readouterr().out)
    expected = predict(tiny(), "cpu")
    expected.time = time_of(tiny(), "cpu")
    assert printed == json.loads(json.dumps(expected.to_json()))
    assert printed["mode"] == "predicted"
    assert printed["ranks"][0]["measured_peak_allocated_bytes"] is None


def test_overrides_and_nproc(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json", "--nproc", "2", overrides=(("parallelism.tp", "1"), ("model.n_layers", "1"))) == EXIT_OK
    printed = json.loads(capsys.readouterr().out)
    assert printed["world_size"] == 2
    assert printed["ranks"][0]["quantities"]["L"] == 1


def test_settings_of_the_allocator_that_change_nothing_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="target cpu has no CUDA allocator"):
        run("--target", "cpu", "--alloc-conf", "expandable_segments:True")
    for conf, noted in (
        ("per_process_memory_fraction:0.5", True),
        ("garbage_collection_threshold:0.5", True),
        ("max_split_size_mb:64", False),
    ):
        assert run("--target", "cuda", "--alloc-conf", conf, "--hardware", "none") == EXIT_OK
        assert ("note: reserved bytes: predicted without a memory limit" in capsys.readouterr().out) is noted


def test_a_files_name_stays_on_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a\n\x1b[31m.json"
    path.write_bytes((SHIPPED / "h200.json").read_bytes())
    assert run("--target", "cuda", "--hardware", str(path)) == EXIT_OK
    assert f"hardware {tmp_path}/a??[31m.json:" in capsys.readouterr().out


def test_against(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first step and steps without tracking do not count; the target is the recording's."""
    expected = predict(tiny(), "cpu").ranks[0].peak_allocated_bytes
    rows: list[int | None] = [2 * expected, None, 10_000_000, 8_000_000]
    recording = record(tmp_path, dict.fromkeys(range(4), rows))
    assert run("--json", "--against", str(recording)) == EXIT_OK
    printed = json.loads(capsys.readouterr().out)
    assert printed["target"] == "cpu"
    for rank in printed["ranks"]:
        assert rank["peak_allocated_bytes"] == expected
        assert rank["measured_peak_allocated_bytes"] == 10_000_000
        assert rank["error_pct"] == pytest.approx(100 * (expected / 10_000_000 - 1))
    assert run("--against", str(recording)) == EXIT_OK
    assert f"prediction off by {100 * (expected / 10_000_000 - 1):+.2f} %" in capsys.readouterr().out


def reserving(directory: Path, **environment: str) -> Path:
    """A recording of `tiny` on GPUs, which reserve 64 MiB in the first step and 100 MiB from the second on."""
    tree = to_dict(tiny())
    tree["training"]["device"] = "cuda"
    write_json(manifest_path(directory), {"schema_version": 1, "world_size": 4, "config": tree, "mode": "real"})
    rows = [
        {"step": step, "peak_allocated_bytes": 9 << 20, "peak_reserved_bytes": size, "memory_source": "cuda_allocator"}
        for step, size in enumerate([64 << 20, 100 << 20, 100 << 20])
    ]
    for rank in range(4):
        steps_path(directory, rank).parent.mkdir(exist_ok=True)
        steps_path(directory, rank).write_text("".join(json.dumps(row) + "\n" for row in rows))
        rank_path(directory, rank).parent.mkdir(exist_ok=True)
        write_json(rank_path(directory, rank), {"schema_version": 1, "rank": rank, "environment_before": environment})
    return directory


def test_reserved_bytes_against_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json", "--against", str(reserving(tmp_path))) == EXIT_OK
    for rank in json.loads(capsys.readouterr().out)["ranks"]:
        assert rank["peak_reserved_bytes"] == sum(pool["reserved_bytes"] for pool in rank["pools"])
        assert rank["measured_peak_reserved_bytes"] == 100 << 20
        error = 100 * (rank["peak_reserved_bytes"] / (100 << 20) - 1)
        assert rank["reserved_error_pct"] == pytest.approx(error)
    assert run("--against", str(tmp_path)) == EXIT_OK
    printed = capsys.readouterr().out
    assert f"reserved 100.000 MiB, off by {error:+.2f} %" in printed
    assert re.search(r"allocator, by stream +reserved +unused at the peak\n +compute ", printed)


def test_settings_are_those_of_the_recording_unless_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def streams(*words: str) -> list[dict[str, Any]]:
        assert run("--json", "--target", "cuda", *words) == EXIT_OK
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["ranks"][0]["pools"]
        return found

    recorded = reserving(tmp_path, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    default, expandable = streams(), streams("--alloc-conf", "expandable_segments:True")
    assert default != expandable
    assert streams("--against", str(recorded)) == expandable
    assert streams("--against", str(recorded), "--alloc-conf", "") == default
    # torch reads this one first.
    reserving(tmp_path, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", PYTORCH_ALLOC_CONF="")
    assert streams("--against", str(recorded)) == default


def test_settings_that_torch_would_not_take_are_refused() -> None:
    with pytest.raises(UsageError, match="torch has no setting expandable"):
        run("--alloc-conf", "expandable:True")


def test_against_names_ranks_without_a_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = record(tmp_path, {0: [1, 1000], 1: [1, 1000], 2: [1, None], 3: [1, 1000]})
    assert run("--json", "--against", str(recording)) == EXIT_PARTIAL
    captured = capsys.readouterr()
    assert "rank 2: no allocated peak" in captured.err
    (error,) = json.loads(captured.out)["errors"]
    assert error["file"] == str(recording)


def test_against_without_any_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--against", str(record(tmp_path, {0: [1, None]}))) == EXIT_PARTIAL
    said = capsys.readouterr()
    assert said.out.startswith("Predicted, target ")
    assert "states no allocated peak" in said.err
    with pytest.raises(InputError, match="no such file or directory"):
        run("--against", str(tmp_path / "absent"))


@pytest.mark.parametrize(("field", "value", "here"), [("seq_len", 512, 128), ("accumulation_steps", 4, 1)])
def test_against_another_configuration(tmp_path: Path, field: str, value: int, here: int) -> None:
    with pytest.raises(UsageError, match=rf"training\.{field} {value}, here {here}"):
        run("--against", str(record(tmp_path, {0: [1, 1000]}, **{field: value})))
