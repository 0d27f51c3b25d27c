"""The page of A/B over experiments in every state that one can be in, and its figures against the command's."""

import json
import os
import shutil

import pytest
from experiments import experiment, write_all, write_trial
from test_pages import healthy, table_with, text_of
from written import MIB

from dashboard.app import name_of, page_modules
from harness import recording
from harness.cli import main
from harness.compare.metrics import METRICS
from harness.text import quantity
from probes.report.data import aligned_lanes, aligned_memory, measure_middle
from probes.report.reading import read_analysis

RUN_PAGES = [name_of(module) for module in page_modules() if module.ABOUT == "run"]
ALIVE = {"launcher": {"host": os.uname().nodename, "pid": os.getpid()}}
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Three arms, of which two are better, with a trace and a history in every trial."""
    root = tmp_path_factory.mktemp("experiments")
    planned = experiment(root / "done", "PROBED=unset,a,b c", "--repeats", "8")
    write_all(planned, slower=0.8)
    return root


def figures(root, name, capsys, code=0):
    """What `meshscope report --json` says."""
    assert main(["report", str(root / name), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def as_rows(table):
    return table.astype(object).where(table.notna(), None).to_dict("records")


def without_captures(root, *words, **how):
    planned = experiment(root / "probe", *words)
    write_all(planned, captures=False, **how)
    return planned


def pictures(app):
    return [element.proto for element in app.main.get("vega_lite_chart")]


def test_figures_are_those_of_the_command(open_page, finished, capsys):
    said = figures(finished, "done", capsys)
    app = healthy(open_page(finished, "ab", experiment="done", arm="a"))

    text = text_of(app)
    assert app.header[0].value == "PROBED: better"
    assert "a against unset" in text.replace("**", "")
    for item in said["comparisons"]:
        (metric,) = [one for one in said["metrics"] if (one["arm"], one["metric"]) == (item["arm"], "step_wall_ns")]
        figure = quantity("step_wall_ns", metric["b"])
        assert f"In arm {item['arm']} the time of a step is {figure}" in text
    shown = table_with(app, "metric", "effect").set_index("metric")
    mine = {metric["metric"]: metric for metric in said["metrics"] if metric["arm"] == "a"}
    assert {name.removesuffix(" (decides)") for name in shown.index} == set(mine)
    for name, metric in mine.items():
        row = shown.loc[name + " (decides)" * (name == "step_wall_ns")]
        assert (row["a"], row["b"]) == (quantity(name, metric["a"]), quantity(name, metric["b"]))
        assert row["verdict"].endswith(metric["verdict"])

    pairs = [one.value for one in app.dataframe if "difference_pct" in one.value]
    raw = [
        [(row["pair"], row["a_step_wall_ns"], row["b_step_wall_ns"], row["difference_pct"]) for row in as_rows(table)]
        for table in pairs
    ]
    assert raw == [
        [
            (pair["pair"], pair["a"], pair["b"], pair["difference"])
            for pair in said["pairs"]
            if (pair["arm"], pair["metric"]) == (arm, "step_wall_ns")
        ]
        for arm in ("a", "b c")
    ]
    rows = as_rows(table_with(app, "trial", "state", "step_wall_ns"))
    for row, trial in zip(rows, said["trials"], strict=True):
        assert {name: row.get(name) for name in trial["values"]} == trial["values"]
    assert f"meshscope report {finished / 'done'}" in text


def test_recommended_setting_is_ready_for_a_shell(open_page, finished, capsys):
    said = figures(finished, "done", capsys)
    app = healthy(open_page(finished, "ab", experiment="done"))

    best = said["recommended"]["arm"]
    assert app.code[0].value == {"a": "export PROBED=a", "b c": "export PROBED='b c'"}[best]
    assert f"{best} is better than unset (step_wall_ns" in text_of(app)
    assert app.selectbox(key="arm").value == best


def test_every_picture_has_words_a_table_and_its_mode(open_page, finished):
    app = healthy(open_page(finished, "ab", experiment="done"))

    words = [picture.alt for picture in pictures(app)]
    assert [word.partition(":")[0].partition(" of ")[0] for word in words] == [
        "step_wall_ns",
        "step_wall_ns",
        "step_wall_ns in the order",
        "Time",
    ]
    modes = [caption.value for caption in app.caption if "Mode cpu: times are not a cluster's." in caption.value]
    assert len(modes) == 6, "setting, comparisons, metric, side by side, steps, trials"
    table_with(app, "step", "trial0_ns")


def test_arms_are_aligned_as_the_report_aligns_them(open_page, finished):
    analysis = read_analysis(finished / "done")
    runs = {arm: run for arm, run in measure_middle(analysis).items() if arm in ("unset", "a")}
    lanes, memory = aligned_lanes(runs), aligned_memory(runs)

    app = healthy(open_page(finished, "ab", experiment="done", arm="a"))
    assert app.selectbox(key="moment").value == f"step {lanes.step} of rank {lanes.rank}"
    table = table_with(app, "arm", "span_ns").set_index("arm")
    for arm, picture in lanes.pictures.items():
        assert table.loc[arm, "span_ns"] == picture.span_ns
        assert table.loc[arm, "exposed_ns"] == picture.lanes[-1].exposed_ns
    view = table_with(app, "group", "lane", "busy_ns")
    assert view["group"].drop_duplicates().tolist() == ["unset", "a"]
    assert view["lane"].tolist() == ["compute", "mesh_dp all_reduce", "exposed"] * 2

    app = healthy(open_page(finished, "ab", experiment="done", arm="a", side="memory"))
    assert app.selectbox(key="history").value == f"rank {memory.rank}, device {memory.device}"
    table = table_with(app, "arm", "peak_active_bytes", "max_pending_bytes").set_index("arm")
    for arm, timeline in memory.timelines.items():
        assert table.loc[arm, "peak_active_bytes"] == timeline.peak("active").bytes
    assert table["peak_active_bytes"].tolist() == [200 * MIB, 300 * MIB]
    assert table["blocks"].tolist() == [0, 1]


def test_choices_are_in_the_url_and_what_it_cannot_mean_is_left_out(open_page, finished):
    app = healthy(open_page(finished, "ab", experiment="done", arm="b c", metric="overlap_pct", side="memory"))
    chosen = [app.selectbox(key=key).value for key in ("experiment", "arm", "metric")]
    assert chosen == ["done", "b c", "overlap_pct"]
    assert table_with(app, "pair", "difference_points")["pair"].tolist() == list(range(8))

    app = healthy(open_page(finished, "ab", experiment="done", arm="none such", metric="tokens_per_s", side="x"))
    assert app.selectbox(key="metric").value == "step_wall_ns"


def test_only_what_arms_differ_in_is_listed(open_page, finished):
    app = healthy(open_page(finished, "ab", experiment="done"))
    assert as_rows(table_with(app, "what", "arm0")) == [
        {"what": "PROBED", "arm0": "unset", "arm1": "a", "arm2": "b c", "declared": "set by the arms"}
    ]


def test_runs_leads_here_and_run_pages_say_where_an_experiment_is(open_page, finished):
    app = healthy(open_page(finished))
    (link,) = [element.proto for element in app.main.get("page_link") if element.proto.page == "ab"]
    assert "experiment=done" in link.query_string
    app = healthy(open_page(finished, "overview", run="done/trials/00-a"))
    assert [element.proto.label for element in app.main.get("page_link") if element.proto.page == "ab"]
    for page in RUN_PAGES:
        app = healthy(open_page(finished, page, run="done"))
        assert [error.value for error in app.error if "the page A/B shows it" in error.value.replace("\\", "")]
    app = healthy(open_page(finished, "compare", a="done", b="done/trials/00-a"))
    assert len(app.error) == 1


def test_what_is_no_experiment_is_said(open_page, tmp_path):
    app = healthy(open_page(tmp_path, "ab"))
    assert app.code[0].value.startswith("meshscope probe")
    (tmp_path / "other").mkdir()
    for name, why in (("other", "is no experiment"), ("../..", "leads out of"), ("none", "is not in")):
        app = healthy(open_page(tmp_path, "ab", experiment=name))
        (error,) = app.error
        assert why in error.value.replace("\\", "")


@pytest.mark.parametrize(("change", "why"), [({"schema_version": 99}, "99"), ({"arms": "none"}, "is not the plan")])
def test_broken_plan_is_one_error(open_page, tmp_path, change, why):
    planned = experiment(tmp_path / "probe", "PROBED=unset,a")
    recording.write_json(tmp_path / "probe" / "experiment.json", {**planned.to_json(), **change})
    app = healthy(open_page(tmp_path, "ab", experiment="probe"))
    (error,) = app.error
    assert why in error.value


def test_interrupted_experiment_draws_no_verdict_until_it_ends(open_page, tmp_path, capsys):
    planned = without_captures(tmp_path, "PROBED=unset,a", "--repeats", "3", slower=0.5)
    last = planned.trial_directory(planned.order()[-1])
    going_on = planned.trial_directory(planned.order()[-2])
    aside = tmp_path.parent / f"{tmp_path.name}-aside"
    last.rename(aside)
    recording.merge_manifest(going_on, ALIVE)
    recording.write_status(going_on, "running")

    app = healthy(open_page(tmp_path, "ab", experiment="probe"))
    said = text_of(app)
    assert app.header[0].value == "PROBED: not finished"
    assert "4 of 6 trials have ended: the verdict comes with the last" in said
    assert "No verdict is drawn from them" in said
    assert "verdict" not in table_with(app, "metric", "effect")
    assert "better" not in said
    assert f"{going_on.name} is running: 4 steps so far" in said
    assert "To use it" not in [heading.value for heading in app.subheader]
    states = [row["state"] for row in as_rows(table_with(app, "trial", "state"))]
    assert states == ["✓ valid"] * 4 + ["◐ not ended"] * 2

    recording.merge_manifest(going_on, {"launcher": {"host": os.uname().nodename, "pid": 2**22 + 1}})
    said = text_of(healthy(open_page(tmp_path, "ab", experiment="probe")))
    assert f"✗ {going_on.name}:" in said

    recording.write_status(going_on, "complete")
    aside.rename(last)
    app = healthy(app.run())
    verdict = figures(tmp_path, "probe", capsys)["verdict"]
    assert app.header[0].value == f"PROBED: {verdict}"
    assert "not finished" not in text_of(app)


def test_experiment_without_a_trial(open_page, tmp_path):
    experiment(tmp_path / "probe", "PROBED=unset,a", "--repeats", "2")
    said = text_of(healthy(open_page(tmp_path, "ab", experiment="probe")))
    assert "0 of 4 trials ended" in said
    assert "need a valid trial" in said


def test_void_and_given_up_trials_are_told(open_page, tmp_path):
    planned = without_captures(tmp_path, "PROBED=unset,a", "--repeats", "2")
    first, second, *_, last = (planned.trial_directory(trial) for trial in planned.order())
    for folder in (first, second):
        shutil.copytree(folder, folder.with_name(f"{folder.name}.void1"))
    recording.write_status(second.with_name(f"{second.name}.void1"), "invalid", "another process uses GPU 0")
    for number in (1, 2):
        shutil.copytree(last, last.with_name(f"{last.name}.void{number}"))
    recording.write_status(last, "invalid", "GPU 0 was slowed down")

    app = healthy(open_page(tmp_path, "ab", experiment="probe"))
    rows = as_rows(table_with(app, "trial", "state", "reason"))
    told = {(row["trial"], row["state"]): row["reason"] for row in rows}
    assert told["1", "✕ void, ran again"] == "another process uses GPU 0"
    assert told["1, run 2", "✓ valid"] is None
    assert "GPU 0 was slowed down" in told["3, run 3", "✕ pair given up"]
    assert "a pair was given up" in text_of(app)


def test_verdict_that_was_known_without_a_trial(open_page, tmp_path):
    planned = without_captures(tmp_path, "PROBED=unset,a,b", "--repeats", "2")
    known = {"verdict": "ignored by this build", "reason": "the library does not read b"}
    plan = {**planned.to_json(), "not_run": {"b": known}}
    shutil.rmtree(tmp_path / "probe" / "trials")
    recording.write_json(tmp_path / "probe" / "experiment.json", plan)

    app = healthy(open_page(tmp_path, "ab", experiment="probe"))
    said = text_of(app)
    assert "∅ ignored by this build" in said
    assert "b: ignored by this build, known without a trial: the library does not read b" in said


def test_rehearsal_shows_memory_and_no_overlap(open_page, tmp_path):
    planned = without_captures(tmp_path, "PROBED=unset,a", "--repeats", "2")
    plan = {**planned.to_json(), "mode": "rehearsal", "primary": "peak_allocated_bytes"}
    recording.write_json(tmp_path / "probe" / "experiment.json", plan)
    for trial in planned.order():
        recording.merge_manifest(planned.trial_directory(trial), {"mode": "rehearsal"})

    app = healthy(open_page(tmp_path, "ab", experiment="probe", side="lanes"))
    said = text_of(app)
    assert "mode rehearsal" in said
    assert "nothing was communicated" in said
    assert all(name.endswith("_bytes") for name in app.selectbox(key="metric").options if name in METRICS)
    assert "step_wall_ns" not in table_with(app, "trial", "state")


def test_a_a_says_what_can_be_seen(open_page, tmp_path, capsys):
    without_captures(tmp_path, "PROBED=a,a", "--repeats", "2")
    app = healthy(open_page(tmp_path, "ab", experiment="probe", side="memory"))
    table = table_with(app, "metric", "change_pct").set_index("metric")["change_pct"]
    assert dict(table) == figures(tmp_path, "probe", capsys)["sees_pct"]
    assert "this is an A/A" in text_of(app)
    assert table_with(app, "step", "arm0_bytes")["arm0_bytes"].tolist() == [5 * MIB] * 4


def test_arms_that_cannot_be_compared_are_refused_here_too(open_page, tmp_path):
    planned = without_captures(tmp_path, f"PROBED=unset,{HOSTILE}", "--repeats", "2")
    write_trial(planned, 3, environment={"OMP_NUM_THREADS": "7"})
    app = healthy(open_page(tmp_path, "ab", experiment="probe"))
    assert "OMP_NUM_THREADS" in app.error[0].value.replace("\\", "")
    assert "✗ not comparable" in text_of(app)
    assert HOSTILE not in "\n".join(element.value for kind in (app.markdown, app.caption) for element in kind)


def test_hardware_queues_of_the_arms(open_page, tmp_path, capsys):
    planned = without_captures(tmp_path, "CUDA_DEVICE_MAX_CONNECTIONS=1,8", "--repeats", "2")
    recording.write_json(tmp_path / "probe" / "experiment.json", {**planned.to_json(), "gpus": 1})
    (tmp_path / "probe" / "queues").mkdir()
    for arm, queues in (("1", 1), ("8", 8)):
        recording.write_json(tmp_path / "probe" / "queues" / f"{arm}.json", measured_queues(arm, queues))
    found = figures(tmp_path, "probe", capsys)["queues"]

    app = healthy(open_page(tmp_path, "ab", experiment="probe"))
    said = text_of(app)
    assert all(finding in said for finding in found["findings"])
    assert table_with(app, "arm", "count", "rounds")["count"].tolist() == [str(arm["count"]) for arm in found["arms"]]
    latencies = as_rows(table_with(app, "streams", "latency_ns"))
    assert {(row["arm"], str(row["streams"])): row["latency_ns"] for row in latencies} == {
        (arm["arm"], streams): ns for arm in found["arms"] for streams, ns in arm["latency_ns"].items()
    }


def measured_queues(arm, queues):
    """A context in which work beside as many streams as there are queues is held up until they are released."""
    latencies = [
        {"streams": k, "released_ns": 5_000_000, "ended_ns": 5_100_000 if k > queues else 700_000, "in_time": True}
        for k in range(2, 49)
    ]
    controls = [{"others": 96, "late": 96 if queues == 1 else 0, "in_time": True}]
    rounds = [{"latencies": latencies, "controls": controls}] * 3
    about = {"setting": arm, "device": "NVIDIA H200", "streams": 48, "rounds": rounds, "phase": "complete"}
    return about | {"arm": arm, "under_mps": False, "seconds": 5.0}
