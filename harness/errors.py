"""Errors a user can act on: each is one line and carries the exit code of the command line.

Exit codes (the command line's contract): 0 done and gate passed, 1 gate failed, 2 usage, 3 nothing readable or
the run failed, 4 done but part of the input was missing or unreadable, 5 this machine cannot do it,
130 interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

EXIT_OK = 0
EXIT_GATE_FAILED = 1
EXIT_USAGE = 2
EXIT_FAILED = 3
EXIT_PARTIAL = 4
EXIT_UNAVAILABLE = 5
EXIT_INTERRUPTED = 130


class MeshscopeError(Exception):
    """Something went wrong that one line can explain; `exit_code` is what the command ends with."""

    exit_code = EXIT_FAILED


class UsageError(MeshscopeError):
    """The command line or the configuration asks for something that cannot be."""

    exit_code = EXIT_USAGE


class UnavailableError(MeshscopeError):
    """This machine or this build cannot do it; `meshscope doctor` says the same."""

    exit_code = EXIT_UNAVAILABLE


class InputError(MeshscopeError):
    """A file cannot be read, wholly or in part.

    `offset` is the byte at which reading stopped in the file as stored (compressed bytes for gzip),
    None where no place in the file is meant.
    """

    def __init__(self, file: str | Path, reason: str, offset: int | None = None) -> None:
        self.file = str(file)
        self.reason = reason
        self.offset = offset
        place = "" if offset is None else f" at byte {offset}"
        super().__init__(f"{file}{place}: {reason}")

    def to_json(self) -> dict[str, Any]:
        """The `errors` item of every `--json` object."""
        return {"file": self.file, "offset": self.offset, "reason": self.reason}


def failure_json(errors: Sequence[InputError]) -> dict[str, Any]:
    """What `--json` prints where nothing could be read: the keys that the object of every command has."""
    return {"schema_version": 1, "mode": None, "errors": [error.to_json() for error in errors]}
