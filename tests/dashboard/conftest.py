"""The app in Streamlit's test bench, over a folder, with a cache of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

import dashboard
from dashboard import data, discover, store, summaries

SCRIPT = Path(dashboard.__file__).parent / "entry" / "script.py"

OpenPage = Callable[..., AppTest]


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dashboard-cache")


@pytest.fixture(autouse=True)
def deprecations_fail(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Streamlit logs what it will remove rather than warning of it."""
    yield
    said = [record.getMessage() for record in caplog.records if record.name.startswith("streamlit.deprecation")]
    assert not said


@pytest.fixture
def open_page(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> OpenPage:
    """`open_page(folder, "overview", run="a")`: the page as a browser that opens that URL has it."""
    logging.getLogger("streamlit").propagate = True
    monkeypatch.setenv(store.CACHE_VARIABLE, str(cache_folder))
    for looked in (data.runs_below, summaries.experiment):  # at most every few seconds
        looked.clear()

    def opened(root: Path, page: str = "runs", **query: str | list[str]) -> AppTest:
        monkeypatch.setenv(discover.ROOT_VARIABLE, str(root))
        app = AppTest.from_file(str(SCRIPT), default_timeout=60)
        for name, value in query.items():
            app.query_params[name] = value
        if page != "runs":  # where one lands
            app._page_hash = page_hash(page)
        return app.run()

    return opened


def page_hash(name: str) -> str:
    """AppTest switches to pages by file; these are functions, known by the name in their URL."""
    return calc_hash(name)
