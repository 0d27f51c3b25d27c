"""The timeline in a real browser: zoomed and moved by keys, wheel and pointer, its place in the address, what is under
the pointer, where the most exposed collective is."""

from __future__ import annotations

import re

import pytest
from watching import drawn, watched

ONE = "h200x2_fsdp2"


class Lanes:
    """The timeline of an open page."""

    def __init__(self, page):
        self.page = page
        self.canvas = page.locator("canvas.lanes")
        self.canvas.wait_for()
        # The second picture is made for the width that the browser has.
        self.until(lambda data: int(data["replies"]) >= 2)

    def data(self):
        return self.canvas.evaluate("canvas => ({...canvas.closest('.timeline').dataset})")

    def until(self, condition):
        for _ in range(300):
            if condition(found := self.data()):
                return found
            self.page.wait_for_timeout(50)
        raise AssertionError(found)

    def view(self):
        start, end = self.data()["view"].split("-")
        return int(start), int(end)

    def do(self, act):
        """Acts, and waits for the server's picture of where that leads."""
        before = int(self.data()["replies"])
        act()
        self.until(lambda data: int(data["replies"]) > before)
        return self.view()

    def tip(self, x, y):
        self.canvas.hover(position={"x": x, "y": y})
        tip = self.page.locator(".timeline .tip")
        return tip.inner_text() if tip.is_visible() else ""


@pytest.fixture
def lanes(go):
    return Lanes(go(f"/overlap?run={ONE}"))


def test_keys_zoom_and_move_and_the_address_follows(lanes):
    whole = lanes.view()
    lanes.canvas.focus()
    start, end = lanes.do(lambda: lanes.page.keyboard.press("w"))
    assert end - start < whole[1] - whole[0]
    moved = lanes.do(lambda: lanes.page.keyboard.press("ArrowRight"))
    assert moved[0] > start
    lanes.page.wait_for_url(re.compile(f"range={moved[0]}-{moved[1]}"))
    assert lanes.do(lambda: lanes.page.keyboard.press("Home")) == whole
    lanes.page.wait_for_url(lambda url: "range=" not in url)


def test_an_address_shows_the_same_view_to_whoever_opens_it(lanes, browser):
    lanes.canvas.focus()
    view = lanes.do(lambda: [lanes.page.keyboard.press(key) for key in "www"])
    lanes.page.wait_for_url(re.compile(f"range={view[0]}-{view[1]}"))
    with watched(browser) as other:
        other.goto(lanes.page.url)
        assert Lanes(drawn(other)).view() == view


def test_the_wheel_scrolls_the_page_until_the_timeline_is_clicked(lanes):
    whole = lanes.view()
    lanes.canvas.hover(position={"x": 500, "y": 60})
    lanes.page.mouse.wheel(0, 200)
    lanes.page.wait_for_timeout(300)
    assert lanes.view() == whole
    lanes.canvas.click(position={"x": 500, "y": 8})
    start, end = lanes.do(lambda: lanes.page.mouse.wheel(0, -500))
    assert end - start < whole[1] - whole[0]


def test_dragging_moves_and_with_shift_chooses_a_range(lanes):
    box = lanes.canvas.bounding_box()

    def drag(begin, end):
        lanes.page.mouse.move(box["x"] + begin, box["y"] + 8)
        lanes.page.mouse.down()
        lanes.page.mouse.move(box["x"] + end, box["y"] + 8, steps=4)
        lanes.page.mouse.up()

    whole = lanes.view()
    lanes.page.keyboard.down("Shift")
    chosen = lanes.do(lambda: drag(400, 600))
    lanes.page.keyboard.up("Shift")
    assert whole[0] < chosen[0] < chosen[1] < whole[1]
    moved = lanes.do(lambda: drag(600, 500))
    assert moved[0] > chosen[0]
    assert moved[1] - moved[0] == pytest.approx(chosen[1] - chosen[0], abs=2)


def test_the_most_exposed_collective_is_gone_to_marked_and_told(lanes):
    page = lanes.page
    page.get_by_role("tab", name="Most exposed").click()
    table = page.get_by_role("tabpanel", name="Most exposed").get_by_test_id("stDataFrame")
    table.scroll_into_view_if_needed()
    before = lanes.view()
    lanes.do(lambda: table.click(position={"x": 18, "y": 52}))
    start, end = lanes.until(lambda data: data["view"] != f"{before[0]}-{before[1]}")["view"].split("-")
    assert int(end) - int(start) < before[1] - before[0]
    lanes.canvas.scroll_into_view_if_needed()
    width = lanes.canvas.bounding_box()["width"]
    middle = 168 + (width - 176) / 2
    tips = [lanes.tip(middle, y) for y in range(40, 260, 6)]
    # Selected rows are of whole collectives: this one begins and ends in view, and nothing computed during it.
    assert any(re.search(r"all_reduce\n[\d.]+ ms from [\d.]+ ms\nexposed [\d.]+ ms \(100.0 %\)", tip) for tip in tips)


def test_memory_is_drawn_with_its_levels_under_the_pointer(go):
    lanes = Lanes(go(f"/memory?run={ONE}"))
    said = lanes.tip(600, 150)
    for name in ("reserved", "active", "allocated", "pending"):
        assert re.search(rf"{name} [\d.,]+ (GiB|MiB|B)", said)


def test_a_timeline_has_words_for_those_who_do_not_see_it(lanes):
    assert lanes.canvas.get_attribute("role") == "img"
    assert "Timeline of rank 0, rank 1" in lanes.canvas.get_attribute("aria-label")
    lanes.page.get_by_text("Figures of this view").click()
    lanes.page.get_by_role("button", name="Zoom in").click()
    lanes.page.wait_for_url(re.compile("range="))
