"""A real browser, without a window, on the real server over the recordings that ship with the project."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
from dashboard_server import served
from playwright.sync_api import Browser, Page, sync_playwright
from watching import RECORDED, drawn, watched

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
)  # fmt: skip


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:  # no Python package brings a browser; .ci/run installs it where it may
        pytest.skip("needs Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def address(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(RECORDED, tmp_path_factory.mktemp("cache")) as (address, _):
        yield address


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with watched(browser) as page:
        yield page


@pytest.fixture
def go(page: Page, address: str) -> Callable[[str], Page]:
    """Opens an address below the server's and waits until the page is drawn."""

    def opened(path: str) -> Page:
        page.goto(f"{address}{path}")
        return drawn(page)

    return opened
