"""What all tests share: where the real inputs are, which live beside the checkout and not in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool import Pool

SHARED = Path(os.environ.get("MESHSCOPE_SHARED") or Path(__file__).parents[2] / "shared")


def shared_folder(name: str) -> Path:
    folder = SHARED / name
    if not folder.is_dir():  # somebody's clone: visible as skipped, and CI has it
        pytest.skip(
            f"needs the project's shared test inputs ({name}) beside the checkout, or where MESHSCOPE_SHARED says; "
            "they are not part of this repository"
        )
    return folder


@pytest.fixture(scope="session")
def cases() -> Path:
    """Acceptance cases: `cases.tsv`, `expected.json`, `files/<set>/…`."""
    return shared_folder("cases")


@pytest.fixture(scope="session")
def recordings() -> Path:
    """Real recordings: `<name>/rankR_trace.json.gz`, `<name>/rankR_snapshot.pickle`."""
    return shared_folder("recordings")


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Four ranks for every distributed test of the session."""
    workers = Pool(4, tmp_path_factory.mktemp("pool"))
    yield workers
    workers.close()
