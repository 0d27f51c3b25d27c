"""Experiments, as a user looks at them: from the list to the verdict, a metric, both arms, an address to send."""

import re

import pytest
from dashboard_server import served
from experiments import experiment, write_all
from test_timeline import Lanes
from watching import drawn, watched

from harness.text import MIB, size

BETTER = "PROBED: better"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("experiments")


@pytest.fixture(scope="module")
def address(browser, root, tmp_path_factory):
    """Of a server over an experiment of three arms and two of two."""
    write_all(experiment(root / "one", "PROBED=unset,a", "--repeats", "2"), captures=False)
    write_all(experiment(root / "three", "PROBED=unset,a,b c", "--repeats", "8"), slower=0.8)
    write_all(experiment(root / "growing", "PROBED=unset,a", "--repeats", "2"), captures=False)
    with served(root, tmp_path_factory.mktemp("cache")) as (address, _):
        yield address


def choose(page, label, option):
    box = drawn(page).get_by_test_id("stMain").get_by_role("combobox", name=label)
    box.focus()
    box.press("ArrowDown")
    page.get_by_role("option", name=option).click()


def test_from_the_list_to_both_arms_and_an_address_to_send(page, address, browser):
    page.goto(address)
    drawn(page).get_by_role("link", name="Open experiment growing").click()
    page.wait_for_url(re.compile("/ab.*experiment=growing"))
    drawn(page)
    choose(page, "Experiment", "three")
    page.wait_for_url(re.compile("experiment=three"))
    page.get_by_role("heading", name=BETTER).wait_for()
    drawn(page)
    assert "export PROBED=" in page.get_by_test_id("stCode").first.inner_text()
    choose(page, "Metric", "overlap_pct")
    page.wait_for_url(re.compile("metric=overlap_pct"))
    choose(page, "Arm, against unset", re.compile("^a$"))
    page.wait_for_url(re.compile("arm=a"))
    drawn(page)

    page.reload()
    lanes = Lanes(drawn(page))
    lanes.canvas.focus()
    start, end = lanes.do(lambda: page.keyboard.press("w"))
    page.wait_for_url(re.compile(f"range={start}-{end}"))
    assert "Timeline of unset, a" in lanes.canvas.get_attribute("aria-label")
    with watched(browser) as other:
        other.goto(page.url)
        drawn(other).get_by_role("heading", name=BETTER).wait_for()
        assert Lanes(other).view() == (start, end)

    page.get_by_test_id("stMain").get_by_role("radio", name="memory").click()
    page.wait_for_url(lambda url: "side=memory" in url and "range=" not in url)
    drawn(page).locator(f"canvas.lanes[aria-label*='a: active peak {size(300 * MIB)}']").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_have_words_and_fit_a_narrow_window(browser, address, scheme):
    with watched(browser, color_scheme=scheme) as page:
        page.set_viewport_size({"width": 420, "height": 900})
        page.goto(f"{address}/ab?experiment=three")
        drawn(page).get_by_role("heading", name=BETTER).wait_for()
        drawn(page)
        for words in (
            "step_wall_ns of the trials of each arm",
            "differences of the pairs",
            "in the order of the trials",
        ):
            chart = page.locator(f"[data-testid=stVegaLiteChart][aria-label*='{words}']")
            chart.wait_for()
            assert chart.bounding_box()["width"] < 420
        assert page.evaluate("document.documentElement.scrollWidth") <= 420


def test_an_experiment_is_followed_to_its_end(page, address, root):
    last = max((root / "growing" / "trials").iterdir())
    last.rename(root / ".aside")
    page.goto(f"{address}/ab?experiment=growing")
    page.get_by_role("heading", name="PROBED: not finished").wait_for()
    drawn(page)
    (root / ".aside").rename(last)
    page.get_by_role("heading", name="PROBED: inconclusive").wait_for()
    drawn(page)
