"""`meshscope run`: starts the ranks of a run on this machine and records them."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

from harness.checkpoints import find_checkpoint
from harness.config import Trainer
from harness.config_json import to_json
from harness.doctor import choose_mode, memory_bytes
from harness.errors import EXIT_FAILED, EXIT_OK, InputError, UnavailableError, UsageError
from harness.launch import TIMEOUT_S, OnStep
from harness.modes import launch_in_mode, prepare
from harness.recipes.arguments import add_recipe_arguments, config_from
from harness.recording import Mode
from harness.report import build
from harness.report.text import render
from harness.text import GIB, counted, in_ranges, number, one_line, size
from harness.validation import validate_inputs

TAKES_OVERRIDES = True
DEFAULT_PARENT = Path("runs") / "out"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument(
        "--mode",
        choices=[mode for mode in get_args(Mode) if mode != "imported"],
        help="real: one CUDA device per rank; cpu: gloo; shared-gpu: all ranks on the devices there are (times are not "
        "a cluster's); rehearsal: the memory of ranks of any world, one process each, no communication; default: real "
        "where there are enough devices, else cpu",
    )
    parser.add_argument(
        "--ranks", metavar="R,…", help="mode rehearsal: the ranks to rehearse (default: one of each kind of ranks)"
    )
    parser.add_argument(
        "--nccl",
        type=Path,
        metavar="PATH",
        help="mode shared-gpu: an NCCL library of 2.30 or later (default: $MESHSCOPE_NCCL, torch's own, the wheel's)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="new folder to record into (default: runs/out/NAME-TIME)"
    )
    parser.add_argument(
        "--seed-checkpoint",
        type=Path,
        metavar="DIR",
        help="write the initial weights, whole, into a new folder, for runs of any layout to begin with "
        "(--checkpoint.load DIR); starts no rank",
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration, start nothing")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="S",
        help="a run in which no rank ends a step, or writes to a checkpoint, for S seconds has hung "
        "(default: %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Everything that can be refused is refused before a process starts; exits 3 if the run fails."""
    config = config_from(args)
    if args.print_config:
        print(to_json(config))
        return EXIT_OK
    if not args.timeout > 0:  # NaN is not, either
        raise UsageError(f"--timeout {args.timeout:g} must be above 0")
    for option, value, mode in (("--ranks", args.ranks, "rehearsal"), ("--nccl", args.nccl, "shared-gpu")):
        if value is not None and args.mode != mode:
            raise UsageError(f"{option} is for --mode {mode} only")
    if args.seed_checkpoint is not None:
        return _seed(config, args)
    choice = choose_mode(config, args.mode)
    config.training.device = choice.device
    validate_inputs(config)
    start = prepare(config, choice, ranks=args.ranks, nccl=args.nccl)
    if config.checkpoint.load is not None:  # said in the recording, and before `latest` becomes this run
        config.checkpoint.load = str(find_checkpoint(Path(config.checkpoint.load)).resolve())
    directory = _out_directory(args.out, config.name)

    what = counted(config.world_size, "rank")
    if start.rehearsed:
        what = f"{'rank' if len(start.rehearsed) == 1 else 'ranks'} {in_ranges(start.rehearsed)} of {config.world_size}"
    _say(f"{config.name}: {what}, mode {choice.mode} ({start.why}), recording to {directory}")
    try:
        with _progress(config, start.rehearsed) as on_step:
            status = launch_in_mode(start, config, directory, timeout_s=args.timeout, on_step=on_step)
    except KeyboardInterrupt:
        _say(f"what was recorded is in {directory}")
        raise
    except OSError as error:
        raise InputError(error.filename or directory, f"{error.strerror}: the run has ended") from None
    if status.state != "complete":
        _say(f"meshscope run: error: {one_line(str(status.reason))} (recorded so far, and logs: {directory})")
        return EXIT_FAILED
    print(render(build(directory)))
    return EXIT_OK


def _seed(config: Trainer.Config, args: argparse.Namespace) -> int:
    """Writes a seed checkpoint, in this process."""
    for option in ("mode", "out"):
        if getattr(args, option) is not None:
            raise UsageError(f"--{option}: --seed-checkpoint starts no run; leave it out")
    if config.workload != "training":
        raise UsageError(f"--seed-checkpoint: workload={config.workload} has no weights")
    if config.checkpoint.load is not None:
        raise UsageError("--seed-checkpoint writes the weights of training.seed: leave out --checkpoint.load")
    size_bytes, memory = 4 * config.model.params, memory_bytes()
    if size_bytes > memory:
        raise UnavailableError(
            f"--seed-checkpoint: the whole model in float32 is {size(size_bytes)}, this machine has {size(memory)} of "
            "memory; without it every layout computes the same weights, each rank its shard"
        )
    from harness.trainer.seed import write_seed_checkpoint

    directory = _new_folder(args.seed_checkpoint, "--seed-checkpoint")
    checkpoint = write_seed_checkpoint(config, directory)
    print(
        f"{config.name}: {config.model.params:,} initial weights of training.seed={config.training.seed}, float32, in "
        f"{checkpoint}; runs of any layout begin with them: --checkpoint.load {directory}"
    )
    return EXIT_OK


