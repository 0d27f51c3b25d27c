"""The Pipeline page says what `meshscope report --json` says, also without traces, a plan or a pipeline."""

import json
import shutil
from pathlib import Path

import pytest
from test_pages import RECORDED, healthy, table_with, text_of
from written import write_pipeline

from dashboard import schedule
from harness import recording
from harness.report import build
from harness.report.pipeline import render

PAGE = "pipeline"


def report_of(path: Path):
    return json.loads(json.dumps(build(path).to_json()))


def charts_of(app):
    """Each chart's specification and its words."""
    return [(json.loads(e.proto.spec), e.proto.alt) for e in app.main.get("vega_lite_chart")]


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("pipelines") / "traced")


def test_figures_are_those_of_the_report(open_page, traced):
    app = healthy(open_page(traced.parent, PAGE, run="traced"))
    report = report_of(traced)
    pipeline = report["pipeline"]
    measured = sorted(
        (rank for one in pipeline["measured"] if one["step"] == 2 for rank in one["ranks"]), key=lambda r: r["rank"]
    )
    by_place = {rank["pipeline_rank"]: rank["bubble_pct"] for rank in pipeline["planned"]["ranks"]}

    shown = table_with(app, "rank", "planned_bubble_pct")
    assert shown["rank"].tolist() == [0, 1, 2, 3]
    for name in ("bubble_pct", "busy_ns", "span_ns", "pipeline_rank"):
        assert shown[name].tolist() == [rank[name] for rank in measured]
    assert shown["planned_bubble_pct"].tolist() == [by_place[0], by_place[0], by_place[1], by_place[1]]
    sent = table_with(app, "predicted_bytes", "measured_bytes")
    staged = [row for row in report["communication"] if "pipeline_rank" in row]
    assert sent["measured_bytes"].tolist() == [row["measured_bytes"] for row in staged]
    assert sent["predicted_count"].tolist() == [row["predicted_count"] for row in staged]
    receives = table_with(app, "rank", "kind", "exposed_ns")
    assert receives["comm_ns"].tolist() == [6_000_000] * 4
    said = text_of(app)
    assert "ZBVZeroBubble: 4 stages on 2 pipeline ranks, 4 micro-batches" in said
    assert "Host times of a CPU's trace" in said
    assert "\n".join(render(build(traced).pipeline)) in said


def test_grid_shows_every_action_and_the_idle_times_between(open_page, traced):
    app = healthy(open_page(traced.parent, PAGE, run="traced", step="1"))
    pipeline = report_of(traced)["pipeline"]
    ranks = {rank["rank"]: rank for one in pipeline["measured"] if one["step"] == 1 for rank in one["ranks"]}

    rows = table_with(app, "rank", "duration_ns")
    assert set(rows["rank"]) == set(ranks)
    for number, rank in ranks.items():
        own = rows[rows["rank"] == number]
        assert own[own["action"] != ""]["action"].tolist() == [item["action"] for item in rank["actions"]]
        assert own[own["action"] == ""]["duration_ns"].sum() == rank["span_ns"] - rank["busy_ns"] > 0
        assert own["duration_ns"].sum() == rank["span_ns"]
    assert set(rows["what"]) == {"forward (F)", "backward for inputs (I)", "backward for weights (W)", "idle"}
    first = rows[(rows["rank"] == 2) & (rows["action"] == "1F0")].iloc[0]
    assert (first["stage"], first["micro_batch"], first["needs"]) == (1, 0, "stage 0, pipeline rank 0")
    assert [words.split(":")[0] for _, words in charts_of(app)] == [
        "Planned schedule",
        "Measured schedule of step 1, host times",
    ]


def test_ranks_and_costs_are_in_the_address(open_page, traced):
    app = healthy(open_page(traced.parent, PAGE, run="traced", rank=["0", "2"], costs="measured"))
    expected = report_of(traced)["pipeline"]["expected"]["ranks"]

    assert table_with(app, "rank", "planned_bubble_pct")["rank"].tolist() == [0, 2]
    planned = next(e.value for e in app.dataframe if "duration_ns" in e.value and "rank" not in e.value)
    assert planned["duration_ns"].sum() == sum(rank["span_ns"] for rank in expected)
    (_, planned_words), (_, measured_words) = charts_of(app)
    assert "pipeline rank 1 idle" in planned_words
    assert "rank 2 (pp 1) idle" in measured_words
    assert "rank 1 " not in measured_words
    app.multiselect(key="rank").set_value([3]).run()
    assert table_with(healthy(app), "rank", "planned_bubble_pct")["rank"].tolist() == [3]


def test_without_a_trace_there_is_the_plan_alone(open_page, tmp_path):
    write_pipeline(tmp_path / "planned", traced=False)
    app = healthy(open_page(tmp_path, PAGE, run="planned"))
    planned = report_of(tmp_path / "planned")["pipeline"]["planned"]["ranks"]

    shown = table_with(app, "pipeline_rank", "planned_bubble_pct")
    assert shown["planned_bubble_pct"].tolist() == [rank["bubble_pct"] for rank in planned]
    assert len(charts_of(app)) == 1
    assert "No trace holds a whole step" in text_of(app)


def test_traces_of_another_trainer_have_no_plan(open_page, traced, tmp_path):
    shutil.copytree(recording.trace_path(traced, 3, 0).parent, tmp_path / "foreign")
    app = healthy(open_page(tmp_path, PAGE, run="foreign"))

    assert len(charts_of(app)) == 1
    measured = report_of(tmp_path / "foreign")["pipeline"]["measured"]
    shown = table_with(app, "rank", "planned_bubble_pct")
    assert shown["bubble_pct"].tolist() == [
        r["bubble_pct"] for one in measured if one["step"] == 2 for r in one["ranks"]
    ]
    assert "states no configuration" in text_of(app)


def test_a_rank_without_its_trace_keeps_its_plan(open_page, traced, tmp_path):
    shutil.copytree(traced, tmp_path / "partial")
    for rank in (2, 3):
        recording.trace_path(tmp_path / "partial", 3, rank).unlink()
    app = healthy(open_page(tmp_path, PAGE, run="partial"))

    shown = table_with(app, "rank", "planned_bubble_pct")
    assert shown["pipeline_rank"].tolist() == [0, 0, 1]
    assert shown["planned_bubble_pct"].notna().all()


def test_a_run_without_a_pipeline_says_so(open_page):
    app = healthy(open_page(RECORDED, PAGE, run="h200x2_fsdp2"))

    assert [info.value.replace("\\", "") for info in app.info] == [
        "No pipeline: the run has no parallelism.pp above 1, and no trace names actions of one."
    ]
    assert not charts_of(app)


def test_labels_say_what_fits():
    row = {"action": "0F12", "micro_batch": 12}
    assert [schedule.fitting(row, pixels) for pixels in (28, 27, 14, 13)] == ["0F12", "12", "12", ""]
