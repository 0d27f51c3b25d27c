"""From what trials left on disk to what is said of them; a trial that is complete there is not run again."""

import re
from dataclasses import replace

import pytest
from experiments import arguments, experiment, write_trial

from harness import recording
from harness.commands import probe
from harness.errors import UsageError
from harness.variables import Library
from probes import liveness
from probes.experiment import order
from probes.knobs import KNOBS, find_knob
from probes.liveness import Build, dead, same_settings
from probes.reduce import COMPARED
from probes.text import render
from probes.validity import RefusedError, judge

NOTHING = ("-c", "raise SystemExit('a trial was started')")


def perform(planned):
    return probe.perform(planned, [], NOTHING)


def of_arm(planned, arm: str) -> list[int]:
    return [trial.index for trial in planned.order() if trial.arm == arm]


def judged(planned, index: int, **options):
    directory = write_trial(planned, index, **options)
    return judge(planned, planned.order()[index], directory)


def test_faster_arm_is_better_and_its_setting_can_be_pasted(tmp_path, capsys):
    planned = experiment(tmp_path, "PROBED=unset,a b", "--repeats", "6")
    for trial in planned.order():
        write_trial(planned, trial.index, wall_ns=(1_000_000 if trial.arm == "unset" else 900_000) + 100 * trial.index)

    analysis = perform(planned)

    found = analysis.to_json()
    assert found["verdict"] == "better"
    wall = found["metrics"][0]
    assert (wall["arm"], wall["metric"], wall["verdict"]) == ("a b", "step_wall_ns", "better")
    assert wall["effect_pct"] == pytest.approx(-10, abs=0.1)
    assert wall["ci_low_pct"] < wall["effect_pct"] < wall["ci_high_pct"] < -9
    assert found["recommended"] == {"arm": "a b", "environment": {"PROBED": "a b"}, "overrides": {}}
    lines = render(analysis).splitlines()
    assert lines[0] == "better: PROBED, mode cpu, single"
    assert "  export PROBED='a b'" in lines
    assert re.search(r"a b against unset: better \(step_wall_ns -\d+\.\d\d %, 95 %: -", render(analysis))
    # every key of the contract
    assert {"schema_version", "verdict", "metrics", "arms", "comparable", "notes", "mode"} <= found.keys()
    assert {"metric", "a", "b", "better", "effect_pct", "ci_low_pct", "ci_high_pct", "verdict"} <= wall.keys()
    assert found["experiment"]["thresholds"]["step_wall_ns"] == 1.0
    assert len(found["trials"]) == 12


def test_several_arms_are_each_compared_with_the_first(tmp_path):
    planned = experiment(tmp_path, "PROBED=a,b,c", "--repeats", "8")
    walls = {"a": 1_000_000, "b": 1_100_000, "c": 900_000}
    for trial in planned.order():
        write_trial(planned, trial.index, wall_ns=walls[trial.arm] + 100 * trial.index)

    analysis = perform(planned)

    assert analysis.verdict == "better"
    assert {item.arm: item.verdict for item in analysis.comparisons} == {"b": "worse", "c": "better"}
    assert all(item.metrics[0].confidence == 0.975 for item in analysis.comparisons), "Bonferroni over two arms"
    assert analysis.recommended().arm == "c"


@pytest.mark.parametrize("seed", range(5))
def test_rounds_of_several_arms_balance_a_drift(seed):
    knob, values = find_knob("PROBED=a,b,c")

    trials = order(knob.arms(values), 8, seed)

    assert [trial.index for trial in trials] == list(range(24))
    for pair in range(8):
        assert sorted(trial.arm for trial in trials if trial.pair == pair) == ["a", "b", "c"]
    places = {arm: sum(trial.index for trial in trials if trial.arm == arm) for arm in "abc"}
    assert len(set(places.values())) == 1


