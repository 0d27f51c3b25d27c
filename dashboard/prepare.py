"""Analyses one run and writes every extract of it to a folder: `python -m dashboard.prepare PATH FOLDER`.

In a process of its own, the server stays responsive and keeps its memory whatever the size of the traces.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from dashboard.extracts import EXTRACTS, extractor
from dashboard.store import FAILED, save
from harness.errors import InputError
from harness.report import build
from harness.worker import die_with_parent


def prepare(path: Path, folder: Path) -> None:
    """Where nothing at `path` can be read, its error is what is written."""
    try:
        report = build(path)
    except InputError as error:
        (folder / FAILED).write_text(json.dumps(error.to_json()), encoding="utf-8")
        return
    for name in EXTRACTS:
        save(folder / name, extractor(name)(report))


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    prepare(Path(sys.argv[1]), Path(sys.argv[2]))
