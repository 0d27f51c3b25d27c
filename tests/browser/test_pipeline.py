"""The Pipeline page in a real browser: drawn with words for who does not see it, and no part of it twice."""

import re

from dashboard_server import served
from watching import drawn, watched
from written import write_pipeline


def test_schedule_is_drawn_once_and_again_after_another_page(browser, tmp_path):
    write_pipeline(tmp_path / "runs" / "pipelines")
    with (
        served(tmp_path / "runs", tmp_path / "cache") as (address, _),
        watched(browser) as page,
    ):
        page.goto(f"{address}/pipeline?run=pipelines&rank=0&rank=2&step=1")
        drawn(page)
        page.get_by_label(re.compile("Measured schedule of step 1")).first.wait_for()
        page.get_by_test_id("stSidebar").get_by_role("link", name="Ledger").click()
        page.wait_for_url(re.compile("/ledger"))
        drawn(page)
        page.get_by_test_id("stSidebar").get_by_role("link", name="Pipeline").click()
        page.wait_for_url(re.compile("/pipeline"))
        drawn(page)
        page.get_by_label(re.compile("Measured schedule of step")).first.wait_for()
        headings = page.get_by_test_id("stMain").get_by_test_id("stHeading").all_inner_texts()
        assert [name for name in headings if name in ("Pipeline", "Planned")] == ["Pipeline", "Planned"]
