"""`meshscope whatif` as it is used: text, the JSON contract, exit codes, one line per error."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from harness.cli import main

from .program import MIB, Program, random_program

ROOT = Path(__file__).parents[2]
DEVICE_KEYS = [
    "device", "history", "base_reserved_bytes", "recorded_peak_reserved_bytes", "recorded_alloc_conf", "fidelity",
    "cases", "notes",
]  # fmt: skip
CASE_KEYS = [
    "alloc_conf", "settings", "start", "limit_bytes", "without_pending", "against", "change_pct", "peak_reserved_bytes",
    "peak_allocated_bytes", "final_reserved_bytes", "at_peak", "device_allocations", "device_frees", "retries",
    "out_of_memory",
]  # fmt: skip


def write(folder: Path, program: Program, name: str = "rank3_snapshot.pickle", skip: int = 0) -> Path:
    path = folder / name
    path.write_bytes(pickle.dumps(program.snapshot(skip), protocol=4))
    return path


def run(capsys, *args: str | Path) -> tuple[int, str, str]:
    code = main(["whatif", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


def program_with_holes() -> Program:
    """Ten blocks of 30 MiB, every other freed, then 50 MiB that fit into none of the holes."""
    program = Program()
    blocks = [program.alloc(30 * MIB, line=1) for _ in range(10)]
    for block in blocks[::2]:
        program.free(block)
    program.alloc(50 * MIB, line=2)
    return program


def test_json_has_every_key_and_whole_numbers(tmp_path, capsys):
    path = write(tmp_path, program_with_holes())
    asked = ["--alloc-conf", "expandable_segments:True", "--alloc-conf", "max_split_size_mb:20"]
    code, out, err = run(capsys, path, *asked, "--limit-gib", "0.3125", "--without-pending", "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    found = json.loads(out)
    assert list(found) == ["schema_version", "mode", "files", "errors"]
    [file] = found["files"]
    assert (file["rank"], file["file"]) == (3, str(path))
    [device] = file["devices"]
    assert list(device) == DEVICE_KEYS
    assert device["fidelity"] == {
        "exact": True,
        "allocations": 11,
        "same_address": 11,
        "driver_calls": 11,
        "same_driver_calls": 11,
        "reserved_error_bytes": 0,
    }
    assert (device["history"], device["base_reserved_bytes"]) == ("complete", 0)
    assert device["recorded_peak_reserved_bytes"] == 350 * MIB
    cases = device["cases"]
    assert all(list(case) == CASE_KEYS for case in cases)
    assert [(case["alloc_conf"], case["start"], case["without_pending"]) for case in cases] == [
        ("recorded", "empty", False),
        ("recorded", "empty", False),
        ("recorded", "empty", True),
        ("expandable_segments:True", "empty", True),
        ("max_split_size_mb:20", "empty", True),
    ]
    assert [case["limit_bytes"] for case in cases] == [None, *[320 * MIB] * 4]
    assert [case["retries"] for case in cases] == [0, 1, 1, 1, 0]
    assert [case["against"] for case in cases] == [None, 0, 0, 0, 0]
    assert cases[1]["change_pct"] == pytest.approx(100 * (300 - 350) / 350)
    assert cases[0]["at_peak"] == {
        "event": 31,
        "time_us": None,
        "allocated_bytes": 200 * MIB,
        "unused_bytes": 150 * MIB,
        "pools": [
            {
                "pool": "large",
                "stream": 0,
                "reserved_bytes": 350 * MIB,
                "allocated_bytes": 200 * MIB,
                "pending_bytes": 0,
            }
        ],
    }


def test_text_says_what_each_case_reserves_and_where_it_runs_out(tmp_path, capsys):
    path = write(tmp_path, program_with_holes())
    code, out, err = run(capsys, path, "--alloc-conf", "expandable_segments:True", "--limit-gib", "0.19")
    assert (code, err) == (0, "")
    assert "history complete, 11 allocations, recorded settings: default" in out
    assert "the model reproduces it: every address, 11 calls to the driver, reserved to the byte" in out
    rows = {line.split("  ")[2]: line for line in out.splitlines() if line.lstrip()[:1].isdigit()}
    assert "0.3418 GiB" in out
    assert out.count("OUT OF MEMORY") == 2
    assert "at /home/me/train.py:1:forward" in out
    assert rows


def test_what_was_there_before_is_said_and_compared_afresh(tmp_path, capsys):
    program = program_with_holes()
    skip = len(program.events)
    for _ in range(3):
        program.free(program.alloc(40 * MIB))
    path = write(tmp_path, program, skip=skip)
    code, out, _ = run(capsys, path, "--alloc-conf", "expandable_segments:True")
    assert code == 0
    assert "recorded, afresh" in out
    assert "% vs 1" in out
    assert "history truncated (0.3418 GiB reserved before it), 3 allocations" in out
    assert "note: afresh:" in out
    _, alone, _ = run(capsys, path)
    assert "afresh" not in alone


def test_a_recording_that_the_model_cannot_reproduce_is_called_an_estimate(tmp_path, capsys):
    program = Program("roundup_power2_divisions:2")
    for _ in range(3):
        program.alloc(33 * MIB)
    program.conf = ""
    code, out, _ = run(capsys, write(tmp_path, program))
    assert code == 0
    assert "recorded peak 0.1406 GiB reserved; row 0 is the model's, which differs" in out
    assert "note: the model does not reproduce this recording under its own settings: 0 of 3 addresses, 0 of 3" in out
    assert "reserved off by up to 42.000 MiB" in out


def test_limits_and_thresholds_that_need_more_are_said(tmp_path, capsys):
    path = write(tmp_path, program_with_holes())
    fraction = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5"
    code, _, err = run(capsys, path, "--alloc-conf", fraction)
    assert code == 2
    assert "a fraction of how much? --limit-gib" in err
    code, out, _ = run(capsys, path, "--alloc-conf", fraction, "--limit-gib", "1")
    assert code == 0
    assert "limit 0.5 GiB" in out
    _, out, _ = run(capsys, path, "--alloc-conf", "garbage_collection_threshold:0.5")
    assert "note: garbage_collection_threshold: torch collects only where the process has a limit" in out


def test_memory_given_back_for_a_request_is_said(tmp_path, capsys):
    program = Program("", 100 * MIB)
    program.free(program.alloc(60 * MIB))
    program.alloc(50 * MIB, 5)
    path = write(tmp_path, program)
    _, out, _ = run(capsys, path)
    assert "note: the recording gave cached memory back 1 time for want of memory" in out
    _, out, _ = run(capsys, path, "--limit-gib", "1")
    assert "for want of memory" not in out


@pytest.mark.parametrize("limit", ["0", "-1", "1e-300", "2e6", "nan", "inf", "x"])
def test_limits_that_are_none(tmp_path, capsys, limit):
    path = write(tmp_path, program_with_holes())
    if limit == "x":
        with pytest.raises(SystemExit) as ended:
            run(capsys, path, "--limit-gib", limit)
        assert ended.value.code == 2
        return
    code, out, err = run(capsys, path, f"--limit-gib={limit}")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_strangers_names_stay_on_their_line(tmp_path, capsys):
    program = program_with_holes()
    for event in program.events:
        event["frames"] = [{"filename": "a\x1b[31m\n.py", "line": 1, "name": "f"}]
    path = write(tmp_path, program, "rank3\n\x1b[31m.pickle")
    code, out, _ = run(capsys, path, "--limit-gib", "0.1")
    assert code == 0
    assert f"{tmp_path}/rank3??[31m.pickle  (rank 3, imported)" in out.splitlines()
    assert "a?[31m?.py" in out
    assert "\x1b" not in out


def test_a_bad_conf_is_a_usage_error(tmp_path, capsys):
    code, out, err = run(capsys, write(tmp_path, program_with_holes()), "--alloc-conf", "expandable_segments:yes")
    assert (code, out) == (2, "")
    assert err == "meshscope whatif: error: expandable_segments:yes: expected True or False\n"


def test_what_cannot_be_replayed_is_one_error_each(tmp_path, capsys):
    good = write(tmp_path, random_program(1, ""), "rank0_snapshot.pickle")
    segments_only = program_with_holes()
    segments_only.events.clear()
    write(tmp_path, segments_only, "rank1_snapshot.pickle")
    contradiction = program_with_holes()
    contradiction.events.append({"action": "free_requested", "addr": 5, "size": 7})
    write(tmp_path, contradiction, "rank2_snapshot.pickle")
    other = program_with_holes()
    other.conf = "backend:cudaMallocAsync"
    write(tmp_path, other, "rank4_snapshot.pickle")
    (tmp_path / "rank5_snapshot.pickle").write_bytes(b"\x80\x04junk")

    code, out, err = run(capsys, tmp_path, "--json")
    assert code == 4
    found = json.loads(out)
    assert [file["file"] for file in found["files"]] == [str(good)]
    assert [list(error) for error in found["errors"]] == [["file", "offset", "reason"]] * 4
    reasons = [error["reason"] for error in found["errors"]]
    for part in ("no history to replay", "lies in no segment", "only torch's own allocator", ""):
        assert part in reasons.pop(0)
    assert err.count("\n") == 4

    code, _, err = run(capsys, tmp_path / "rank1_snapshot.pickle")
    assert (code, err.count("\n")) == (3, 1)


def test_a_recording_without_snapshots_says_so(tmp_path, capsys):
    (tmp_path / "rank0_trace.json").write_text('{"traceEvents": []}')
    code, out, err = run(capsys, tmp_path, "--json")
    assert (code, json.loads(out)["files"]) == (3, [])
    assert "holds no allocator snapshot" in err


def test_a_recording_of_this_project(capsys):
    code, out, _ = run(capsys, ROOT / "runs/recorded/h200_collectives_record_stream", "--without-pending", "--json")
    assert code == 0
    for file in json.loads(out)["files"]:
        recorded, afresh, immediate = file["devices"][0]["cases"]
        assert recorded["start"] == "recorded"
        assert recorded["peak_reserved_bytes"] > 1.5 * (1 << 30)
        assert immediate["peak_reserved_bytes"] < 0.15 * afresh["peak_reserved_bytes"]
