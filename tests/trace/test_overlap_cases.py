"""The acceptance cases about traces: values of `expected.json`, which were computed by an independent brute force."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.sources import find_sources
from harness.trace import analyse

pytestmark = pytest.mark.shared_data

# expected.json's names for the contract's.
NAMES = {
    "comm_ns": "comm_ns",
    "comp_ns": "compute_ns",
    "mem_ns": "memory_ns",
    "overlap_ns": "overlap_ns",
    "exposed_ns": "exposed_ns",
    "idle_ns": "idle_ns",
    "span_ns": "span_ns",
}
KINDS = {"AllReduce": "all_reduce", "SendRecv": "send_recv"}


@pytest.fixture(scope="session")
def expected(cases: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((cases / "expected.json").read_text())
    return values


def of(path: Path) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = analyse(find_sources(path))["ranks"]
    return ranks


def assert_figures(entry: dict[str, Any], values: dict[str, Any]) -> None:
    assert {name: entry[name] for name in NAMES.values()} == {name: values[key] for key, name in NAMES.items()}
    percent = entry["overlap_pct"]
    assert (None if percent is None else round(percent, 4)) == values["overlap_pct"]


@pytest.mark.parametrize(
    "name",
    ["t01-dlrm8", "t03-td-control", "t05-ddp2-mem", "t31-tbp-w0", "t35-autograd-api", "t59-sidnb-a"],
)
def test_real_traces(cases: Path, expected: dict[str, Any], name: str) -> None:
    """C01 C02 C03 C10 C15 C28 C45: whole, steps by both rules, kinds, unattributed."""
    for entry in of(cases / "files" / name):
        values = expected["traces"][f"{name}/{Path(entry['file']).name}"]
        assert_figures(entry["window"], values["whole"])
        numbers = [int(step.split("#")[1]) for step in values.get("steps", {})]
        assert [s["step"] for s in entry["steps"] if s["rule"] == "launch"] == numbers
        for step in entry["steps"]:
            rule = {"launch": "launch", "clip": "host_clip"}[step["rule"]]
            assert_figures(step, values["steps"][f"ProfilerStep#{step['step']}"][rule])
        if "unattributed_gpu_events" in values:
            assert entry["unattributed"]["count"] == values["unattributed_gpu_events"]
        for raw, kind_values in values["by_type"].items():
            found = [c for c in entry["collectives"] if c["kind"] == KINDS[raw]]
            assert [(c["count"], c["comm_ns"], c["sum_ns"], c["overlap_ns"]) for c in found] == [
                (kind_values["n"], kind_values["union_ns"], kind_values["sum_ns"], kind_values["overlap_ns"])
            ]


def test_c01_percentages(cases: Path) -> None:
    percents = [round(entry["window"]["overlap_pct"], 4) for entry in of(cases / "files/t01-dlrm8")]
    assert percents == [4.5016, 2.47, 7.8751, 3.3149, 0.5617, 0.6399, 7.5604, 9.5074]


def test_c13_trailing_step(cases: Path) -> None:
    [entry] = of(cases / "files/d24-trailing")
    us = {
        (s["step"], s["rule"]): tuple(s[key] // 1000 for key in ("comm_ns", "compute_ns", "overlap_ns"))
        for s in entry["steps"]
    }
    assert us == {
        (1, "launch"): (90, 120, 90),
        (2, "launch"): (100, 100, 50),
        (1, "clip"): (40, 50, 40),
        (2, "clip"): (50, 70, 50),
    }
    whole = entry["window"]
    assert (whole["comm_ns"], whole["compute_ns"], whole["overlap_ns"]) == (190_000, 220_000, 140_000)


def test_c14_one_step_on_two_threads(cases: Path) -> None:
    [entry] = of(cases / "files/d27-dupstep")
    assert [(s["step"], s["rule"]) for s in entry["steps"]] == [(3, "launch"), (3, "clip")]


def test_c18_kinds_on_two_streams(cases: Path) -> None:
    [entry] = of(cases / "files/d21-ag-rs-two-streams")
    assert entry["window"]["comm_ns"] == 450_000
    assert entry["window"]["exposed_ns"] == 300_000
    kinds = {c["kind"]: (c["comm_ns"], c["overlap_ns"]) for c in entry["collectives"]}
    assert kinds == {"all_gather": (300_000, 150_000), "reduce_scatter": (300_000, 0)}
    assert sum(c["sum_ns"] for c in entry["collectives"]) == 600_000


def test_c19_dimensions(cases: Path) -> None:
    [entry] = of(cases / "files/d22-mesh2d")
    dimensions = {d["dimension"]: (d["comm_ns"], d["overlap_ns"]) for d in entry["dimensions"]}
    assert dimensions == {"mesh_dp": (450_000, 250_000), "mesh_tp": (200_000, 0)}
    whole = entry["window"]
    assert (whole["comm_ns"], whole["overlap_ns"], whole["exposed_ns"]) == (600_000, 250_000, 350_000)
    assert any("need not add up" in note for note in entry["notes"])


def test_c21_waiting_and_transfer(cases: Path, expected: dict[str, Any]) -> None:
    across = analyse(find_sources(cases / "files/t01-dlrm8"))["cross_rank"]
    assert across["aligned"] is True
    found = across["collectives"]
    assert [c["transfer_ns"] for c in found] == [10000, 8000, 7000, 7000, 86000, 10000, 20000, 69000]
    assert [c["last_rank"] for c in found] == [7, 7, 7, 7, 7, 5, 5, 4]
    longest = [c["max_dur_ns"] - c["min_dur_ns"] for c in expected["cross_rank_t01"]["collectives"]]
    assert [max(c["wait_ns"].values()) for c in found] == longest


@pytest.mark.parametrize("name", ["t17-norank", "t18-nodistinfo"])
def test_c24_rank_unknown(cases: Path, name: str) -> None:
    [entry] = of(cases / "files" / name)
    assert entry["rank"] is None
    assert entry["source"] == "host"
    assert sum("its rank" in note for note in entry["notes"]) == 1


def test_c25_two_files_of_one_rank(cases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overlap", str(cases / "files/d15-duprank"), "--json"]) == 4
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert [entry["rank"] for entry in result["ranks"]] == [0, 0]
    [error] = result["errors"]
    assert error["file"].endswith("a.json")
    assert "b.json" in error["reason"]
    assert "rank 0" in error["reason"]
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "steps"),
    [("t31-tbp-w0", [[5, 6, 7, 8, 9, 10], [16, 17, 18, 19, 20, 21]]), ("t59-sidnb-a", [[1, 2, 3], [6, 7, 8]])],
)
def test_c28_two_captures_of_one_worker(cases: Path, name: str, steps: list[list[int]]) -> None:
    result = analyse(find_sources(cases / "files" / name))
    assert result["errors"] == []
    found = [[s["step"] for s in entry["steps"] if s["rule"] == "clip"] for entry in result["ranks"]]
    assert found == steps
    assert len({entry["rank"] for entry in result["ranks"]}) == 1


@pytest.mark.parametrize(
    ("name", "offset", "reason"),
    [("d01-trunc-gz", 449854, "ends early"), ("d02-trunc-json", 500000, "ends early")],
)
def test_c29_truncated(cases: Path, tmp_path: Path, name: str, offset: int, reason: str) -> None:
    [damaged] = (cases / "files" / name).iterdir()
    [good] = sorted((cases / "files/t01-dlrm8").iterdir())[:1]
    for file in (damaged, good):
        (tmp_path / file.name).symlink_to(file)
    result = analyse(find_sources(tmp_path))
    assert [entry["window"]["comm_ns"] for entry in result["ranks"]] == [5798000]
    [error] = result["errors"]
    assert error["file"] == str(tmp_path / damaged.name)
    assert error["offset"] == offset
    assert reason in error["reason"]
    assert main(["overlap", str(tmp_path), "--json"]) == 4
    assert main(["overlap", str(damaged), "--json"]) == 3


def test_c31_each_with_its_reason(cases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overlap", str(cases / "files/d12-empties")]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    reasons = {Path(line.split(": ")[2]).name: line for line in err.splitlines()}
    words = {
        "html.json": "HTML",
        "lfs.json.gz": "git-lfs pointer",
        "noev.json": "no complete event",
        "nullev.json": "no events",
        "obj.json": "no traceEvents",
        "zero.json": "empty",
    }
    assert set(reasons) == set(words)
    for name, word in words.items():
        assert word in reasons[name]


@pytest.mark.parametrize("name", ["d03-inf-bare", "d04-inf-word", "d10-bom"])
def test_c30_c34_same_as_undamaged(cases: Path, expected: dict[str, Any], name: str) -> None:
    [entry] = of(cases / "files" / name)
    assert_figures(
        entry["window"], expected["traces"]["t01-dlrm8/worker0_step_12.1694128201545.pt.trace.json"]["whole"]
    )
    assert any("read as null" in note for note in entry["notes"]) == ("inf" in name)


def test_c34_misnamed(cases: Path) -> None:
    entries = of(cases / "files/d11-misnamed")
    assert [(e["rank"], e["window"]["comm_ns"]) for e in entries] == [(0, 5798000), (1, 11336000)]


def test_c36_negative_durations(cases: Path) -> None:
    [entry] = of(cases / "files/d14-negdur")
    assert entry["dropped"] == {"negative dur": 2}
    whole = entry["window"]
    assert (whole["compute_ns"], whole["comm_ns"]) == (1023000, 5798000)
    assert (whole["overlap_ns"], whole["idle_ns"]) == (261000, 6430000)


def test_c40_no_communication(cases: Path) -> None:
    [entry] = of(cases / "files/d26-nocomm")
    assert entry["window"]["overlap_pct"] is None
    assert entry["window"]["comm_ns"] == 0
    assert "no communication: overlap is n/a" in entry["notes"]


def test_c43_one_stream(cases: Path) -> None:
    [entry] = of(cases / "files/d20-samestream")
    whole = entry["window"]
    assert (whole["comm_ns"], whole["overlap_ns"], whole["idle_ns"]) == (200_000, 0, 0)
    assert any("streams shared" in note and "impossible on one stream" in note for note in entry["notes"])


def test_c71_three_copies(cases: Path, tmp_path: Path) -> None:
    """100 MB, in another layout than torch's; read in pieces."""
    big = tmp_path / "big.json"
    source = cases / "files/t03-td-control/control.json.gz"
    subprocess.run([sys.executable, str(cases / "make_big.py"), str(source), "3", str(big)], check=True)
    [entry] = of(big)
    whole = entry["window"]
    assert (whole["comm_ns"], whole["compute_ns"]) == (490605000, 844008000)
    assert (whole["overlap_ns"], whole["exposed_ns"]) == (226842000, 263763000)
    assert round(whole["overlap_pct"], 4) == 46.2372
    assert len(entry["steps"]) == 2 * 18
