"""Finding traces and snapshots: layouts of several tools, content before names, one reason per file."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from harness.errors import EXIT_FAILED, EXIT_OK, EXIT_PARTIAL, InputError
from harness.sources import find_sources, report_errors

TRACE = b'{"traceEvents": []}'
SNAPSHOT = b"\x80\x04\x95}\x94(\x8c\x08segments"


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def names(files: list) -> list[str]:  # type: ignore[type-arg]
    return [file.path.name for file in files]


def test_what_an_experiment_keeps_beside_its_trials_is_no_trace(tmp_path: Path) -> None:
    for name in ("experiment.json", "analysis.json", "build.json", "queues/1.json"):
        put(tmp_path / name, b"{}")
    trial = tmp_path / "trials/00-1"
    for name in ("surroundings.json", "manifest.json", "config.json"):
        put(trial / name, b"{}")
    put(trial / "profiling/traces/iteration_6/rank0_trace.json.gz", gzip.compress(TRACE))

    found = find_sources(tmp_path)

    assert (names(found.traces), found.errors) == (["rank0_trace.json.gz"], [])


def test_a_recording(tmp_path: Path) -> None:
    for rank in (10, 2):
        put(tmp_path / f"profiling/traces/iteration_6/rank{rank}_trace.json.gz", gzip.compress(TRACE))
        put(tmp_path / f"profiling/memory_snapshot/step_000000000006/{rank:06d}_step_6.pickle", SNAPSHOT)
        put(tmp_path / f"ranks/rank{rank}.json", b"{}")
        put(tmp_path / f"steps/rank{rank}.jsonl", b'{"step": 1}\n')
        put(tmp_path / f"logs/rank{rank}.log", b"{")
    put(tmp_path / "manifest.json", b'{"mode": "real", "mesh": {"tp": [[0, 1], [2, 3]], "dp": [0, 2], "bad": "x"}}')
    put(tmp_path / "status.json", b"{}")
    put(tmp_path / "config.json", b"{}")
    put(tmp_path / ".meshscope_cache/x.json", TRACE)
    put(tmp_path / "profiling/traces/iteration_6/rank0_trace.json.gz.123.tmp", gzip.compress(TRACE))
    found = find_sources(tmp_path)
    assert (found.recording, found.mode) == (True, "real")
    assert found.mesh == {"mesh_tp": [[0, 1], [2, 3]], "mesh_dp": [[0, 2]]}
    assert [(f.rank, f.iteration) for f in found.traces] == [(2, 6), (10, 6)]
    assert [(f.rank, f.iteration) for f in found.snapshots] == [(2, 6), (10, 6)]
    assert found.errors == []


@pytest.mark.parametrize(
    ("name", "rank", "iteration"),
    [
        ("rank-3.json.gz", 3, None),
        ("rank_3.json", 3, None),
        ("h200_rank3_trace.json", 3, None),
        ("worker3.1623143089861.pt.trace.json", 3, None),
        ("node_851.1752215573993169006.pt.trace.json", None, None),
        ("crank3.json", None, None),
        ("trace.json", None, None),
        ("000004_step_10.pickle", 4, 10),
        ("rank2/trace.json", 2, None),
        ("iteration_7/rank1_trace.json", 1, 7),
        ("name with spaces rank 5 ü.json", 5, None),
    ],
)
def test_names(tmp_path: Path, name: str, rank: int | None, iteration: int | None) -> None:
    put(tmp_path / "in" / name, TRACE)
    found = find_sources(tmp_path / "in")
    [file] = found.traces + found.snapshots
    assert (file.rank, file.iteration) == (rank, iteration)


def test_content_goes_before_the_extension(tmp_path: Path) -> None:
    put(tmp_path / "plain.json.gz", TRACE)
    put(tmp_path / "zipped.json", gzip.compress(TRACE))
    put(tmp_path / "bom.json", b"\xef\xbb\xbf\n " + TRACE)
    put(tmp_path / "other.dat", TRACE)
    put(tmp_path / "list.json", b"[]")
    put(tmp_path / "dump.bin", SNAPSHOT)
    put(tmp_path / "segments.json", SNAPSHOT)
    put(tmp_path / "evil.pkl", b"cos\nsystem\n")
    found = find_sources(tmp_path)
    assert names(found.traces) == ["bom.json", "list.json", "other.dat", "plain.json.gz", "zipped.json"]
    assert names(found.snapshots) == ["dump.bin", "evil.pkl", "segments.json"]
    assert found.errors == []


def test_what_is_no_input_is_passed_over(tmp_path: Path) -> None:
    for name in ("README.md", "run.py", "image.png", ".metadata", "weights.pt", "data.distcp"):
        put(tmp_path / name, b"\x80\x04K\x01." if name == "data.distcp" else b"text {")
    with pytest.raises(InputError, match="holds no trace"):
        find_sources(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("zero.json", b"", "empty"),
        ("zero.pickle", b"", "empty"),
        ("page.json", b"<!DOCTYPE html><html></html>", "HTML"),
        ("lfs.pickle", b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        ("text.json", b"hello", "neither JSON nor a pickle"),
        ("damaged.json.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff", "damaged gzip"),
    ],
)
def test_one_reason_per_file(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    path = put(tmp_path / "in" / name, content)
    [error] = find_sources(tmp_path / "in").errors
    assert (error.file, reason in error.reason) == (str(path), True)
    with pytest.raises(InputError, match=reason):
        find_sources(path)


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    put(tmp_path / "good.json", TRACE)
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    (tmp_path / "broken.json").symlink_to(tmp_path / "absent")
    (tmp_path / "folder").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")
    found = find_sources(tmp_path)
    assert names(found.traces) == ["good.json"]
    assert sorted(Path(error.file).name for error in found.errors) == ["broken.json", "loop.json", "pipe.json"]
    with pytest.raises(InputError):
        find_sources(tmp_path / "loop.json")
    with pytest.raises(InputError, match="not a regular file"):
        find_sources(tmp_path / "pipe.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user other than root, who may read every file")
def test_files_that_may_not_be_read(tmp_path: Path) -> None:
    put(tmp_path / "closed.json", TRACE).chmod(0)
    put(tmp_path / "shut/inside.json", TRACE)
    (tmp_path / "shut").chmod(0)
    errors = find_sources(tmp_path).errors
    (tmp_path / "shut").chmod(0o700)
    assert sorted((Path(error.file).name, error.reason) for error in errors) == [
        ("closed.json", "permission denied"),
        ("shut", "permission denied"),
    ]


def test_absent(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        find_sources(tmp_path / "absent")


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    errors = [InputError("a.json", "is\nempty")]
    assert report_errors("overlap", [], read=2) == EXIT_OK
    assert report_errors("overlap", errors, read=1) == EXIT_PARTIAL
    assert report_errors("overlap", errors, read=0) == EXIT_FAILED
    assert capsys.readouterr().err == "meshscope overlap: error: a.json: is empty\n" * 2
