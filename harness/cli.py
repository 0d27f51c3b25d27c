"""The `meshscope` command: one file per command in `harness/commands/`, imported only when it is the one asked for."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import sys
from typing import NoReturn, Protocol, cast

from harness import __version__
from harness.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    InputError,
    MeshscopeError,
    UsageError,
    failure_json,
)
from harness.text import one_line

DESCRIPTION = (
    "What each rank's memory and communication did in a distributed PyTorch training run, what it should have done, "
    "and whether a setting changes it."
)
# Command -> what `meshscope --help` says. The module is harness.commands.<command>.
COMMANDS = {
    "run": "start the ranks of a run on this machine and record them",
    "report": "everything about a recording: steps, memory, communication, life of a parameter, prediction beside it",
    "overlap": "communication/compute overlap of chrome traces: whole, per step, collective, dimension, FSDP unit",
    "memory": "peaks, stacking and composition of allocator snapshots",
    "whatif": "what a recorded run would have reserved under other settings of torch's caching allocator",
    "ledger": "predicted memory, communication and time of a step, next to what a recording of it measured",
    "compare": "one recording against another: what changed, what the runs differ in, and bounds for CI",
    "probe": "does a setting change anything? repeated runs of each arm, and a verdict with its interval",
    "dashboard": "the pages over a folder of recordings, in a browser of this machine",
    "calibrate": "measure what this machine's compute, memory, host and links do, for predicted times",
    "doctor": "what this machine can run, what is missing and the command for it",
}


class Command(Protocol):
    """What a module in `harness/commands/` offers.

    One with `TAKES_OVERRIDES = True` gets the dotted options (`--training.steps 20`) as pairs in `args.overrides`.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Does the work, data to stdout, everything else to stderr; returns the exit code."""
        ...


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line instead of a usage block in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {one_line(message)} (see {self.prog} --help)\n")


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser with the arguments of `command` only, so that no other command's imports are paid."""
    parser = OneLineParser(prog="meshscope", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"meshscope {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == command:
            load_command(name).add_arguments(sub)
    return parser


def load_command(name: str) -> Command:
    return cast(Command, importlib.import_module(f"harness.commands.{name}"))


def split_overrides(argv: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Takes `--section.field value` and `--section.field=value` out of a command line, in order.

    Raises `UsageError` for one without a value.
    """
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    words = iter(argv)
    for word in words:
        name, has_value, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            rest.append(word)
            continue
        if not has_value:
            following = next(words, None)
            if following is None:
                raise UsageError(f"--{name} needs a value")
            value = following
        overrides.append((name, value))
    return rest, overrides


def main(argv: list[str] | None = None) -> int:
    """Runs one command line and returns its exit code (see `harness.errors`)."""
    argv = sys.argv[1:] if argv is None else argv
    command = next((word for word in argv if word in COMMANDS), None)
    args = argparse.Namespace()
    try:
        if "" in argv:  # as a path it would mean the working directory
            raise UsageError("an argument is empty: is a variable of the shell not set?")
        overrides: list[tuple[str, str]] = []
        if command and getattr(load_command(command), "TAKES_OVERRIDES", False):
            argv, overrides = split_overrides(argv)
        args = build_parser(command).parse_args(argv, argparse.Namespace(overrides=overrides))
        return load_command(args.command).run(args)
    except MeshscopeError as error:
        print(f"meshscope {command}: error: {one_line(str(error))}", file=sys.stderr)
        if isinstance(error, InputError) and getattr(args, "json", False):
            print(json.dumps(failure_json([error])))
        return error.exit_code
    except BrokenPipeError:
        raise
    except OSError as error:  # what no command foresaw: a full disk, a name that the file system does not take
        place = "" if error.filename is None else f"{error.filename}: "
        reason = one_line(f"{place}{error.strerror or type(error).__name__}")
        print(f"meshscope {command}: error: {reason}", file=sys.stderr)
        if error.filename is not None and getattr(args, "json", False):
            print(json.dumps(failure_json([InputError(str(error.filename), error.strerror or type(error).__name__)])))
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(f"meshscope {command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def entry_point() -> NoReturn:
    """The console script: quiet when the reader of a pipe goes away, one line when the output cannot be written."""
    _open_standard_streams()
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        code = EXIT_OK
        _discard_output()
    except OSError as error:
        print(f"meshscope: error: standard output: {error.strerror}", file=sys.stderr)
        code = EXIT_FAILED
        _discard_output()
    sys.exit(code)


def _open_standard_streams() -> None:
    """Points standard streams that are closed at nothing, so that no file takes their place, and lets output hold
    what its encoding lacks."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free one
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """So that the interpreter does not try again, and complain, when it flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    entry_point()
