"""Rows of a device that ends its steps later than the host does: in order, at most one step late, whatever happens."""

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.record.files import RankFiles
from harness.record.rows import Rows
from harness.record.step import Step
from harness.record.throughput import Peak, Throughput
from harness.record.timing import Scalar
from harness.recording import read_recording

THROUGHPUT = Throughput(peak=Peak(), flops_per_token=None, devices_per_token=1)


class LateClock:
    """Of a device whose work ends when the test says so, or fails."""

    source = "late"

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: RuntimeError | None = None

    def start(self) -> None: ...

    def stop(self, values: Mapping[str, Scalar]) -> None:
        self._values = dict(values)

    def is_done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.ended.is_set()

    def wall_ns(self) -> int:
        return 7_000_000_000

    def numbers(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._values.items()}


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    files = RankFiles(tmp_path, 0, leads=True)
    files.start({"world_size": 1})
    return Rows(files, THROUGHPUT)


def ended_step(number: int) -> tuple[Step, LateClock]:
    clock = LateClock()
    step = Step(number, [], clock, tokens=70)
    step.log({"loss": 0.5 + number})
    step.stop_clock()
    return step, clock


def written(directory: Path) -> list[int]:
    return [row["step"] for row in read_recording(directory).steps[0]]


def test_a_row_waits_for_the_device(tmp_path: Path, rows: Rows) -> None:
    step, clock = ended_step(0)
    rows.add(step)
    assert written(tmp_path) == []
    clock.ended.set()
    rows.add(ended_step(1)[0])
    (row,) = read_recording(tmp_path).steps[0]
    assert (row["wall_ns"], row["wall_source"], row["loss"]) == (7_000_000_000, "late", 0.5)
    assert row["tokens_per_s"] == 10.0


def test_a_device_that_is_done_is_not_waited_for(tmp_path: Path, rows: Rows) -> None:
    for number in range(2):
        step, clock = ended_step(number)
        clock.ended.set()
        rows.add(step)
        assert written(tmp_path) == list(range(number + 1))


def test_the_next_step_waits_for_a_row_that_is_a_whole_step_late(tmp_path: Path, rows: Rows) -> None:
    first, first_clock = ended_step(0)
    second, _ = ended_step(1)
    rows.add(first)
    threading.Timer(0.2, first_clock.ended.set).start()
    rows.add(second)
    assert first_clock.ended.is_set()
    assert written(tmp_path) == [0]


def test_finish_waits_for_the_last(tmp_path: Path, rows: Rows) -> None:
    step, clock = ended_step(0)
    rows.add(step)
    threading.Timer(0.1, clock.ended.set).start()
    rows.finish()
    rows.finish()
    assert written(tmp_path) == [0]


def test_after_a_failure_the_row_comes_without_what_the_device_never_said(tmp_path: Path, rows: Rows) -> None:
    step, _ = ended_step(0)
    rows.add(step)
    assert rows.rescue(timeout_s=0.05) == "the device had not ended step 0 0.05 s after the failure"
    assert rows.rescue(timeout_s=0.05) is None
    (row,) = read_recording(tmp_path).steps[0]
    assert (row["wall_ns"], row["loss"], row["tokens_per_s"], row["tokens"]) == (None, None, None, 70)
    assert row["tags"] == ["unfinished"]


def test_an_error_of_the_device_is_raised_once_and_then_named(tmp_path: Path, rows: Rows) -> None:
    step, clock = ended_step(0)
    rows.add(step)
    clock.error = RuntimeError("CUDA error: device-side assert triggered\nmore")
    with pytest.raises(RuntimeError, match="device-side assert"):
        rows.add(ended_step(1)[0])
    assert rows.rescue() == "the device did not end step 0: RuntimeError: CUDA error: device-side assert triggered"
    assert read_recording(tmp_path).steps[0][0]["tags"] == ["unfinished"]
