"""status.json of several ranks without a launcher: whatever the order of their writes, the first failure stays."""

import threading
from pathlib import Path
from typing import Any

import pytest

from harness import recording
from harness.record.files import RankFiles
from harness.recording import read_status


def started(directory: Path, world_size: int) -> list[RankFiles]:
    files = [RankFiles(directory, rank, leads=rank == 0) for rank in range(world_size)]
    for rank, item in enumerate(files):
        item.start({"world_size": world_size}, rank=rank, end_state=None)
    return files


def fail(files: RankFiles, reason: str, at: int) -> None:
    files.write_rank(end_state="failed", exception=reason, failed_unix_ns=at)
    files.fail()


def complete(files: RankFiles) -> None:
    files.write_rank(end_state="complete")
    files.end({}, failed=False)


def state(directory: Path) -> tuple[str, str | None]:
    status = read_status(directory)
    return status.state, status.reason


def test_one_after_the_other(tmp_path: Path) -> None:
    leading, other, late = started(tmp_path, 3)
    assert state(tmp_path) == ("running", None)
    fail(late, "RuntimeError: connection lost", at=20)
    assert state(tmp_path) == ("failed", "rank 2: RuntimeError: connection lost")
    fail(other, "ValueError: the cause", at=10)
    complete(leading)
    assert state(tmp_path) == ("failed", "rank 1: ValueError: the cause")


def test_a_rank_that_goes_on(tmp_path: Path) -> None:
    leading, other = started(tmp_path, 2)
    fail(other, "RuntimeError: once", at=10)
    other.write_rank(end_state=None, exception=None, failed_unix_ns=None)
    other.resume()
    assert state(tmp_path) == ("running", None)
    complete(leading)
    assert state(tmp_path) == ("complete", None)


def test_failing_between_the_leading_ranks_decision_and_its_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leading, other = started(tmp_path, 2)
    write_status = recording.write_status

    def late(directory: Path, state: recording.State, reason: str | None = None) -> recording.Status:
        if state == "complete":
            fail(other, "RuntimeError: just then", at=10)
        return write_status(directory, state, reason)

    monkeypatch.setattr(recording, "write_status", late)
    complete(leading)
    assert state(tmp_path) == ("failed", "rank 1: RuntimeError: just then")


def test_failing_while_the_leading_rank_completes(tmp_path: Path) -> None:
    for attempt in range(20):
        directory = tmp_path / str(attempt)
        files = started(directory, 3)
        together = threading.Barrier(3)

        def end(rank: int, files: list[RankFiles] = files, together: Any = together) -> None:
            together.wait()
            if rank == 0:
                complete(files[0])
            else:
                fail(files[rank], f"RuntimeError: {rank}", at=rank)

        threads = [threading.Thread(target=end, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert state(directory) == ("failed", "rank 1: RuntimeError: 1"), attempt
