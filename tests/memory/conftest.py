from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared"


def _folder(*parts: str) -> Path:
    folder = SHARED.joinpath(*parts)
    if not folder.is_dir():
        pytest.skip(f"../shared/{'/'.join(parts)} is not here")
    return folder


@pytest.fixture(scope="session")
def case_files() -> Path:
    """Public inputs with right values."""
    return _folder("cases", "files")


@pytest.fixture(scope="session")
def real_recordings() -> Path:
    """Recordings of real H200s."""
    return _folder("recordings")