def _out_directory(wanted: Path | None, name: str) -> Path:
    """A new or empty folder, made now; the default one gets the link `latest`.

    Raises `UsageError` if there is something, or if the folder cannot be made.
    """
    if wanted is not None:
        return _new_folder(wanted, "--out")
    try:
        return _default_directory(name)
    except OSError as error:
        raise UsageError(f"--out {DEFAULT_PARENT}: {error.strerror}; name another folder") from None


def _new_folder(wanted: Path, option: str) -> Path:
    """`wanted`, empty; raises `UsageError`."""
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        occupied = any(wanted.iterdir())
        writable = os.access(wanted, os.W_OK)
    except OSError as error:
        raise UsageError(f"{option} {wanted}: {error.strerror}; name another folder") from None
    if occupied:
        raise UsageError(f"{option} {wanted}: the folder is not empty; name a new one")
    if not writable:
        raise UsageError(f"{option} {wanted}: the folder cannot be written to; name another one")
    return wanted


def _default_directory(name: str) -> Path:
    stem = re.sub(r"[^\w.-]", "_", name) + time.strftime("-%Y%m%d-%H%M%S")
    DEFAULT_PARENT.mkdir(parents=True, exist_ok=True)
    directory, count = DEFAULT_PARENT / stem, 1
    while directory.exists():  # another run began in the same second
        count += 1
        directory = DEFAULT_PARENT / f"{stem}-{count}"
    directory.mkdir()
    link = DEFAULT_PARENT / f".latest.{os.getpid()}"
    link.symlink_to(directory.name)
    link.replace(DEFAULT_PARENT / "latest")
    return directory


@contextmanager
def _progress(config: Trainer.Config, rehearsed: Sequence[int]) -> Iterator[OnStep]:
    """Shows each step once, from the first rank that ended it, in a rehearsal of each rank: a bar on a terminal, else a
    line."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    steps = config.training.steps

    def words(rank: int, row: dict[str, Any]) -> str:
        return "  ".join([f"rank {rank}", *memory_words(row)]) if rehearsed else progress_words(row)

    if not console.is_terminal:

        def print_step(rank: int, row: dict[str, Any], count: int) -> None:
            _say(f"step {row['step'] + 1}/{steps}  {words(rank, row)}")

        yield _each_step_once(print_step, rehearses=bool(rehearsed))
        return
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=steps * max(1, len(rehearsed)), now="starting the ranks")

        def show_step(rank: int, row: dict[str, Any], count: int) -> None:
            bar.update(task, completed=count if rehearsed else row["step"] + 1, now=words(rank, row))

        yield _each_step_once(show_step, rehearses=bool(rehearsed))


def _each_step_once(show: Callable[[int, dict[str, Any], int], None], *, rehearses: bool) -> OnStep:
    """`show` gets rank, row and how many rows it got."""
    last, count = -1, 0

    def on_step(rank: int, row: dict[str, Any]) -> None:
        nonlocal last, count
        if rehearses or row["step"] > last:
            last, count = row["step"], count + 1
            show(rank, row, count)

    return on_step


def progress_words(row: dict[str, Any]) -> str:
    """Loss, speed and peak memory of one rank's step."""
    speed = row.get("tokens_per_s")
    words = [f"loss {number(row.get('loss'))}", f"tokens/s per device {'n/a' if speed is None else f'{speed:,.0f}'}"]
    return "  ".join(words + memory_words(row))


def memory_words(row: dict[str, Any]) -> list[str]:
    """The peak: on CUDA what the allocator handed out; on CPU the process's own in every line, and beside it the
    tensors of the steps that track them."""
    allocated, resident = row.get("peak_allocated_bytes"), row.get("peak_rss_bytes")
    if row.get("memory_source") == "cuda_allocator":
        return [f"peak allocated GiB {_gib(allocated)}"]
    return [f"peak resident GiB {_gib(resident)}"] + (
        [] if allocated is None else [f"of which tracked tensors {_gib(allocated)}"]
    )


def _gib(value: int | None) -> str:
    return number(None if value is None else value / GIB)


def _say(text: str) -> None:
    """Progress and errors; a run goes on when nobody reads them any more."""
    with suppress(BrokenPipeError):
        print(text, file=sys.stderr, flush=True)
