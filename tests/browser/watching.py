"""What every browser test of the dashboard watches for, and how it knows that a page is drawn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page

RECORDED = Path(__file__).parents[2] / "runs" / "recorded"
TIMEOUT_MS = 30_000
BUSY = "[data-testid=stSpinner], [data-testid=stSkeleton]"


@contextmanager
def watched(browser: Browser, **context: object) -> Iterator[Page]:
    """A page that must end without an exception box, an error on the console or a request to elsewhere."""
    with browser.new_context(viewport={"width": 1400, "height": 1000}, **context) as opened:
        page = opened.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: wrong.append(request.url) if is_elsewhere(request.url) else None)
        yield page
        boxes = page.get_by_test_id("stException").all_inner_texts()
        assert (boxes, wrong) == ([], [])


def is_elsewhere(url: str) -> bool:
    return not re.match(r"(https?|wss?)://127\.0\.0\.1:|data:|blob:", url)


def drawn(page: Page) -> Page:
    """Waits until the script has run: a heading is there and nothing is under way."""
    page.locator("[data-testid=stMain] [data-testid=stHeading]").first.wait_for()
    page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for()
    page.wait_for_function("selector => document.querySelectorAll(selector).length === 0", arg=BUSY)
    return page
