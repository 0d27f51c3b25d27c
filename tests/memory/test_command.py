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
STACKING_KEYS = ["blocks", "max_pending_bytes", "pending_at_end_bytes", "byte_seconds", "sites", "pending_sites"]


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
    assert list(device["stacking"]) == STACKING_KEYS
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
    assert list(device["stacking"]) == STACKING_KEYS


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


def test_a_strangers_names_stay_on_their_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(path := tmp_path / "rank3\n\x1b[31m.pickle", stacked_snapshot())
    code, out, _ = run(capsys, path)
    assert code == 0
    assert f"{tmp_path}/rank3??[31m.pickle  (rank 3, imported)" in out.splitlines()


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
    assert "no snapshot, no step rows and 1 trace without [memory] events (profile_memory=True)" in err


def test_traces_without_memory_beside_a_snapshot_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2}
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"traceEvents": [event]}))
    (tmp_path / "rank0.pickle").write_bytes(b"")
    code, _, err = run(capsys, tmp_path)
    assert code == 3
    assert "rank0.pickle: is empty" in err
    assert "what else is there holds no memory data: 2 traces without [memory] events" in err
    (tmp_path / "rank1.json").unlink()
    (tmp_path / "rank0.json").unlink()
    assert run(capsys, tmp_path)[2].count("\n") == 1, "nothing else is there"


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


COMPOSITION = [{"category": "activation", "bytes": 6 * MIB}, {"category": "parameter", "bytes": 2 * MIB}]


def cpu_recording(directory: Path) -> Path:
    """Two ranks; memory was tracked in steps 1 and 2, and rank 1's peak is lower in step 2."""
    (directory / "steps").mkdir()
    for rank in (0, 1):
        rows: list[dict[str, Any]] = [{"step": 0, "memory_source": "rss", "peak_allocated_bytes": None}]
        for step in (1, 2):
            peak = (8 + step - 3 * rank * (step - 1)) * MIB
            shares = [*COMPOSITION, {"category": "other", "bytes": peak - 8 * MIB}] if step == 1 else COMPOSITION
            rows.append({"step": step, "peak_allocated_bytes": peak, "peak_composition": shares})
        rows[1]["phases"] = {"forward": {"peak_allocated_bytes": 5 * MIB}}
        (directory / "steps" / f"rank{rank}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "manifest.json").write_text('{"schema_version": 1, "mode": "cpu", "world_size": 2}')
    (directory / "status.json").write_text('{"schema_version": 1, "state": "complete"}')
    return directory


def test_categories_of_a_cpu_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, cpu_recording(tmp_path), "--by", "category")
    assert (code, err) == (0, "")
    assert out.startswith("allocated peak by category")
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.splitlines()[1:]]
    assert rows == [
        ["category", "rank 0, step 2", "rank 1, step 1"],
        ["activation", "6.000 MiB", "6.000 MiB"],
        ["parameter", "2.000 MiB", "2.000 MiB"],
        ["other", "0.000 MiB", "1.000 MiB"],
    ]
    found = json.loads(run(capsys, tmp_path, "--json")[1])
    assert [step["peak_composition"] for step in found["steps"] if step["step"] == 2] == [COMPOSITION] * 2


@pytest.mark.parametrize(
    ("by", "said"), [("site", "only allocator snapshots with a history (CUDA)"), ("phase", "forward     5.000 MiB")]
)
def test_what_a_cpu_recording_does_not_say_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], by: str, said: str
) -> None:
    code, out, _ = run(capsys, cpu_recording(tmp_path), "--by", by)
    assert code == 0
    assert said in out


def test_categories_that_nobody_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = {"Device Type": 1, "Device Id": 0, "Bytes": 5, "Total Allocated": 5, "Total Reserved": 9}
    event = {"ph": "i", "name": "[memory]", "ts": 1, "args": args}
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [event]}))
    assert "no category is known" in run(capsys, tmp_path, "--by", "category")[1]
    assert "no allocation site is known" in run(capsys, tmp_path, "--by", "site")[1]


def test_a_composition_that_is_none_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cpu_recording(tmp_path) / "steps" / "rank1.jsonl").write_text(
        '{"step": 1, "peak_allocated_bytes": 7, "peak_composition": [{"category": 3, "bytes": "many"}]}\n'
    )
    code, out, _ = run(capsys, tmp_path, "--by", "category")
    assert code in (0, 4)
    assert "rank 1" not in out


def test_memory_pending_from_before_the_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three blocks are freed before the history and one of them is pending still at its only allocation."""
    allocator = Allocator()
    allocator.segment(1024 * MIB)
    blocks = [allocator.alloc(100 * MIB) for _ in range(3)]
    for block in blocks:
        allocator.request(block)
    allocator.events.clear()
    allocator.complete(blocks[0])
    allocator.complete(blocks[1])
    allocator.alloc(10 * MIB)
    allocator.complete(blocks[2])
    path = write(tmp_path / "rank0.pickle", snapshot_of(allocator))
    [device] = json.loads(run(capsys, path, "--json")[1])["files"][0]["devices"]
    assert (device["peak_active_bytes"], device["peak_allocated_bytes"]) == (300 * MIB, 10 * MIB)
    assert device["stacking"]["max_pending_bytes"] == 100 * MIB
    [note] = [note for note in device["notes"] if "pending when the history began" in note]
    assert note.startswith("0.2930 GiB were pending")
    assert note in run(capsys, path)[1]


def test_stacking_of_nothing_is_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    allocator = Allocator()
    allocator.segment(1024 * MIB)
    allocator.free(allocator.alloc(MIB))
    out = run(capsys, write(tmp_path / "rank0.pickle", snapshot_of(allocator)))[1]
    assert "stacking  none" in out


def test_each_note_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "rank0.pickle", stacked_snapshot())
    write(tmp_path / "rank1.pickle", stacked_snapshot())
    out = run(capsys, tmp_path)[1]
    assert out.count("peak_composition is that of the allocated peak") == 1
    assert "note (all): peak_composition is" in out


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
