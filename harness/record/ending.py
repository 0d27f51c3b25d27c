"""How a process ends early, and the line that says so."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

from harness.errors import MeshscopeError

EXIT_TERMINATED = 128 + signal.SIGTERM


def one_line(error: BaseException) -> str:
    if isinstance(error, MeshscopeError):
        return str(error)
    if isinstance(error, SystemExit):
        return "terminated by SIGTERM" if error.code == EXIT_TERMINATED else f"SystemExit: {error.code}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__qualname__}: {lines[0]}" if lines else type(error).__qualname__


def unwind(signal_number: int, frame: FrameType | None) -> NoReturn:
    """Handles SIGTERM like an exception, so that open blocks end and write what they have."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the writing
    sys.exit(EXIT_TERMINATED)
