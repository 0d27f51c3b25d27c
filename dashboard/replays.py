"""Snapshots replayed under other allocator settings: what `meshscope whatif --json` says, kept beside the extracts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dashboard import data, preparing, store
from dashboard.discover import Run
from dashboard.store import Extract
from harness.allocator.conf import parse_conf
from harness.errors import InputError
from harness.text import GIB
from harness.whatif.analyse import Question

REPLAYS = "replays"
ANSWER = "answer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A question of `meshscope whatif`, as its options have it. Raises `UsageError` for settings that torch would not
    take, or that need a limit."""

    file: Path
    confs: Sequence[str]
    limit_gib: float | None
    without_pending: bool

    def __post_init__(self) -> None:
        limit_bytes = None if self.limit_gib is None else int(self.limit_gib * GIB)
        Question(confs=[(conf, parse_conf(conf)) for conf in self.confs], limit_bytes=limit_bytes)

    @property
    def command(self) -> list[str]:
        """Without the name of the program."""
        found = ["whatif", str(self.file)]
        for conf in self.confs:
            found += ["--alloc-conf", conf]
        if self.limit_gib is not None:
            found += ["--limit-gib", f"{self.limit_gib:.10g}"]
        return [*found, "--without-pending"] if self.without_pending else found


def kept(root: Path, run: Run, asked: Asked) -> dict[str, Any] | None:
    """The answer, if it was asked before of the run as it is. Raises as `data.extract`."""
    folder = _folder(root, run, asked)
    return store.load(folder / ANSWER).values if folder.is_dir() else None


def replay(root: Path, run: Run, asked: Asked) -> dict[str, Any]:
    """The object of the command, of a process of its own. Raises `InputError` where it fails, and as `data.extract`."""
    folder = _folder(root, run, asked)
    done = preparing.in_process("harness.cli", *asked.command, "--json")
    if not done.stdout:
        raise InputError(asked.file, f"cannot be replayed: {preparing.last_line(done)}")
    values = msgspec.json.decode(done.stdout, type=dict[str, Any])
    if not values["files"]:
        raise InputError(**values["errors"][0])
    unfinished = store.new_folder(folder.parent)
    store.save(unfinished / ANSWER, Extract(values=values))
    store.publish(unfinished, folder)
    return values


def _folder(root: Path, run: Run, asked: Asked) -> Path:
    name = hashlib.sha256(json.dumps(asked.command).encode()).hexdigest()[:32]
    return Path(data.prepared(root, run)) / REPLAYS / name
