"""The `meshscope` command: one file per command in `harness/commands/`, imported only when it is the one asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import NoReturn, Protocol, cast

from harness import __version__
from harness.errors import EXIT_INTERRUPTED, EXIT_USAGE, MeshscopeError

# Command -> what `meshscope --help` says. The module is harness.commands.<command>.
COMMANDS = {
    "overlap": "communication/compute overlap of chrome traces: whole, per step, collective, dimension",
    "memory": "peaks, stacking and composition of allocator snapshots",
}


class Command(Protocol):
    """What a module in `harness/commands/` offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Does the work, data to stdout, everything else to stderr; returns the exit code."""
        ...


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line instead of a usage block in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser with the arguments of `command` only, so that no other command's imports are paid."""
    parser = OneLineParser(prog="meshscope", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"meshscope {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == command:
            load_command(name).add_arguments(sub)
    return parser


def load_command(name: str) -> Command:
    return cast(Command, importlib.import_module(f"harness.commands.{name}"))


def main(argv: list[str] | None = None) -> int:
    """Runs one command line and returns its exit code (see `harness.errors`)."""
    argv = sys.argv[1:] if argv is None else argv
    command = next((word for word in argv if word in COMMANDS), None)
    args = build_parser(command).parse_args(argv)
    try:
        return load_command(args.command).run(args)
    except MeshscopeError as error:
        print(f"meshscope {args.command}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"meshscope {args.command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def entry_point() -> NoReturn:
    """The console script: quiet when the reader of a pipe goes away."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stderr.close()
        code = 0
    sys.exit(code)


if __name__ == "__main__":
    entry_point()
