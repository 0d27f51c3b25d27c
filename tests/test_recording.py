"""A recording is readable while it is written, after a crash, and with ranks missing; each is stated."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness import recording
from harness.errors import InputError


def write_run(directory: Path, world_size: int = 2, ranks_with_steps: tuple[int, ...] = (0, 1)) -> None:
    recording.merge_manifest(directory, {"mode": "cpu", "world_size": world_size})
    recording.write_status(directory, "complete")
    for rank in ranks_with_steps:
        path = recording.steps_path(directory, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"step": s, "wall_ns": 10 + s}) + "\n" for s in range(3)))
        recording.write_json(recording.rank_path(directory, rank), {"rank": rank, "end_state": "complete"})


def test_complete_recording(tmp_path: Path) -> None:
    write_run(tmp_path)
    read = recording.read_recording(tmp_path)
    assert read.mode == "cpu"
    assert read.status is not None
    assert read.status.state == "complete"
    assert {rank: [row["wall_ns"] for row in rows] for rank, rows in read.steps.items()} == {
        0: [10, 11, 12],
        1: [10, 11, 12],
    }
    assert (read.missing_ranks, read.unfinished_ranks, read.failed_ranks, read.errors) == ([], [], {}, [])


def test_torn_last_line_is_left_out_and_reported_at_its_offset(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = recording.steps_path(tmp_path, 1)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 3, "wal')
    read = recording.read_recording(tmp_path)
    assert [row["step"] for row in read.steps[1]] == [0, 1, 2]
    (error,) = read.errors
    assert error.to_json() == {
        "file": str(path),
        "offset": len(whole),
        "reason": "the last line is torn and left out",
    }


def test_broken_line_in_the_middle_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    deep = b'{"a":' * 5000 + b"1" + b"}" * 5000
    path.write_bytes(b'{"step": 0}\n\x00\x00garbage\n[1]\n{"step": 2}\n' + deep + b"\n")
    rows, errors = recording.read_jsonl(path)
    assert rows == [{"step": 0}, {"step": 2}]
    assert [error.offset for error in errors] == [12, 22, 38]


def test_missing_rank_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, world_size=3, ranks_with_steps=(0, 2))
    read = recording.read_recording(tmp_path)
    assert read.missing_ranks == [1]
    assert [Path(error.file).name for error in read.errors] == ["rank1.jsonl"]


def test_rehearsal_expects_only_the_ranks_that_record(tmp_path: Path) -> None:
    write_run(tmp_path, world_size=8, ranks_with_steps=(0,))
    assert recording.read_recording(tmp_path).missing_ranks == list(range(1, 8))
    recording.merge_manifest(tmp_path, {"recorded_ranks": [0]})
    assert recording.read_recording(tmp_path).missing_ranks == []


def test_planned_recording_has_every_rank_missing(tmp_path: Path) -> None:
    recording.merge_manifest(tmp_path, {"world_size": 2, "mode": "cpu"})
    recording.write_status(tmp_path, "planned")
    assert recording.read_recording(tmp_path).missing_ranks == [0, 1]


def test_killed_rank_is_unfinished_and_failed_rank_gives_its_line(tmp_path: Path) -> None:
    write_run(tmp_path)
    recording.write_json(recording.rank_path(tmp_path, 0), {"end_state": None})
    recording.write_json(recording.rank_path(tmp_path, 1), {"end_state": "failed", "exception": "ValueError: x"})
    read = recording.read_recording(tmp_path)
    assert read.unfinished_ranks == [0]
    assert read.failed_ranks == {1: "ValueError: x"}


def test_steps_without_a_manifest_are_read_and_the_gap_is_stated(tmp_path: Path) -> None:
    write_run(tmp_path)
    recording.manifest_path(tmp_path).unlink()
    recording.status_path(tmp_path).write_text("{")
    read = recording.read_recording(tmp_path)
    assert len(read.steps[0]) == 3
    assert read.status is None
    assert [Path(error.file).name for error in read.errors] == ["manifest.json", "status.json"]


def test_merge_keeps_unknown_keys_and_values_that_none_would_erase(tmp_path: Path) -> None:
    recording.merge_manifest(tmp_path, {"config": {"dim": 8}, "launcher": "x", "mode": "cpu"})
    merged = recording.merge_manifest(tmp_path, {"config": None, "mode": "rehearsal", "flops_per_token": None})
    assert merged == {
        "config": {"dim": 8},
        "launcher": "x",
        "mode": "rehearsal",
        "flops_per_token": None,
        "schema_version": recording.SCHEMA_VERSION,
    }
    assert recording.read_json(recording.manifest_path(tmp_path)) == merged


def write_half_and_fail(path: Path) -> None:
    with recording.atomic_path(path) as temporary:
        temporary.write_text("half")
        (path.parent / "nowhere").read_text()


def test_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    recording.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        recording.write_json(path, {"a": float("nan")})
    with pytest.raises(FileNotFoundError):
        write_half_and_fail(path)
    assert recording.read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_failed_and_invalid_say_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        recording.write_status(tmp_path, "failed")
    written = recording.write_status(tmp_path, "invalid", "another process used the device")
    assert recording.read_status(tmp_path) == written


def test_unknown_state_is_an_input_error(tmp_path: Path) -> None:
    recording.write_json(recording.status_path(tmp_path), {"state": "done"})
    with pytest.raises(InputError, match=r"status\.json: is not a status"):
        recording.read_status(tmp_path)


@pytest.mark.parametrize("content", [None, "text"])
def test_folder_that_is_no_recording(tmp_path: Path, content: str | None) -> None:
    if content:
        (tmp_path / "notes.txt").write_text(content)
    with pytest.raises(InputError, match="is not a recording"):
        recording.read_recording(tmp_path)


def test_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        recording.read_recording(tmp_path / "nowhere")


def test_later_schema_is_refused(tmp_path: Path) -> None:
    recording.write_json(recording.manifest_path(tmp_path), {"schema_version": recording.SCHEMA_VERSION + 1})
    with pytest.raises(InputError, match="update it"):
        recording.read_recording(tmp_path)


def test_names_are_torchtitans() -> None:
    d = Path("d")
    assert str(recording.trace_path(d, 6, 3)) == "d/profiling/traces/iteration_6/rank3_trace.json.gz"
    snapshots = "d/profiling/memory_snapshot"
    assert str(recording.snapshot_path(d, 4, 1)) == f"{snapshots}/step_000000000004/000001_step_4.pickle"
    at_exit = recording.snapshot_path(d, 4, 1, at_exit=True)
    assert str(at_exit) == f"{snapshots}/step_000000000004_exit/000001_step_4.pickle"


@pytest.mark.parametrize("name", ["status.json", "steps/rank0.jsonl", "ranks/rank0.json"])
def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path, name: str) -> None:
    recording.merge_manifest(tmp_path, {"mode": "cpu", "world_size": 1})
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    read = recording.read_recording(tmp_path)
    assert next(error.reason for error in read.errors if error.file == str(path)) == "is not a regular file"


@pytest.mark.parametrize(
    ("manifest", "row"),
    [
        ({"recorded_ranks": -1.0}, {}),
        ({"recorded_ranks": [[1]]}, {}),
        ({"versions": 1}, {}),
        ({}, {"step": "x"}),
        ({}, {"memory_source": []}),
        ({}, {"peak_allocated_bytes": 10**400}),
    ],
)
def test_values_of_the_wrong_type_are_named_and_left_out(tmp_path: Path, manifest: dict, row: dict) -> None:
    recording.merge_manifest(tmp_path, {"mode": "cpu", "world_size": 1})
    text = json.loads((tmp_path / "manifest.json").read_text()) | manifest
    (tmp_path / "manifest.json").write_text(json.dumps(text))
    path = recording.steps_path(tmp_path, 0)
    path.parent.mkdir()
    path.write_text(json.dumps({"step": 0, "wall_ns": 5} | row) + "\n")
    read = recording.read_recording(tmp_path)
    assert read.errors
    assert all("\n" not in error.reason for error in read.errors)


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    """As /dev/null would be by root: a pipe stays a pipe, a link a link, and both get the text."""
    pipe, link, named = tmp_path / "pipe", tmp_path / "link", tmp_path / "named"
    os.mkfifo(pipe)
    link.symlink_to(named)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_text)
        recording.write_json(pipe, {"a": 1})
        assert json.loads(read.result(timeout=10)) == {"a": 1}
    assert pipe.is_fifo()
    for text in ({"a": 1}, {"a": 2}):
        recording.write_json(link, text)
        assert link.is_symlink()
        assert json.loads(named.read_text()) == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "named", "pipe"]
