"""Run against run: verdicts that one run of each can bear, what runs differ in, and gates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from written import MIB, rewrite_steps, write_kernels, write_recording, write_snapshot

from harness import recording
from harness.cli import main
from harness.compare import METRICS, compare_runs, measure, parse_bound
from harness.errors import UsageError

MANIFEST = {"mode": "real", "versions": {"torch": "2.11", "cuda": "13.0"}, "config": {"training": {"seq_len": 8}}}


def write(path: Path, *, ranks: int = 2, **manifest: Any) -> Path:
    return write_recording(path, ranks=ranks, world_size=ranks, steps=6, manifest=MANIFEST | manifest)


def set_peaks(path: Path, *values: int) -> None:
    for rank in range(2):
        rewrite_steps(path, rank, peak_allocated_bytes=[MIB, *values])


def compared(a: Path, b: Path) -> dict[str, Any]:
    return compare_runs(measure(a), measure(b)).to_json([])


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {item["metric"]: item["verdict"] for item in found["metrics"]}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path / "a"), write(tmp_path / "b")


def test_json_is_the_contract(pair, capsys):
    assert main(["compare", *map(str, pair), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = {"schema_version", "mode", "verdict", "metrics", "arms", "comparable", "notes", "errors"}
    assert keys <= found.keys()
    assert (found["schema_version"], found["mode"], found["comparable"]) == (1, "real", True)
    assert [item["metric"] for item in found["metrics"]] == list(METRICS)
    for item in found["metrics"]:
        assert {"metric", "a", "b", "better", "effect_pct", "ci_low_pct", "ci_high_pct", "verdict"} <= item.keys()
        assert item["ci_low_pct"] is item["ci_high_pct"] is None
        assert item["verdict"] in ("better", "worse", "no difference", "inconclusive")
    assert [arm["name"] for arm in found["arms"]] == ["A", "B"]


def test_values_are_medians_and_maxima_over_steps_and_ranks(pair):
    found = {item["metric"]: item["a"] for item in compared(*pair)["metrics"]}
    assert found["step_wall_ns"] == 14_000_000, "rank 1 is the slowest: steps 1 to 5 take 12 to 16 ms"
    assert found["peak_allocated_bytes"] == 6 * MIB + 1
    assert found["peak_reserved_bytes"] is None
    assert found["overlap_pct"] is None


@pytest.mark.parametrize(
    ("peaks", "verdict"),
    [
        ((5 * MIB,) * 5, "no difference"),
        ((4 * MIB,) * 5, "better"),
        ((6 * MIB,) * 5, "worse"),
        ((4 * MIB, 4 * MIB, 6 * MIB, 4 * MIB, 4 * MIB), "inconclusive"),
    ],
)
def test_peaks_are_decided_where_steps_agree(pair, peaks, verdict):
    """A peaks at 5 MiB in every step."""
    set_peaks(pair[0], *(5 * MIB,) * 5)
    set_peaks(pair[1], *peaks)
    assert verdicts(compared(*pair))["peak_allocated_bytes"] == verdict


def test_times_of_single_runs_decide_nothing(pair):
    rewrite_steps(pair[1], 1, wall_ns=[1, 30, 30, 30, 30, 30])
    found = compared(*pair)
    assert verdicts(found)["step_wall_ns"] == "inconclusive"
    assert any("step_wall_ns" in note and "no interval" in note for note in found["notes"])


def test_a_run_beside_itself(pair):
    found = compared(pair[0], pair[0])
    assert found["verdict"] == "no difference"
    assert found["differences"] == []


def test_less_memory_for_more_time_is_not_better(pair):
    set_peaks(pair[0], *(5 * MIB,) * 5)
    set_peaks(pair[1], *(4 * MIB,) * 5)
    assert compared(*pair)["verdict"] == "better"
    for rank in range(2):
        rewrite_steps(pair[1], rank, wall_ns=[20_000_000] * 6)
    assert compared(*pair)["verdict"] == "inconclusive"


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ({"mode": "shared-gpu"}, "mode differs: A real, B shared-gpu"),
        ({"versions": {"torch": "2.13", "cuda": "13.0"}}, "versions.torch differs: A 2.11, B 2.13"),
        ({"config": {"training": {"seq_len": 16}}}, "different work: config.training.seq_len 8 in A, 16 in B"),
    ],
)
def test_what_makes_runs_incomparable(tmp_path, manifest, reason):
    found = compared(write(tmp_path / "a"), write(tmp_path / "b", **manifest))
    assert found["comparable"] is False
    assert found["verdict"] == "inconclusive"
    assert any(reason in note for note in found["notes"])


def test_other_hardware_and_world_size(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", ranks=3)
    for path, name, count in ((a, "H100", 2), (b, "H200", 3)):
        for rank in range(count):
            recording.write_json(recording.rank_path(path, rank), {"rank": rank, "device": {"name": name}})
    notes = " ".join(compared(a, b)["notes"])
    assert "world_size differs: A 2, B 3" in notes
    assert "devices differs: A 2 × H100, B 3 × H200" in notes


def test_differences_are_configuration_environment_and_versions(tmp_path):
    a = write(tmp_path / "a")
    b = write(tmp_path / "b", config={"training": {"seq_len": 8}, "parallelism": {"tp": 2}})
    before = {"RANK": "0", "OMP_NUM_THREADS": "1"}
    for path, after in ((a, {}), (b, {"NCCL_NVLS_ENABLE": "0"})):
        rank = {"rank": 0, "environment_before": before, "environment_after": before | after}
        recording.write_json(recording.rank_path(path, 0), rank)
    found = {item["what"]: (item["a"], item["b"]) for item in compared(a, b)["differences"]}
    assert found == {"config.parallelism.tp": (None, 2), "environment after init: NCCL_NVLS_ENABLE": (None, "0")}
    assert compared(a, b)["comparable"] is True


def test_traces_and_snapshots_alone(tmp_path):
    for name, hidden in (("a", 1000), ("b", 250)):
        kernels = [("_allgather_base", "mesh_dp", 20, 0, 1000), ("gemm", None, 7, 0, hidden)]
        write_kernels(tmp_path / name / "rank0_trace.json.gz", kernels)
        write_snapshot(tmp_path / name / "rank0_snapshot.pickle")
    found = compared(tmp_path / "a", tmp_path / "b")
    by_name = {item["metric"]: item for item in found["metrics"]}
    assert (by_name["overlap_pct"]["a"], by_name["overlap_pct"]["b"]) == (100.0, 25.0)
    assert (by_name["exposed_ns"]["a"], by_name["exposed_ns"]["b"]) == (0, 750_000)
    assert by_name["exposed_ns"]["effect_pct"] is None, "A is 0"
    assert by_name["peak_allocated_bytes"]["verdict"] == "no difference"
    assert by_name["step_wall_ns"]["a"] is None
    assert any("no manifest" in note for note in found["notes"])


def test_waiting_is_told_from_transfer(tmp_path):
    """Four all-reduces that end together: rank 1 joins `late` µs after rank 0, the transfer takes the other 200."""
    for name, late in (("a", 0), ("b", 800)):
        for rank in range(2):
            behind = late if rank else 0
            kernels = [("allreduce", "mesh_dp", 20, 2000 * k + behind, late + 200 - behind) for k in range(4)]
            write_kernels(tmp_path / name / f"rank{rank}_trace.json.gz", kernels, rank=rank)
    found = {item["metric"]: item for item in compared(tmp_path / "a", tmp_path / "b")["metrics"]}["wait_pct"]
    assert found["a"] == 0
    assert found["b"] == pytest.approx(100 * (800 + 0) / 2 / ((800 + 0) / 2 + 200))
    alone = write_kernels(tmp_path / "alone" / "rank0_trace.json.gz", [("allreduce", "mesh_dp", 20, 0, 200)])
    (found,) = [item for item in compared(alone, alone)["metrics"] if item["metric"] == "wait_pct"]
    assert found["a"] is None


def test_what_waits_for_a_stream_depends_on_timing(tmp_path):
    for name, pending in (("a", 0), ("b", 3)):
        write_snapshot(tmp_path / name / "rank0_snapshot.pickle", pending=pending)
    found = verdicts(compared(tmp_path / "a", tmp_path / "b"))
    assert found["peak_active_bytes"] == "inconclusive"
    assert found["peak_allocated_bytes"] == "no difference"


def test_rows_and_snapshots_do_not_compare(tmp_path):
    a = write(tmp_path / "a")
    write_snapshot(tmp_path / "b" / "rank0_snapshot.pickle")
    found = compared(a, tmp_path / "b")
    assert verdicts(found)["peak_allocated_bytes"] == "inconclusive"
    assert any("A's are from step rows" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("bound", "code"),
    [
        ("peak_allocated_bytes>+2%", 1),
        ("peak_allocated_bytes>+30%", 0),
        ("peak_allocated_bytes>=+20%", 1),
        ("peak_allocated_bytes > 5MiB", 1),
        ("peak_allocated_bytes>6MiB", 0),
        ("peak_allocated_bytes>6291455", 1),
        ("step_wall_ns<-1%", 0),
        ("step_wall_ns>1ms", 1),
        ("step_wall_ns<=14ms", 1),
        ("mfu_pct<30%", 1),
        ("peak_reserved_bytes>+2%", 1),
    ],
)
def test_gates(pair, capsys, bound, code):
    """A peaks at 5 MiB, B at 6 MiB; both take 14 ms a step; neither knows its MFU or reserved bytes."""
    set_peaks(pair[0], *(5 * MIB,) * 5)
    set_peaks(pair[1], *(6 * MIB,) * 5)
    assert main(["compare", *map(str, pair), "--fail-on", bound]) == code
    err = capsys.readouterr().err
    assert (f"gate failed: {bound}: " in err) == (code == 1)
    assert len(err.splitlines()) == code


def test_gates_say_values_and_what_cannot_be_decided(pair, capsys):
    set_peaks(pair[0], *(5 * MIB,) * 5)
    set_peaks(pair[1], *(6 * MIB,) * 5)
    arguments = ["--fail-on", "peak_allocated_bytes>+2%", "--fail-on", "mfu_pct<30", "--fail-on", "step_wall_ns>1s"]
    assert main(["compare", *map(str, pair), "--json", *arguments]) == 1
    said = capsys.readouterr()
    assert "peak_allocated_bytes>+2%: A 5.000 MiB, B 6.000 MiB, +20.00 %" in said.err
    assert "mfu_pct<30: cannot be decided: unknown in B (not recorded)" in said.err
    gate = json.loads(said.out)["gate"]
    assert [(item["passed"], item["decided"]) for item in gate] == [(False, True), (False, False), (True, True)]


@pytest.mark.parametrize(
    ("bound", "reason"),
    [
        ("peak_active_byte>+2%", "did you mean peak_active_bytes"),
        ("speed>1", "known: step_wall_ns, tokens_per_s"),
        ("step_wall_ns>2%", "has a sign"),
        ("step_wall_ns>+2", "an absolute bound has no sign"),
        ("step_wall_ns>3GiB", "units of step_wall_ns: ns, us"),
        ("tokens_per_s>3k", "tokens_per_s has no unit"),
        ("step_wall_ns=3", "is not METRIC OP BOUND"),
        ("step_wall_ns>nan", "is not METRIC OP BOUND"),
        ("", "is not METRIC OP BOUND"),
    ],
)
def test_bounds_that_cannot_be(bound, reason, tmp_path, capsys):
    with pytest.raises(UsageError, match="--fail-on") as caught:
        parse_bound(bound)
    assert reason in str(caught.value)
    assert main(["compare", str(tmp_path), str(tmp_path), "--fail-on", bound]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_markdown_has_no_markup_of_strangers(tmp_path, capsys):
    a = write(tmp_path / "a", config={"training": {"seq_len": 8}, "x|y`": "<b>|`@all"})
    assert main(["compare", str(a), str(write(tmp_path / "b")), "--markdown", "--fail-on", "mfu_pct<1"]) == 1
    out = capsys.readouterr().out
    assert "### meshscope compare" in out
    assert "| step_wall_ns | 14.000 ms | 14.000 ms | 0.00 % | no difference |" in out
    (row,) = [line for line in out.splitlines() if line.startswith("| config.x")]
    assert row == "| config.x\\|y\\` | `<b>\\|'@all` | `not stated` |"


@pytest.mark.parametrize("broken", ["a", "b"])
def test_a_run_that_cannot_be_read_is_exit_3(tmp_path, capsys, broken):
    paths = {"a": write(tmp_path / "a"), "b": write(tmp_path / "b")} | {broken: tmp_path / "absent"}
    assert main(["compare", str(paths["a"]), str(paths["b"])]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert "absent" in said.err
    assert len(said.err.splitlines()) == 1


def test_a_missing_rank_is_exit_4_and_named(tmp_path, capsys):
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    recording.steps_path(b, 1).unlink()
    assert main(["compare", str(a), str(b)]) == 4
    said = capsys.readouterr()
    assert "note: B lacks ranks 1" in said.out
    assert "rank1.jsonl" in said.err
