"""Every page, in every state that a recording can be in."""

import pytest


@pytest.mark.shared_data
def test_overview_of_a_chosen_run(open_page, recordings):
    app = open_page(recordings, "overview", run="h200_fsdp4_tp2")

    assert not app.exception
    assert [title.value for title in app.title] == ["h200_fsdp4_tp2"]
