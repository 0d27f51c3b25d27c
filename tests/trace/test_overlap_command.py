"""`meshscope overlap` as its user meets it: tables, notes, errors, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trace_builder import annotation, group, kernel, launch, nccl, step, write

from harness.cli import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two ranks, one step, one FSDP unit."""
    for rank in (0, 1):
        events = [
            step(4, 0, 100),
            annotation("FSDP::all_gather (layers.0)", 1, 5),
            launch(2, 1),
            launch(10, 2),
            nccl("AllGather", 20, 20, correlation=1, **group("1", "mesh_dp", [0, 1], "_allgather_base")),
            kernel("gemm", 30, 40, correlation=2),
        ]
        write(tmp_path / f"rank{rank}_trace.json", events, rank=rank)
    return tmp_path


def test_json_alone_on_stdout(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overlap", str(run), "--json", "--no-cache"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [entry["rank"] for entry in json.loads(out)["ranks"]] == [0, 1]
    assert out.count("\n") == 1


@pytest.mark.parametrize(
    ("by", "words"),
    [
        ("step", ["rule launch (launched in the step)", "rule clip (cut to the step's host window)"]),
        ("collective", ["all_gather", "mesh_dp"]),
        ("dimension", ["mesh_dp"]),
        ("unit", ["layers.0", "forward"]),
    ],
)
def test_text(run: Path, capsys: pytest.CaptureFixture[str], by: str, words: list[str]) -> None:
    assert main(["overlap", str(run), "--by", by]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for word in ["50.00 %", "0.020", "mode: imported", *words]:
        assert word in out
    assert out.isascii()


def rows(text: str, title: str) -> list[list[str]]:
    """The table under a title, its cells split at two spaces."""
    lines = text[text.index(title) :].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip().split("  ") if cell.strip()] for line in lines if line[0] == " "]


def test_by_shows_means_over_ranks_and_only_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, computes in ((0, 40), (1, 20)):
        events = [
            step(4, 0, 100),
            launch(10, 1),
            launch(11, 2),
            nccl("AllGather", 20, 20 + 40 * rank, correlation=1, **group("1", "mesh_dp", [0, 1], "_allgather_base")),
            kernel("gemm", 30, computes, correlation=2),
        ]
        write(tmp_path / f"rank{rank}_trace.json", events, rank=rank)
    assert main(["overlap", str(tmp_path), "--by", "collective"]) == 0
    # Rank 0: 20 us of which 10 hidden; rank 1: 60 us of which 20 hidden.
    assert rows(capsys.readouterr().out, "Collectives") == [
        ["dimension", "kind", "ranks", "count", "overlap", "comm", "overlapped", "exposed"],
        ["mesh_dp", "all_gather", "2", "1", "33.33 to 50.00 %", "0.040", "0.015", "0.025"],
    ]
    assert main(["overlap", str(tmp_path), "--by", "dimension", "--per-rank"]) == 0
    assert rows(capsys.readouterr().out, "Parallel dimensions") == [
        ["rank", "dimension", "overlap", "comm", "overlapped", "exposed"],
        ["0", "mesh_dp", "50.00 %", "0.020", "0.010", "0.010"],
        ["1", "mesh_dp", "33.33 %", "0.060", "0.020", "0.040"],
    ]
    assert main(["overlap", str(tmp_path), "--by", "step", "--rank", "1"]) == 0
    out = capsys.readouterr().out
    assert rows(out, "Steps, rule launch")[1] == [
        "1",
        "4",
        "33.33 %",
        *["0.060", "0.020", "0.040", "0.020", "0.000", "0.000", "0.060", "0.000"],
    ]
    assert "Across 2 ranks: 1 collective matched" in out, "all ranks that have a trace"


def test_one_rank(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overlap", str(run), "--rank", "1", "--json"]) == 0
    assert [entry["rank"] for entry in json.loads(capsys.readouterr().out)["ranks"]] == [1]
    assert main(["overlap", str(run), "--rank", "7"]) == 2
    assert "no trace of that rank" in capsys.readouterr().err


def test_part_of_the_input(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "rank2_trace.json").write_text("{")
    assert main(["overlap", str(run)]) == 4
    out, err = capsys.readouterr()
    assert "50.00 %" in out
    [line] = err.splitlines()
    assert "rank2_trace.json at byte 1: the text ends early" in line


def test_nothing_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text("{}")
    assert main(["overlap", str(tmp_path), "--json"]) == 3
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["ranks"] == []
    [error] = result["errors"]
    assert error == {
        "file": str(tmp_path / "a.json"),
        "offset": None,
        "reason": "has no traceEvents (an object of 2 bytes)",
    }
    assert len(err.splitlines()) == 1
    assert main(["overlap", str(tmp_path / "absent")]) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_snapshots_alone_are_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.pickle").write_bytes(b"\x80\x04N.")
    assert main(["overlap", str(tmp_path)]) == 3
    assert "no trace" in capsys.readouterr().err


def test_names_cannot_drive_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[2J\x07evil"
    events = [nccl("AllGather", 0, 5, **group("1", evil, [0, 1])), kernel(evil, 0, 5)]
    write(tmp_path / "t.json", events)
    assert main(["overlap", str(tmp_path), "--by", "dimension"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "evil" in out
