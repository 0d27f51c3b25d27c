"""The checkpoints of a recording: where they are, which are complete and what they hold. Free of torch.

    <recording>/checkpoints/step_{completed steps:012d}/
      checkpoint.json     step, data position, model, layout, torch's version; its last file, so the mark of a whole one
      .metadata, *.distcp tensors by name, as torch.distributed.checkpoint writes them

A folder is written under a name that ends in `.partial` and renamed when all of it is on disk.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from harness.config import Decoder
from harness.errors import InputError, UsageError
from harness.recording import read_json

SCHEMA_VERSION = 1
PARTIAL_SUFFIX = ".partial"


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """checkpoint.json. `step` counts completed steps: training goes on with the step of that number."""

    step: int
    data: dict[str, Any] | None
    """As `harness.trainer.data.Batches.state_dict` gives it; null in a seed checkpoint."""
    model: Decoder.Config
    world_size: int
    mesh: dict[str, int]
    """Axis -> ranks on it, of the layout that saved; any other can load."""
    torch: str
    saved_unix_ns: int
    save_ns: int | None = None
    """From the beginning of the save until all tensors were on disk."""
    schema_version: int = SCHEMA_VERSION

    @property
    def is_seed(self) -> bool:
        """Whether it holds the weights that training begins with, and nothing else."""
        return self.step == 0


def checkpoints_folder(recording: Path) -> Path:
    return recording / "checkpoints"


def checkpoint_path(recording: Path, completed_steps: int) -> Path:
    return checkpoints_folder(recording) / f"step_{completed_steps:012d}"


def header_path(checkpoint: Path) -> Path:
    return checkpoint / "checkpoint.json"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Those in a `checkpoints` folder, oldest first; one that is half written is none."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if re.fullmatch(r"step_\d{12}", path.name)]
    return sorted(path for path in found if header_path(path).is_file())


def partial_checkpoints(folder: Path) -> list[Path]:
    """Those that are being written, or whose writer died."""
    return sorted(folder.glob(f"step_*{PARTIAL_SUFFIX}")) if folder.is_dir() else []


def written_bytes(recording: Path) -> int:
    """What there is so far of checkpoints that are being written."""
    with suppress(FileNotFoundError):  # one was finished just now
        partial = partial_checkpoints(checkpoints_folder(recording))
        return sum(file.stat().st_size for folder in partial for file in folder.iterdir())
    return 0


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` is, or the latest complete one of the recording or `checkpoints` folder that it is.

    Raises `UsageError` if there is none.
    """
    if header_path(path).is_file():
        return path
    for folder in (checkpoints_folder(path), path):
        if found := complete_checkpoints(folder):
            return found[-1]
    if not path.is_dir():
        raise UsageError(f"checkpoint.load={path}: there is no such folder")
    partial = [*partial_checkpoints(checkpoints_folder(path)), *partial_checkpoints(path)]
    begun = f", only {partial[-1].name}, which was never finished" if partial else ""
    raise UsageError(
        f"checkpoint.load={path}: there is no checkpoint in it{begun}; "
        "a run saves one every --checkpoint.interval steps"
    )


def read_header(checkpoint: Path) -> Header:
    """Raises `InputError` if checkpoint.json cannot be read, or is a later version's."""
    path = header_path(checkpoint)
    document = read_json(path)
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(path, f"has schema_version {version}; this meshscope reads {SCHEMA_VERSION}")
    try:
        return msgspec.convert(document, Header)
    except msgspec.ValidationError as error:
        raise InputError(path, f"is not the header of a checkpoint: {error}") from None
