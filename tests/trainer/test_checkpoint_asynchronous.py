"""Saves in the background, slow saves, and ranks that are killed while they save."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import glob
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


@contextmanager
def slow_file(directory: Path, completed_steps: int, rank: int) -> Iterator[None]:
    """A rank that writes its file of that checkpoint waits until the block ends: a lease, see fcntl(2)."""
    final = checkpoint_path(directory, completed_steps)
    partial = final.with_name(final.name + ".partial")
    partial.mkdir(parents=True)
    with open(partial / f"__{rank}_0.distcp", "wb+") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:  # overlay and network file systems may refuse, and nothing else blocks a real write
            pytest.skip(f"needs a file system with leases: {error}")
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # says that someone waits, and is ignored
        yield


def same_tensors(one: Path, other: Path) -> bool:
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.distributed
def test_training_goes_on_beside_one_save_of_what_was_there_before(documents, ranks, tmp_path):
    config = configuration(documents, steps=6, keep=3)
    ranks.start(config, tmp_path / "foreground")
    ranks.wait()
    config.checkpoint.asynchronous = True
    directory = tmp_path / "background"
    with slow_file(directory, 2, rank=0):
        ranks.start(config, directory)
        wait_until(lambda: steps_ended(directory, 0) >= 4)
        time.sleep(0.5)
        assert steps_ended(directory, 0) == 4, "the save after step 4 waits for the one before"
        assert complete_checkpoints(checkpoints_folder(directory)) == []
    ranks.wait()
    for step in (2, 4, 6):
        assert same_tensors(checkpoint_path(directory, step), checkpoint_path(tmp_path / "foreground", step))
    assert losses_of(directory) == losses_of(tmp_path / "foreground")
    tagged = [row["step"] for row in read_recording(directory).steps[0] if "checkpoint" in row["tags"]]
    assert tagged[:3] == [1, 2, 3], "saves are due after steps 1, 3 and 5, and one goes on during 2 and 3"


def test_a_failed_save_ends_the_run_before_the_next_is_due(documents, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "checkpoints").write_text("in the way")
    config = configuration(documents, steps=100, interval=8)
    config.checkpoint.asynchronous = True
    with pytest.raises(InputError, match=r"step_000000000008\.partial: cannot be written: ") as caught:
        config.build(directory).train()
    assert "\n" not in str(caught.value)
    assert read_recording(directory).ranks[0]["exception"] == str(caught.value)
    assert steps_ended(directory, 0) < 16, "the next save came first"


@pytest.mark.distributed
def test_a_slow_save_of_one_rank_is_no_collective_of_training_that_hangs(documents, ranks, tmp_path):
    directory = tmp_path / "run"
    config = configuration(documents, "tp2", steps=3)
    config.training.train_timeout_s = 2
    with slow_file(directory, 2, rank=1):
        ranks.start(config, directory)
        wait_until(lambda: min(steps_ended(directory, rank) for rank in (0, 1)) == 2)
        time.sleep(3.5)
    ranks.wait()
    assert list(losses_of(directory)) == [0, 1, 2]
    assert find_checkpoint(directory) == checkpoint_path(directory, 3)


MOMENTS = {
    "its folder is there": "*.partial",
    "rank 1 writes": "*.partial/__1_0.distcp",
    "both have written": "*.partial/.metadata.tmp",
    "its mark is missing": "*.partial/.metadata",
    "it has its mark": "*.partial/checkpoint.json",
    "it has its name": "step_????????????",
}
"""What appears then among the checkpoints."""


def of_killed_ranks(documents: Path, *, steps: int) -> Trainer.Config:
    config = configuration(documents, "tp2", steps=steps)
    config.checkpoint = Checkpoint.Config(interval=1, keep=2, asynchronous=True)
    return config


def kill_at(moment: str, ranks: ForkedRanks, config: Trainer.Config, directory: Path) -> None:
    """SIGKILL to all ranks at the first moment of that kind after three checkpoints."""
    folder = checkpoints_folder(directory)
    pids = ranks.start(config, directory)
    wait_until(lambda: len(complete_checkpoints(folder)) >= 2 and not checkpoint_path(directory, 1).exists())
    before = set(glob(f"{folder}/{moment}"))
    wait_until(lambda: set(glob(f"{folder}/{moment}")) - before, pause_s=0)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    ranks.wait()


@pytest.mark.distributed
def test_ranks_killed_at_any_moment_of_a_save_leave_the_last_checkpoint_usable(documents, ranks, tmp_path):
    """Whichever it is, it is the one of a run that was left alone and saved in the foreground."""
    left, unfinished = [], 0
    for name, moment in MOMENTS.items():
        directory = tmp_path / name
        kill_at(moment, ranks, of_killed_ranks(documents, steps=100_000), directory)
        unfinished += bool(partial_checkpoints(checkpoints_folder(directory)))
        left.append(find_checkpoint(directory))
    assert unfinished, "no save was killed"

    steps = {checkpoint: read_header(checkpoint).step for checkpoint in left}
    whole = of_killed_ranks(documents, steps=max(steps.values()) + 2)
    whole.checkpoint = Checkpoint.Config(interval=1, keep=whole.training.steps)
    ranks.start(whole, tmp_path / "whole")
    ranks.wait()
    for checkpoint, step in steps.items():
        assert same_tensors(checkpoint, checkpoint_path(tmp_path / "whole", step)), checkpoint

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