def sample(*processes: int, reasons: tuple[str, ...] = (), at: int = 1003) -> dict:
    found = dict.fromkeys(("sm_clock_mhz", "temperature_c", "power_w"))
    gpu = {"uuid": "GPU-0", "index": 0, "processes": list(processes), "clock_reasons": list(reasons)}
    return {"unix_ns": at, "gpus": [found | gpu]}


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"loss": None}, "the loss of rank 0 is not finite at step 0–3"),
        ({"ranks": (0,)}, "no step of rank 1"),
        ({"samples": [sample(7, 8)]}, "another process uses GPU 0"),
        ({"samples": [sample(7, reasons=("hardware slowdown",))]}, "GPU 0 was slowed down: hardware slowdown"),
        ({"samples": [sample(7, reasons=("software power cap",))]}, None),
        ({"samples": [sample(7, reasons=("hardware slowdown",), at=1000)]}, None),
    ],
    ids=["no loss", "no rank", "other process", "throttled", "power cap", "throttled while warming up"],
)
def test_what_makes_a_trial_void(tmp_path, what, reason):
    found = judged(experiment(tmp_path, "PROBED=a,b", "--repeats", "2"), 0, **what)

    assert (found.state, found.reason) == ("valid" if reason is None else "void", reason)


@pytest.mark.parametrize(
    ("reason", "state", "outcome"),
    [
        ("rank 1: torch.OutOfMemoryError: CUDA out of memory. Tried", "outcome", "does not fit in memory"),
        ("hung: no rank ended a step for 300 s; none has ended its first", "outcome", "hangs"),
        ("rank 1 was killed by SIGKILL: out of memory, unless someone did", "void", None),
        ("rank 0: ValueError: no", "void", None),
        ("interrupted by SIGINT", "broken", None),
    ],
)
def test_how_a_failed_run_is_read(tmp_path, reason, state, outcome):
    planned = experiment(tmp_path, "PROBED=a,b", "--repeats", "2")
    directory = write_trial(planned, 0)
    recording.write_status(directory, "failed", reason)

    found = judge(planned, planned.order()[0], directory)

    assert (found.state, found.outcome) == (state, outcome)


def test_rank_without_its_setting_is_refused(tmp_path):
    planned = experiment(tmp_path, "PROBED=a,b", "--repeats", "2")

    with pytest.raises(RefusedError, match=r"rank 0 started with PROBED 'c', arm [ab] declares '[ab]': refused"):
        judged(planned, 0, environment={"PROBED": "c"})


def test_machine_that_is_never_fit_ends_the_experiment(tmp_path, capsys):
    """Both pairs have been void twice already, and are again."""
    planned = experiment(tmp_path, "PROBED=a,b", "--repeats", "4")
    for index in (0, 2):
        for number in (1, 2):
            directory = write_trial(planned, index, samples=[sample(7, 8)])
            directory.rename(directory.with_name(f"{directory.name}.void{number}"))
        write_trial(planned, index, samples=[sample(7, 8)])
    planned_again = perform(planned)

    assert (planned_again.verdict, planned_again.decided) == ("inconclusive", False)
    assert len(planned_again.to_json()["voided"]) == 4
    assert "a pair was given up: trial 00-" in capsys.readouterr().err


def test_arms_that_train_differently_are_not_comparable(tmp_path):
    planned = experiment(tmp_path, "PROBED=a,b", "--repeats", "2")
    for trial in planned.order():
        write_trial(planned, trial.index, loss=1.0 if trial.arm == "a" else 1.5, peak=2**20 * trial.index)

    analysis = perform(planned)

    assert (analysis.verdict, analysis.comparable, analysis.recommended()) == ("inconclusive", False, None)
    assert any(note.startswith("not comparable: b does not train the same") for note in analysis.notes)


def library(folder, name: str, *strings: str) -> Library:
    path = folder / f"{name}.so"
    path.write_bytes(b"\0".join(text.encode() for text in ("", *strings, "")))
    return Library(name=name, path=path)


def test_variable_that_the_build_ignores_is_said_with_the_library_s_own_sentence(tmp_path):
    name = "TORCH_NCCL_AVOID_RECORD_STREAMS"
    sentence = f"{name} is the default now, this environment variable is thus deprecated."
    arms = KNOBS["record_streams"].arms()

    newer, notes = dead(arms, Build([library(tmp_path, "libtorch_cuda", name, sentence)], (2, 11)))
    older, _ = dead(arms, Build([library(tmp_path, "libtorch_cuda", name)], (2, 7)))
    missing, _ = dead(arms, Build([library(tmp_path, "libtorch_cuda", "ANOTHER")], (2, 11)))

    assert newer.verdict == "ignored by this build"
    assert notes == [f"{name}: ignored: {sentence}"]
    assert older is None
    assert missing.verdict == "unavailable in this build"


