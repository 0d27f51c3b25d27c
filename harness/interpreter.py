"""Another Python for ranks to run under, with a torch of its own: asked before anything is started with it."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from harness.doctor.checks import OLDEST_TORCH
from harness.doctor.facts import TorchFacts
from harness.errors import UnavailableError, UsageError
from harness.launch import build_environment
from harness.text import one_line

PATIENCE_S = 180
# Two lines of JSON: what is installed, without importing it, then what the ranks' own imports give.
QUESTION = """
import importlib.metadata, json, platform
try:
    torch = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    torch = None
print(json.dumps({"python": platform.python_version(), "torch": torch}), flush=True)
import harness.worker, harness.trainer.trainer, harness.record.recorder
import torch
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda}), flush=True)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """A Python at `path`; its version and those of its torch are None until it was asked."""

    path: str
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None

    def versions(self) -> dict[str, str | None]:
        """As a recording's manifest names them."""
        return {"python": self.python, "torch": self.torch, "cuda": self.cuda}

    def words(self) -> str:
        return self.path if self.python is None else f"{self.path} (Python {self.python}, torch {self.torch})"


def find_interpreter(path: str) -> Interpreter:
    """The Python at `path`, not asked yet. Raises `UsageError` if there is nothing that could be run."""
    absolute = Path(os.path.abspath(path))  # not resolved: a virtual environment's is a link
    if not absolute.is_file():
        raise UsageError(f"python={path}: there is no such file (seen from {Path.cwd()})")
    if not os.access(absolute, os.X_OK):
        raise UsageError(f"python={path} cannot be executed: name the interpreter itself, such as venv/bin/python")
    return Interpreter(path=str(absolute))


def examine(interpreter: Interpreter) -> Interpreter:
    """The same with its versions, once it has imported what a rank imports, as a rank would.

    Raises `UnavailableError` if it cannot: no torch, one that this trainer does not run on, other packages missing.
    """
    try:
        done = subprocess.run(
            [interpreter.path, "-c", QUESTION],
            env=build_environment(1, {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE_S,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{interpreter.path}: did not import torch within {PATIENCE_S} s") from None
    except OSError as error:  # such as a script without an interpreter
        raise UnavailableError(f"{interpreter.path}: cannot be started: {error.strerror}") from None
    versions = _versions(done.stdout)
    if not versions.keys() >= {"python", "torch"}:
        raise UnavailableError(f"{interpreter.path}: is no Python that says its version ({_last(done.stderr)})")
    what = f"{interpreter.path}: Python {versions.get('python')}, torch {versions.get('torch')}"
    if versions["torch"] is None:
        raise UnavailableError(f"{interpreter.path}: Python {versions['python']} has no torch")
    release = TorchFacts(version=versions["torch"]).release
    if release is None or release < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise UnavailableError(
            f"{what}: the trainer runs on torch {oldest} or later (training.collective_memory=record_stream_async does "
            "here what torch up to 2.7 did)"
        )
    if done.returncode:
        raise UnavailableError(f"{what}: cannot import what a rank needs: {_last(done.stderr)}")
    return Interpreter(path=interpreter.path, **versions)


def _versions(output: str) -> dict[str, Any]:
    """What the program said; libraries print, too, and what is no Python may say anything."""
    found: dict[str, Any] = {}
    for line in output.splitlines():
        with suppress(msgspec.DecodeError, RecursionError):
            found |= msgspec.json.decode(line, type=dict[str, str | None])
    return {name: value for name, value in found.items() if name in ("python", "torch", "cuda")}


def _last(messages: str) -> str:
    lines = messages.strip().splitlines()
    return one_line(lines[-1]) if lines else "it said nothing"
