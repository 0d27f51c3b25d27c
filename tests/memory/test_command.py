"""`meshscope memory` as it is used: the JSON contract, exit codes, one line per error, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main

from .build import MIB, Allocator, frame, random_allocator, snapshot_of, write

DEVICE_KEYS = [
    "device", "history", "base_allocated_bytes",
    "peak_requested_bytes", "peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes",
    "final_requested_bytes", "final_allocated_bytes", "final_active_bytes", "final_reserved_bytes",
    "stacking", "peak_composition", "oom", "notes",
]  # fmt: skip


def stacked_snapshot() -> dict[str, Any]:
    allocator = Allocator()
    allocator.segment(2048 * MIB)
    for layer in range(12):
        gathered = allocator.alloc(64 * MIB, frame("all_gather", line=layer), stream=9)
        allocator.request(gathered)
        allocator.alloc(MIB, frame("forward"))
        allocator.complete(gathered)
    allocator.record("oom", size=1 << 33, device_free=MIB, frames=[frame("big")])
    return snapshot_of(allocator)


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    code = main(["memory", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_has_every_key_and_whole_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rank3_snapshot.pickle", stacked_snapshot())
    code, out, err = run(capsys, path, "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    found = json.loads(out)
    assert list(found) == ["schema_version", "mode", "files", "steps", "errors"]
    assert (found["schema_version"], found["mode"], found["steps"], found["errors"]) == (1, "imported", [], [])
    [file] = found["files"]
    assert list(file) == ["rank", "file", "devices"]
    assert (file["rank"], file["file"]) == (3, str(path))
    [device] = file["devices"]
    assert list(device) == DEVICE_KEYS
    assert all(type(device[key]) is int for key in DEVICE_KEYS if key.endswith("_bytes"))
    assert list(device["stacking"]) == ["blocks", "max_pending_bytes", "pending_at_end_bytes", "byte_seconds", "sites"]
    assert device["stacking"]["blocks"] == 12
    assert device["stacking"]["max_pending_bytes"] == 64 * MIB
    assert {tuple(share) for share in device["peak_composition"]} == {("category", "bytes")}


def test_traces_have_the_same_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = {"Device Type": 1, "Device Id": 0, "Bytes": 5, "Total Allocated": 5, "Total Reserved": 9}
    event = {"ph": "i", "name": "[memory]", "ts": 1, "args": args}
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [event]}))
    code, out, _ = run(capsys, tmp_path, "--json")
    [device] = json.loads(out)["files"][0]["devices"]
    assert code == 0
    assert list(device) == DEVICE_KEYS
    assert list(device["stacking"]) == ["blocks", "max_pending_bytes", "pending_at_end_bytes", "byte_seconds", "sites"]


def test_text_states_peaks_stacking_and_composition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "s.pickle", stacked_snapshot())
    code, out, err = run(capsys, path)
    assert (code, err) == (0, "")
    assert "history complete, base 0.000 MiB" in out
    assert "12 blocks, at most 64.000 MiB pending at an allocation" in out
    assert "/home/me/train.py:0:all_gather  (stream 9)" in out
    assert "… and 2 more sites" in out
    assert "OOM: 8.0000 GiB asked, 1.000 MiB free on the device" in out
    assert "2.0000 GiB" in out
    assert "allocated peak by category" in out


@pytest.mark.parametrize(
    ("by", "shown"),
    [
        ("category", "allocated peak by category"),
        ("site", "allocated peak by allocation site"),
        ("step", "no step is named"),
        ("phase", "no phase is named"),
    ],
)
def test_by_changes_only_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], by: str, shown: str) -> None:
    path = write(tmp_path / "s.pickle", stacked_snapshot())
    assert shown in run(capsys, path, "--by", by)[1]
    assert run(capsys, path, "--by", by, "--json") == run(capsys, path, "--json")


def test_phases_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    allocator = Allocator()
    allocator.alloc(3 * MIB, metadata="phase=forward")
    out = run(capsys, write(tmp_path / "rank1.pickle", snapshot_of(allocator)), "--by", "phase")[1]
    assert out.splitlines()[-1].split() == ["1", "forward", "3.000", "MiB", "3.000", "MiB", "0.000", "MiB"]


def test_damaged_file_alone_exits_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "s.pickle", stacked_snapshot())
    path.write_bytes(path.read_bytes()[:1000])
    code, out, err = run(capsys, path, "--json")
    assert code == 3
    assert json.loads(out)["errors"] == [
        {"file": str(path), "offset": 1000, "reason": json.loads(out)["errors"][0]["reason"]}
    ]
    assert err.startswith(f"meshscope memory: error: {path} at byte 1000: pickle ends early")
    assert err.count("\n") == 1


def test_damaged_file_beside_others_exits_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "rank0.pickle", stacked_snapshot())
    write(tmp_path / "rank1.pickle", {"segments": 5})
    (tmp_path / "rank2.pickle").write_bytes(b"")
    code, out, err = run(capsys, tmp_path, "--json")
    assert code == 4
    found = json.loads(out)
    assert [file["rank"] for file in found["files"]] == [0]
    assert sorted(Path(error["file"]).name for error in found["errors"]) == ["rank1.pickle", "rank2.pickle"]
    assert err.count("\n") == 2


def test_two_snapshots_of_one_rank_are_both_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a_rank0.pickle", stacked_snapshot())
    write(tmp_path / "b_rank0.pickle", stacked_snapshot())
    code, out, err = run(capsys, tmp_path, "--json")
    assert code == 4
    assert [file["rank"] for file in json.loads(out)["files"]] == [0, 0]
    assert "a_rank0.pickle" in err
    assert "b_rank0.pickle" in err


def test_snapshots_at_different_steps_are_no_double(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("step_000000000010", "step_000000000020", "step_000000000020_exit"):
        (tmp_path / folder).mkdir()
        step = int(folder.split("_")[1])
        write(tmp_path / folder / f"000000_step_{step}.pickle", stacked_snapshot())
    code, out, _ = run(capsys, tmp_path, "--json")
    assert code == 0
    assert len(json.loads(out)["files"]) == 3


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_nothing_there_exits_3(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / "empty").mkdir()
    code, out, err = run(capsys, tmp_path / name)
    assert (code, out, err.count("\n")) == (3, "", 1)


def test_trace_without_memory_events_exits_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2}
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [event]}))
    code, _, err = run(capsys, tmp_path / "t.json")
    assert code == 3
    assert "no [memory] events (profile_memory=True)" in err


def test_recording_with_rows_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "rank0.jsonl").write_text('{"step": 0, "peak_allocated_bytes": 7}\n')
    (tmp_path / "manifest.json").write_text('{"schema_version": 1, "mode": "real", "world_size": 1}')
    (tmp_path / "status.json").write_text('{"schema_version": 1, "state": "complete"}')
    code, out, err = run(capsys, tmp_path, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["mode"] == "real"
    expected = {"rank": 0, "step": 0, "peak_allocated_bytes": 7, "peak_active_bytes": None, "peak_reserved_bytes": None}
    assert found["steps"] == [expected]


def test_empty_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "s.pickle", {"segments": [], "device_traces": [[], []]})
    code, out, _ = run(capsys, path, "--json")
    assert code == 0
    assert json.loads(out)["files"][0]["devices"] == []
    assert "holds neither segments nor events" in run(capsys, path)[1]


def test_usage_error_exits_2(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["memory", str(tmp_path), "--by", "colour"])
    assert caught.value.code == 2


def test_works_without_torch(tmp_path: Path) -> None:
    path = write(tmp_path / "rank0.pickle", snapshot_of(random_allocator(11)))
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from harness.cli import main\n"
        f"sys.exit(main(['memory', {str(path)!r}, '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["files"][0]["rank"] == 0
