"""Recordings whose JSON holds anything: what is of the wrong type is left out and named."""

from pathlib import Path

from harness.schema import checked_manifest, checked_rank, checked_rows, missing_rank_errors

ROWS = Path("steps/rank0.jsonl")


def reasons(errors):
    return [error.reason for error in errors]


def test_rows_of_the_right_types_stay_as_they_are():
    row = {
        "step": 3,
        "wall_ns": 2**63 - 1,
        "peak_allocated_bytes": None,
        "loss": 2.5,
        "memory_source": "rss",
        "phases": {"forward": {"wall_ns": 5, "count": 1, "peak_allocated_bytes": None}},
        "tags": ["gc"],
        "scalars": {"lr": 0.1, "other": None},
        "anybodys": {"own": [1, "x"]},
    }
    assert checked_rows(ROWS, [row]) == ([row], [])


def test_a_value_of_another_type_is_left_out_of_its_row_only():
    rows = [
        {"step": 0, "wall_ns": "long", "peak_rss_bytes": 10**30, "loss": "low", "tags": "gc", "ooms": True},
        {"step": 1, "wall_ns": -1, "tokens": 1.5, "phases": {"forward": {"wall_ns": [], "count": 1}}},
        {"step": 2, "wall_ns": 7, "phases": [], "memory_source": {}},
    ]
    kept, errors = checked_rows(ROWS, rows)
    assert kept == [{"step": 0}, {"step": 1, "phases": {"forward": {"count": 1}}}, {"step": 2, "wall_ns": 7}]
    assert {reason.split(" ")[0] for reason in reasons(errors)} == {
        *("wall_ns", "peak_rss_bytes", "loss", "tags", "ooms", "tokens", "phases.forward.wall_ns", "phases"),
        "memory_source",
    }
    assert "loss is left out: expected `float`, got `str` (first at step 0)" in reasons(errors)


def test_numbers_that_no_sum_can_hold_are_left_out():
    kept, errors = checked_rows(ROWS, [{"step": 0, "mfu_pct": 1e308, "loss": 1e38, "scalars": {"lr": -1e200}}])
    assert kept == [{"step": 0, "loss": 1e38}]
    assert [reason.split(" ")[0] for reason in reasons(errors)] == ["mfu_pct", "scalars"]


def test_the_same_fault_in_many_rows_is_one_error():
    kept, errors = checked_rows(ROWS, [{"step": step, "wall_ns": "x"} for step in range(4, 1004)])
    assert len(kept) == 1000
    assert reasons(errors) == ["wall_ns is left out: expected `int`, got `str` (first at step 4, 1000 rows)"]


def test_rows_are_known_by_their_step():
    rows = [{"step": 1, "loss": 1.0}, {"step": 0}, {"loss": 3.0}, {"step": "0"}, {"step": 1, "loss": 2.0}]
    kept, errors = checked_rows(ROWS, rows)
    assert kept == [{"step": 0}, {"step": 1, "loss": 2.0}]
    assert reasons(errors) == [
        "a row without a step number is left out (2 rows)",
        "step is left out: expected `int`, got `str`",
        "a step is there more than once: its last row counts (first at step 1)",
    ]


def test_manifest_and_rank():
    manifest = {"mode": 3, "world_size": 0, "recorded_ranks": ["x"], "config": [], "versions": 1, "mesh": {}, "own": 1}
    kept, errors = checked_manifest(Path("manifest.json"), manifest)
    assert kept == {"mesh": {}, "own": 1}
    assert [reason.split(" ")[0] for reason in reasons(errors)] == [
        *("mode", "world_size", "recorded_ranks", "config", "versions"),
    ]
    assert checked_manifest(Path("manifest.json"), {"world_size": 10**9})[0] == {}
    rank = {"pid": "1", "device": "cpu", "end_state": None, "environment_before": {"NCCL_ALGO": 7}}
    kept, errors = checked_rank(Path("ranks/rank0.json"), rank)
    assert (kept, len(errors)) == ({"end_state": None}, 3)


def test_missing_ranks_are_named_up_to_a_few():
    errors = missing_rank_errors(range(100_000), lambda rank: Path(f"rank{rank}.jsonl"))
    assert len(errors) == 9
    assert str(errors[0]) == "rank0.jsonl: has no step: this rank is missing"
    assert str(errors[8]) == "rank8.jsonl: and 99991 more ranks up to 99999 have no step"
    assert missing_rank_errors([], lambda rank: Path()) == []
