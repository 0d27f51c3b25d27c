"""One file per command of `meshscope`; each has `add_arguments(parser)` and `run(args) -> exit code`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from harness.errors import InputError, UsageError
from harness.recording import atomic_path


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object: bytes and ns as integers")


def add_cache_argument(parser: argparse.ArgumentParser) -> None:
    words = "changes nothing: of all commands only dashboard keeps results"
    parser.add_argument("--no-cache", action="store_true", help=words)


def require_page(path: Path) -> None:
    """For commands that take long: raises `UsageError` where no page could be written in the end."""
    folder = next((parent for parent in path.absolute().parents if parent.exists()), path)  # `/` has no parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"--html {path}: no file can be written there; name another one")


def write_page(path: Path, text: str) -> None:
    """Raises `InputError` if the file cannot be written."""
    if path.is_dir():
        raise InputError(path, "cannot be written: it is a folder")
    try:
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(path, f"cannot be written: {error.strerror}") from error
    print(f"wrote {path}", file=sys.stderr)
