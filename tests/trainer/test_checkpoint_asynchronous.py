"""Saves in the background, slow saves, and ranks that are killed while they save."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forked_ranks import ForkedRanks
from saving import configuration, losses_of, tensors_of

from harness.checkpoints import (
    checkpoint_path,
    checkpoints_folder,
    complete_checkpoints,
    find_checkpoint,
    partial_checkpoints,
    read_header,
)
from harness.config import Checkpoint, Trainer
from harness.errors import InputError, UsageError
from harness.recording import read_recording, steps_path

PATIENCE_S = 120


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[ForkedRanks]:
    with ForkedRanks(tmp_path_factory.mktemp("ranks") / "log") as started:
        yield started


def wait_until(holds: Callable[[], object], pause_s: float = 0.01) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(pause_s)


def steps_ended(directory: Path, rank: int) -> int:
    path = steps_path(directory, rank)
    return path.read_bytes().count(b"\n") if path.exists() else 0


def blocked_file(directory: Path, completed_steps: int, rank: int) -> Path:
    """Makes a rank's file of a coming checkpoint a pipe: writing it waits for a reader, and then fails."""
    final = checkpoint_path(directory, completed_steps)
    partial = final.with_name(final.name + ".partial")
    partial.mkdir(parents=True)
    os.mkfifo(partial / f"__{rank}_0.distcp")
    return partial / f"__{rank}_0.distcp"


def test_training_goes_on_beside_one_save_whose_failure_ends_the_run(documents, tmp_path):
    directory = tmp_path / "run"
    pipe = blocked_file(directory, 2, rank=0)
    ended = []

    def read_late() -> None:
        wait_until(lambda: steps_ended(directory, 0) >= 4)
        time.sleep(0.5)  # nothing more comes: the save after step 4 waits for the first
        ended.append(steps_ended(directory, 0))
        pipe.read_bytes()

    reader = threading.Thread(target=read_late)
    reader.start()
    config = configuration(documents, steps=100)
    config.checkpoint.asynchronous = True
    with pytest.raises(InputError, match=r"step_000000000002\.partial: cannot be written: OSError: ") as caught:
        config.build(directory).train()
    reader.join()
    assert ended == [4]
    assert "\n" not in str(caught.value)
    recording = read_recording(directory)
    assert recording.ranks[0]["exception"] == str(caught.value)
    assert [row["step"] for row in recording.steps[0] if "checkpoint" not in row["tags"]] == [0]
    assert complete_checkpoints(checkpoints_folder(directory)) == []


def test_a_failed_save_ends_the_run_before_the_next_is_due(documents, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "checkpoints").write_text("in the way")
    config = configuration(documents, steps=100, interval=8)
    config.checkpoint.asynchronous = True
    with pytest.raises(InputError, match=r"step_000000000008\.partial: cannot be written: "):
        config.build(directory).train()
    assert steps_ended(directory, 0) < 16, "the next save came first"


@pytest.mark.distributed
def test_a_slow_save_of_one_rank_is_no_collective_of_training_that_hangs(documents, ranks, tmp_path):
    """Rank 1 writes for longer than a collective may take; what ends all ranks is then its file, not a timeout."""
    directory = tmp_path / "run"
    pipe = blocked_file(directory, 2, rank=1)
    config = configuration(documents, "tp2", steps=4)
    config.training.train_timeout_s = 2
    ranks.start(config, directory)
    wait_until(lambda: min(steps_ended(directory, rank) for rank in (0, 1)) == 2)
    time.sleep(3.5)
    assert all(rank.get("end_state") is None for rank in read_recording(directory).ranks.values())
    pipe.read_bytes()
    ranks.wait()
    reasons = {rank["exception"] for rank in read_recording(directory).ranks.values()}
    assert len(reasons) == 1
    assert "step_000000000002.partial: cannot be written: OSError: " in reasons.pop()


MOMENTS = {
    "the folder is there": lambda partial: True,
    "rank 1 writes": lambda partial: (partial / "__1_0.distcp").exists(),
    "both have written": lambda partial: (partial / ".metadata.tmp").exists(),
    "all but its mark": lambda partial: (partial / ".metadata").exists(),
    "with its mark": lambda partial: (partial / "checkpoint.json").exists(),
}


def of_killed_ranks(documents: Path, *, steps: int) -> Trainer.Config:
    config = configuration(documents, "tp2", steps=steps)
    config.checkpoint = Checkpoint.Config(interval=1, keep=2, asynchronous=True)
    return config


def kill_at(moment: Callable[[Path], bool], ranks: ForkedRanks, config: Trainer.Config, directory: Path) -> None:
    """SIGKILL to all ranks at the first moment of that kind after three checkpoints."""
    folder = checkpoints_folder(directory)
    pids = ranks.start(config, directory)
    wait_until(lambda: len(complete_checkpoints(folder)) >= 2 and not checkpoint_path(directory, 1).exists())
    wait_until(lambda: any(moment(partial) for partial in partial_checkpoints(folder)), pause_s=0)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    ranks.wait()


@pytest.mark.distributed
def test_ranks_killed_at_any_moment_of_a_save_leave_the_last_checkpoint_usable(documents, ranks, tmp_path):
    """Whichever it is, it is the one of a run that was left alone and saved in the foreground."""
    left, unfinished = {}, 0
    for name, moment in MOMENTS.items():
        directory = tmp_path / name
        kill_at(moment, ranks, of_killed_ranks(documents, steps=100_000), directory)
        unfinished += bool(partial_checkpoints(checkpoints_folder(directory)))
        left[find_checkpoint(directory)] = None
    assert unfinished >= 2, "no save was killed"

    steps = {checkpoint: read_header(checkpoint).step for checkpoint in left}
    whole = of_killed_ranks(documents, steps=max(steps.values()) + 2)
    whole.checkpoint = Checkpoint.Config(interval=1, keep=whole.training.steps)
    ranks.start(whole, tmp_path / "whole")
    ranks.wait()
    for checkpoint, step in steps.items():
        expected, found = tensors_of(checkpoint_path(tmp_path / "whole", step)), tensors_of(checkpoint)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), checkpoint

    last = max(steps, key=lambda checkpoint: steps[checkpoint])
    on = of_killed_ranks(documents, steps=whole.training.steps)
    on.checkpoint.load = str(last)
    ranks.start(on, tmp_path / "on")
    ranks.wait()
    losses = losses_of(tmp_path / "whole")
    assert losses_of(tmp_path / "on") == {step: losses[step] for step in range(steps[last], steps[last] + 2)}
    assert partial_checkpoints(last.parent) == [], "what the dead left is removed"


def test_a_save_in_the_background_needs_saves(documents):
    config = configuration(documents, steps=1, interval=0)
    config.checkpoint.asynchronous = True
    with pytest.raises(UsageError, match=r"checkpoint\.asynchronous=true has no effect with checkpoint\.interval=0"):
        config.validate()
    config.checkpoint = Checkpoint.Config(interval=1, timeout_s=0)
    with pytest.raises(UsageError, match=r"checkpoint\.timeout_s=0 must be at least 1"):
        config.validate()
