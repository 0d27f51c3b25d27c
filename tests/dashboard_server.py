"""`meshscope dashboard` as a process, for tests that want the real server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLI = [sys.executable, "-m", "harness.cli", "dashboard"]


@contextmanager
def served(folder: Path, cache: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address, and the process; ended by SIGINT, which is its good end."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [*CLI, str(folder), "--port", "0", *options]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), process.communicate(timeout=30)[1]
        yield address, process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
        process.communicate()
