"""A page that is left while its timeline still asks for something: the page gone to is drawn."""

import re

import pytest
from watching import drawn

ONE = "h200x2_fsdp2"


class Line:
    """The connection of a page to the server; while it is `held`, what the page says waits."""

    def __init__(self, page):
        self.held = None
        page.route_web_socket(re.compile("_stcore/stream"), self.connect)

    def connect(self, route):
        self.server = route.connect_to_server()
        route.on_message(lambda said: self.server.send(said) if self.held is None else self.held.append(said))

    def let_go(self):
        said, self.held = self.held, None
        for message in said:
            self.server.send(message)


@pytest.mark.parametrize(("left", "title"), [("overlap", "Memory"), ("memory", "Overlap")])
def test_a_page_is_drawn_though_the_one_left_still_asks(page, address, left, title):
    line = Line(page)
    page.goto(f"{address}/{left}?run={ONE}")
    canvas = drawn(page).locator("canvas.lanes")
    canvas.wait_for()
    page.wait_for_timeout(500)  # until it has asked for its width
    canvas.focus()
    line.held = []
    page.get_by_test_id("stSidebar").get_by_role("link", name=title).evaluate("link => link.click()")
    canvas.press("w")
    while len(line.held) < 2:
        page.wait_for_timeout(20)
    line.let_go()
    page.wait_for_url(re.compile(f"/{title.lower()}"))
    page.get_by_test_id("stMain").get_by_role("heading", name=title, exact=True).wait_for()
    page.wait_for_timeout(500)  # in which a run of the page that was left would clear this one
    headings = drawn(page).get_by_test_id("stMain").get_by_test_id("stHeading").all_inner_texts()
    assert headings[0] == title
