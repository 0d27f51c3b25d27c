"""What a user does: opens each page, filters, follows links, shares an address, goes back; and what the page shows."""

import json
import re

import pytest
from watching import RECORDED, drawn, watched

from dashboard.app import name_of, page_modules
from harness.report import build
from harness.text import quantity

ONE, OTHER = "h200x2_fsdp2", "h200x2_fsdp2_connections_1"
PAGES = [name_of(module) for module in page_modules()]
LANDING = PAGES[0]


def heading(page):
    return page.locator("[data-testid=stMain] [data-testid=stHeading]").first


@pytest.mark.parametrize("name", PAGES)
def test_every_page_opens_from_its_address(go, name):
    page = go(f"/{'' if name == LANDING else name}?run={ONE}")
    assert heading(page).inner_text()
    assert page.get_by_test_id("stAlert").filter(has_text="error").count() == 0


def test_figures_are_those_of_the_report(go):
    page = go(f"/overview?run={ONE}")
    metrics = json.loads(json.dumps(build(RECORDED / ONE).to_json()))["metrics"]
    shown = page.get_by_test_id("stMetricValue").all_inner_texts()
    for name in ("step_wall_ns", "tokens_per_s", "peak_allocated_bytes", "peak_reserved_bytes", "overlap_pct"):
        assert quantity(name, metrics[name]) in shown


def test_filter_is_in_the_address(go):
    page = go("/")
    page.get_by_label("Filter").fill("connections_1")
    page.get_by_label("Filter").press("Enter")
    page.get_by_text(re.compile("^1 run of ")).wait_for()
    page.wait_for_url(re.compile("q=connections_1"))
    shared = page.url
    go(shared.removeprefix(re.match(r"https?://[^/]+", shared)[0]))
    assert page.get_by_label("Filter").input_value() == "connections_1"
    page.get_by_text(re.compile("^1 run of ")).wait_for()


def test_finding_leads_to_its_place_and_back(go):
    page = go(f"/overview?run={OTHER}")
    page.get_by_test_id("stMain").get_by_role("link", name="Show in Overlap").first.click()
    page.wait_for_url(re.compile("/overlap"))
    drawn(page)
    assert heading(page).inner_text() == "Overlap"
    page.wait_for_url(re.compile(f"run={OTHER}"))
    page.go_back()
    page.get_by_text("Findings", exact=True).wait_for()
    assert heading(page).inner_text() == OTHER


def test_choice_of_a_page_does_not_break_the_next(go):
    """Pages share names of choices in the address, with lists on one and a single value on another."""
    page = go(f"/overlap?run={ONE}&rank=1")
    for name in ("Ledger", "Overlap", "Ledger"):
        page.get_by_test_id("stSidebar").get_by_role("link", name=name).click()
        page.wait_for_url(re.compile(f"/{name.lower()}"))
        drawn(page)
        assert page.get_by_test_id("stException").all_inner_texts() == []


def test_sidebar_changes_the_recording_and_the_address(go):
    page = go(f"/overview?run={ONE}")
    page.get_by_test_id("stSidebar").get_by_role("combobox").click()
    page.get_by_role("option", name=OTHER, exact=True).click()
    page.wait_for_url(re.compile(f"run={OTHER}"))
    drawn(page)
    page.get_by_test_id("stHeading").filter(has_text=OTHER).wait_for()


def test_compare_of_two(go):
    page = go(f"/compare?a={ONE}&b={OTHER}")
    main = page.get_by_test_id("stMain")
    assert "inconclusive" in main.inner_text()
    assert f"meshscope compare {RECORDED / ONE} {RECORDED / OTHER}" in main.inner_text()


def test_address_that_leads_out_is_refused(go):
    page = go("/")
    page.goto(page.url.rstrip("/") + "/overview?run=../../README.md")
    page.get_by_text("only what is in that folder is shown").wait_for()


def test_trace_is_downloaded(go, address):
    page = go(f"/files?run={ONE}")
    link = page.get_by_role("link", name="Download trace").get_attribute("href")
    response = page.request.get(f"{address}{link}")
    assert response.headers["content-disposition"] == 'attachment; filename="rank0_trace.json.gz"'
    assert response.body() == (RECORDED / ONE / "profiling/traces/iteration_8/rank0_trace.json.gz").read_bytes()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_follows_the_systems_colours(browser, address, scheme):
    with watched(browser, color_scheme=scheme) as page:
        page.goto(f"{address}/overview?run={ONE}")
        drawn(page)
        colour = page.get_by_test_id("stApp").evaluate("element => getComputedStyle(element).backgroundColor")
        bright = sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 3
        assert (bright > 127) == (scheme == "light")


def test_keyboard_reaches_a_page(go):
    page = go(f"/?run={ONE}")
    page.get_by_test_id("stSidebar").get_by_role("link", name="Overview").focus()
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/overview"))
    drawn(page)
    assert heading(page).inner_text() == ONE