def test_same_setting_written_in_another_way_is_recognised():
    def found(name: str, *values: str) -> dict[str, str]:
        knob, _ = find_knob(name)
        known = same_settings(knob.arms(values), knob, config)
        return {arm: item.reason for arm, item in known.items()}

    config = experiment_config()
    assert found("max_connections", "unset", "8", "1") == {"8": "8 is the same setting as unset: 8 is the default"}
    new, old = "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert found("alloc_conf", new, old) == {
        old: f"{old} is the same setting as {new}: the old and the new name of one variable"
    }
    assert found("max_connections", "unset", "unset") == {}, "an A/A is asked for"
    mps = KNOBS["max_connections"].in_mode("shared-gpu")
    assert list(same_settings(mps.arms(["unset", "8", "2"]), mps, config)) == ["2"], "a client of MPS has 2 if unset"
    assert KNOBS["alloc_conf.expandable_segments"].in_mode("shared-gpu").default == "expandable_segments:False"
    assert found("reshard", "default", "always") == {}


def experiment_config():
    return probe.plan(arguments("aa", "--config", "single", "--mode", "cpu")).config


def test_knob_that_nothing_reads_here_needs_no_trial(tmp_path, capsys):
    args = arguments("max_connections", "--config", "single", "--mode", "cpu", "--json", "--out", str(tmp_path / "x"))

    assert probe.run(args) == 5
    assert '"verdict": "unavailable in this build"' in capsys.readouterr().out
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("max_conections",), "no knob 'max_conections': did you mean max_connections?"),
        (("PROBED=a",), "one arm"),
        (("PROBED=a,,b",), "holds an empty value"),
        (("threads", "--arms", "unset,1"), "OMP_NUM_THREADS cannot be unset"),
        (("RANK=0,1",), "RANK is set for each rank by the launcher"),
        (("MY_TOKEN=a,b",), "looks like a secret"),
        (("aa", "--repeats", "1"), "--repeats 1 must be at least 2"),
        (("aa", "--training.steps", "12"), "leaves no measured step"),
        (("reshard", "--arms", "default,sometimes"), "configuration: parallelism.reshard_after_forward"),
        ((), "which knob?"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(words, reason):
    with pytest.raises(UsageError, match=re.escape(reason)) as caught:
        probe.plan(arguments(*words, "--config", "single", "--mode", "cpu"))

    assert "\n" not in str(caught.value)


def test_windows_leave_measured_steps_alone(tmp_path):
    planned = probe.plan(arguments("aa", "--config", "single", "--mode", "cpu", "--warmup", "3"))

    recorder, steps = planned.config.recorder, planned.config.training.steps
    assert steps == 3 + 30 + 1 + 2 + 2
    assert (recorder.trace.start, recorder.memory.start) == (34, 36)


def test_command_without_a_folder_goes_on_with_the_unfinished_experiment_of_its_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planned = experiment(tmp_path / "elsewhere", "PROBED=a,b", "--repeats", "2")
    other = experiment(tmp_path / "other", "PROBED=a,b", "--repeats", "3")
    folder = probe._folder(None, planned)
    replace(planned, directory=folder).fix()

    assert folder.parent == tmp_path / "runs" / "out"
    assert probe._folder(None, planned) == folder
    assert probe._folder(None, other) != folder

    (folder / "analysis.json").write_text("{}")
    assert probe._folder(None, planned) != folder


def test_list_names_every_knob_and_what_decides(capsys):
    assert probe.run(arguments("--list")) == 0

    text = capsys.readouterr().out
    for knob in KNOBS.values():
        assert f"{knob.name}: " in text
        assert knob.hypothesis in text
        assert knob.metric in COMPARED
    assert liveness.is_examined(find_knob("alloc_conf")[0].arms())
    assert not liveness.is_examined(KNOBS["threads"].arms())
