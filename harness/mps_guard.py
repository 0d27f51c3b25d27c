"""A program: runs a control daemon of CUDA's multi-process service (MPS) in a folder of its own, and ends it.

    python mps_guard.py CONTROL_PROGRAM

Prints one JSON object a line: first `folder`, then `pipe` and `log` once the daemon answers, or `error`. When its
standard input ends, because whoever started it closes it or dies in any way, it has the daemon quit, kills what is
left of it and removes the folder. Only processes that were started with that folder's pipe are ever touched. Stands
alone, so that its environment need not be that of its user.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

START_S = 30.0
# A daemon that has not answered yet is looked for after so long.
SETTLE_S = 2.0
# What the daemon gets to quit in, which it does when its last client has ended, and then to be gone.
QUIT_S = 20.0
END_S = 10.0
POLL_S = 0.05
# A socket's name, of which there are at most 108 bytes (unix(7)), is made in the pipe's folder.
LONGEST_FOLDER = 70


class Daemon:
    """One that is ours: found by the pipe folder in its environment, which its servers inherit."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self.pipe, self.log = folder / "pipe", folder / "log"
        self._mark = f"CUDA_MPS_PIPE_DIRECTORY={self.pipe}".encode()
        self._output = folder / "output"
        self.environment = {
            **os.environ,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.log),
        }
        self.pipe.mkdir()
        self.log.mkdir()

    def start(self) -> str | None:
        """Returns why it did not start, None once it answers."""
        try:
            code = self._control(["-d"], "", START_S)
        except subprocess.TimeoutExpired:
            return f"{self._program} -d did not return within {START_S:g} s"
        except OSError as error:
            return f"{self._program}: {error.strerror}"
        if code != 0:
            return f"{self._program} -d exited with {code}: {self._said()}"
        began = time.monotonic()
        while not (self.pipe / "control").exists():
            waited_s = time.monotonic() - began
            if waited_s > START_S or (waited_s > SETTLE_S and not self.processes()):
                return f"the daemon of {self._program} ended: {self._said()}"
            time.sleep(POLL_S)
        return None

    def stop(self) -> None:
        if (self.pipe / "control").exists():
            with suppress(subprocess.TimeoutExpired, OSError):  # then by force
                self._control([], "quit\n", QUIT_S)
        deadline = time.monotonic() + END_S
        while self.processes() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        deadline = time.monotonic() + END_S
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:  # it ended meanwhile
                    continue
            time.sleep(POLL_S)

    def processes(self) -> list[int]:
        """The daemon, its servers, and clients that are left."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self._mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:  # another user's, or gone
                continue
        return found

    def _control(self, arguments: list[str], text: str, timeout_s: float) -> int:
        # To a file: the daemon keeps what it inherits, so reading a pipe would wait for its end.
        with (
            open(self._output, "ab") as output,
            subprocess.Popen(
                [self._program, *arguments], env=self.environment, stdin=subprocess.PIPE, stdout=output, stderr=output
            ) as process,
        ):
            try:
                process.communicate(text.encode(), timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            return process.returncode

    def _said(self) -> str:
        files = [self._output, *sorted(self.log.glob("*.log"))]
        lines = [
            line.strip() for file in files if file.exists() for line in file.read_text(errors="replace").split("\n")
        ]
        return next((line for line in reversed(lines) if line), "it printed nothing")


def say(**facts: Any) -> None:
    """To a reader that may be gone, which the end of standard input will tell."""
    try:
        print(json.dumps(facts), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its user does, and not before the daemon
    parent = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="meshscope-mps-", dir=parent if len(parent) <= LONGEST_FOLDER else "/tmp"))
    try:
        daemon = Daemon(sys.argv[1], folder)
        say(folder=str(folder))
        try:
            error = daemon.start()
            say(error=error) if error else say(pipe=str(daemon.pipe), log=str(daemon.log))
            if error is None:
                sys.stdin.read()
        finally:
            daemon.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
