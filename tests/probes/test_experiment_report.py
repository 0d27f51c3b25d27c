"""`meshscope report` of an experiment's folder, and its page: the figures of --json, and every state explained."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from experiments import experiment, write_all, write_trial
from html_page import Page, loads
from written import MIB, write_kernels, write_snapshot

from harness import recording
from harness.cli import main
from harness.commands import probe
from harness.compare import measure
from probes.report.data import (
    aligned_lanes,
    aligned_memory,
    differing,
    distributions,
    measure_middle,
    middle_trials,
    paired_differences,
    run_order,
    step_traces,
)
from probes.report.reading import read_analysis, read_experiment

NOTHING = ("-c", "raise SystemExit('a trial was started')")
HOSTILE = "<script>alert(1)</script>"


def report(directory: Path, capsys, *, code: int = 0) -> tuple[dict, Page, str]:
    """What --json says, the page, and what went to stderr."""
    page = directory.with_suffix(".html")
    assert main(["report", str(directory), "--json", "--html", str(page)]) == code
    said = capsys.readouterr()
    text = page.read_text()
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in loads(text))
    found = Page(text)
    assert found.open == []
    assert len(found.ids()) == len(set(found.ids()))
    return json.loads(said.out), found, said.err


def test_recomputed_analysis_is_what_the_command_said(tmp_path, capsys):
    planned = experiment(tmp_path / "out", "PROBED=unset,a", "--repeats", "6")
    write_all(planned, slower=1.2)
    probe.perform(planned, ["PROBED: said of the build"], NOTHING)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))

    said, _, _ = report(tmp_path / "out", capsys)

    assert said == json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert said["verdict"] == "worse"
    assert said["notes"][0] == "PROBED: said of the build"
    assert read_experiment(tmp_path / "out").to_json() == json.loads((tmp_path / "out" / "experiment.json").read_text())
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.suffix != ".html") == before


def test_figures_are_those_of_json(tmp_path, capsys):
    planned = experiment(tmp_path / "out", "PROBED=unset,a,b", "--repeats", "8")
    write_all(planned, slower=0.5)
    probe.perform(planned, [], NOTHING)

    said, found, _ = report(tmp_path / "out", capsys)

    assert {item["metric"] for item in said["metrics"]} >= {"step_wall_ns", "peak_allocated_bytes", "overlap_pct"}
    for name in ("a", "b", "effect", "ci_low", "ci_high", "threshold", "p_value", "sign_flip_p"):
        assert found.figures(name) == [item[name] for item in said["metrics"]], name
    for shown, name in (("pair_a", "a"), ("pair_b", "b"), ("difference", "difference")):
        assert sorted(found.figures(shown)) == sorted(pair[name] for pair in said["pairs"]), name
        assert len(said["pairs"]) == 8 * len(said["metrics"])
    for metric in ("step_wall_ns", "exposed_ns", "overlap_pct"):
        assert found.figures(f"trial_{metric}") == [trial["values"][metric] for trial in said["trials"]], metric
    assert said["recommended"]["arm"] in ("a", "b")
    assert f"export PROBED={said['recommended']['arm']}" in found.text
    assert "step_wall_ns, which decides" in found.text
    for what in ("a beside unset", "b beside unset", "Trials", "Provenance", "mode cpu"):
        assert what in found.text
    assert "Not in this report" not in found.text
    pictures = [attributes for name, attributes in found.elements if name == "svg" and attributes.get("role") == "img"]
    # step_wall_ns; every step; memory and lanes of two comparisons: all else is exact
    assert len(pictures) == 6
    assert all(picture["aria-label"] for picture in pictures)
    assert all(caption in found.text for caption in ("times are not a cluster's.", "mode cpu"))


def test_a_page_of_an_a_a_says_what_the_rig_can_see(tmp_path, capsys):
    planned = experiment(tmp_path / "out", "PROBED=a,a", "--repeats", "2")
    write_all(planned, captures=False)

    said, found, _ = report(tmp_path / "out", capsys)

    assert found.figures("sees_pct") == list(said["sees_pct"].values())
    assert "Not in this report" in found.text
    assert "One step side by side: no step of one rank is traced whole in two arms" in found.text


def test_interrupted_experiment_shows_figures_and_draws_no_verdict(tmp_path, capsys):
    planned = experiment(tmp_path / "out", "PROBED=unset,a", "--repeats", "8")
    write_all(planned, slower=1.2, captures=False)
    for trial in planned.order()[13:]:
        shutil.rmtree(planned.trial_directory(trial))
    recording.write_status(planned.trial_directory(planned.order()[12]), "running")

    said, found, err = report(tmp_path / "out", capsys, code=4)

    assert said["verdict"] == "inconclusive"
    assert said["comparisons"][0]["reason"] == "12 of 16 trials have ended: the verdict comes with the last"
    assert said["recommended"] is None
    assert [item["n_pairs"] for item in said["metrics"]] == [6] * len(said["metrics"])
    assert [item["index"] for item in said["unfinished"]] == [12, 13, 14, 15]
    for text in (found.text, err):
        assert f"12 of 16 trials ended; the command that began it goes on with --out {tmp_path / 'out'}" in text
        assert "it is running" in text
        assert "3 trials not begun: 13–15" in text
    assert "not ended" in found.text


def test_experiment_without_a_trial_says_so(tmp_path, capsys):
    experiment(tmp_path / "out", "PROBED=unset,a", "--repeats", "2")

    said, found, err = report(tmp_path / "out", capsys, code=3)

    assert said["trials"] == []
    assert "0 of 4 trials ended" in err
    assert "0 of 4 trials ended" in found.text
    assert "Metrics: fewer than two pairs have ended" in found.text


def test_voided_and_given_up_pairs_are_told(tmp_path, capsys):
    planned = experiment(tmp_path / "out", "PROBED=unset,a", "--repeats", "3")
    write_all(planned, captures=False)
    first, second, *_ = planned.order()
    for trial in (first, second):
        directory = planned.trial_directory(trial)
        shutil.copytree(directory, directory.with_name(f"{directory.name}.void1"))
    void = planned.trial_directory(second)
    recording.write_status(void.with_name(f"{void.name}.void1"), "invalid", "another process uses GPU 0")
    for number in (1, 2):  # the last pair was void three times
        last = planned.trial_directory(planned.order()[-1])
        shutil.copytree(last, last.with_name(f"{last.name}.void{number}"))
    recording.write_status(last, "invalid", "GPU 0 was slowed down: hardware slowdown")

    said, found, _ = report(tmp_path / "out", capsys)

    assert [item["pair"] for item in said["dropped"]] == [2]
    states = [(row.index, row.number, row.state) for row in run_order(read_analysis(tmp_path / "out"))]
    assert states[:4] == [(0, 0, "void"), (0, 1, "valid"), (1, 0, "void"), (1, 1, "valid")]
    assert states[-4:] == [(4, 0, "given up"), (5, 0, "void"), (5, 1, "void"), (5, 2, "given up")]
    assert "another process uses GPU 0" in found.text
    assert "slowed down: hardware slowdown" in found.text
    assert "0, run 2" in found.text


def test_arms_that_differ_in_something_undeclared_are_refused_here_too(tmp_path, capsys):
    planned = experiment(tmp_path / "out", "PROBED=unset,a", "--repeats", "2")
    write_all(planned, captures=False)
    write_trial(planned, 3, environment={"OMP_NUM_THREADS": "7"})

    said, found, _ = report(tmp_path / "out", capsys, code=3)

    assert not said["comparable"]
    assert "The arms are not comparable" in found.text
    assert "environment OMP_NUM_THREADS of rank 0 is '7'" in found.text


def test_strangers_words_are_text(tmp_path, capsys, recwarn):
    planned = experiment(tmp_path / "out", f"PROBED=unset,{HOSTILE}\x1b[31m\u202e")
    write_all(planned, slower=0.8)

    _, found, _ = report(tmp_path / "out", capsys)

    assert HOSTILE in found.text
    assert "\x1b" not in found.text
    assert "\u202e" not in found.text
    assert not recwarn.list


def test_verdict_known_without_a_trial_has_a_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["probe", "max_connections", "--mode", "cpu", "--html", "page.html", "--config", "single"]

    assert main(words) == 5

    said, found = capsys.readouterr().out, Page((tmp_path / "page.html").read_text())
    assert said.startswith("unavailable in this build: max_connections")
    assert "max_connections: unavailable in this build" in found.text
    assert "libcuda: torch is a CPU build" in found.text or "on CPUs nothing reads it" in found.text
    assert "no trial was needed" in found.text


@pytest.mark.parametrize("place", ["/", "folder", "file/page.html"])
def test_page_that_cannot_be_written_is_said_before_a_trial(tmp_path, capsys, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()

    assert main(["probe", "threads", "--mode", "cpu", "--html", str(tmp_path / place)]) == 2

    assert "no file can be written there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema_version": 99}, "has schema_version 99; this meshscope reads up to 1: update it"),
        ({"arms": "none"}, "is not the plan of an experiment"),
        ({"arms": []}, "it has no arm to run"),
        ({"pairs": 10**9}, "1000000000 pairs, 10,000 at most"),
        ({"deep": "DEEP"}, "is nested too deeply to be read"),
        ({"config": {"world_size": "many"}}, "is not the plan of an experiment"),
    ],
)
def test_plan_that_is_none_is_one_line(tmp_path, capsys, change, reason):
    planned = experiment(tmp_path, "PROBED=unset,a")
    text = json.dumps({**planned.to_json(), **change})
    (tmp_path / "experiment.json").write_text(text.replace('"DEEP"', "[" * 5000 + "]" * 5000))

    assert main(["report", str(tmp_path)]) == 3

    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert "experiment.json" in line


@pytest.mark.parametrize("option", ["--unit", "--parameter"])
def test_an_experiment_has_no_unit_to_follow(tmp_path, capsys, option):
    experiment(tmp_path, "PROBED=unset,a")
    assert main(["report", str(tmp_path), option, "layers.1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{option} layers.1: {tmp_path} is an experiment; name one recording" in line


@pytest.mark.parametrize("samples", [7, ["x"], [{"unix_ns": 1}], [{"unix_ns": 1, "gpus": [{"index": 0}]}]])
def test_trial_with_garbled_surroundings_is_named_and_not_counted(tmp_path, capsys, samples):
    planned = experiment(tmp_path, "PROBED=unset,a", "--repeats", "2")
    write_all(planned, captures=False)
    garbled = planned.trial_directory(planned.order()[0]) / "surroundings.json"
    recording.write_json(garbled, {"reason": None, "samples": samples})

    assert main(["report", str(tmp_path), "--json"]) == 4

    said = capsys.readouterr()
    assert f"{garbled}: is not what a probe saw of its GPUs" in said.err
    assert 0 not in [trial["index"] for trial in json.loads(said.out)["trials"]]


def test_report_needs_no_torch(tmp_path):
    planned = experiment(tmp_path / "out", "PROBED=unset,a", "--repeats", "2")
    write_all(planned)
    program = "import sys; sys.modules['torch'] = None; from harness.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["report", str(tmp_path / "out"), "--html", str(tmp_path / "page.html")]
    environment = {**os.environ, "PYTHONPATH": str(Path(probe.__file__).parents[2])}

    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=environment)

    assert done.returncode == 0, done.stderr
    assert "PROBED, mode cpu, single" in done.stdout


def test_data_behind_the_pictures(tmp_path):
    planned = experiment(tmp_path, "PROBED=unset,a", "--repeats", "3")
    write_all(planned, slower=1.5)
    analysis = read_analysis(tmp_path)
    order = planned.order()

    walls = next(item for item in distributions(analysis) if (item.metric, item.arm) == ("step_wall_ns", "a"))
    assert [point.index for point in walls.points] == [trial.index for trial in order if trial.arm == "a"]
    (wall,) = [item for item in paired_differences(analysis) if item.metric == "step_wall_ns"]
    assert wall.comparison.metric == "step_wall_ns"
    for pair in wall.pairs:
        assert pair.difference == pytest.approx(100 * (pair.b / pair.a - 1))
    traces = step_traces(analysis)
    assert [trace.index for trace in traces] == [trial.index for trial in order]
    assert traces[0].plain == [False, True, True, True]
    # the slope over the session is the drift, so the median of three is the arm's second trial
    assert {arm: trial.index for arm, trial in middle_trials(analysis).items()} == {
        arm: [trial.index for trial in order if trial.arm == arm][1] for arm in ("unset", "a")
    }

    runs = measure_middle(analysis)
    assert [(item.what, item.values, item.declared) for item in differing(planned, runs)] == [
        ("PROBED", {"unset": None, "a": "a"}, True)
    ]
    lanes = aligned_lanes(runs)
    assert lanes is not None
    # 4050 + 100 µs × (1 + rank + place) from the all-reduce's start, the first kernel at 100: rank 1 exposes more
    assert (lanes.rank, lanes.step) == (1, 3)
    assert {arm: picture.span_ns for arm, picture in lanes.pictures.items()} == {"unset": 4_150_000, "a": 4_250_000}
    assert lanes.span_ns == 4_250_000
    history = aligned_memory(runs)
    assert history is not None
    assert (history.rank, history.device) == (0, 0)
    peaks = {arm: timeline.peak("active").bytes for arm, timeline in history.timelines.items()}
    assert peaks == {"unset": 200 * MIB, "a": 300 * MIB}
    assert history.top_bytes == 400 * MIB, "reserved, of the arm that stacks"


def test_what_only_one_run_has_is_not_drawn_beside_nothing(tmp_path):
    for name, rank in (("one", 0), ("two", 1)):
        write_kernels(tmp_path / name / f"rank{rank}_trace.json.gz", [("gemm", None, 7, 100, 4000)], rank=rank)
        write_snapshot(tmp_path / name / f"rank{rank}_snapshot.pickle")
    runs = {name: measure(tmp_path / name) for name in ("one", "two")}

    assert aligned_lanes(runs) is None
    assert aligned_memory(runs) is None
    assert aligned_lanes({}) is None


@pytest.mark.shared_data
def test_real_steps_side_by_side(recordings):
    """FSDP2 on two H200s: with one connection communication is exposed, and both pictures share an axis."""
    runs = {name: measure(recordings / f"h200x2_fsdp2_connections_{name}") for name in ("unset", "1")}

    lanes = aligned_lanes(runs)

    assert lanes is not None
    exposed = {arm: picture.lanes[-1].exposed_ns for arm, picture in lanes.pictures.items()}
    assert all(picture.lanes[-1].kind == "exposed" for picture in lanes.pictures.values())
    assert exposed["1"] > 2 * exposed["unset"]
    assert lanes.span_ns == max(picture.span_ns for picture in lanes.pictures.values())
