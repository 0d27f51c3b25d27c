"""An arm whose ranks run under another Python: asked before, run, and allowed to differ in its torch alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from experiments import PROGRAM, arguments, experiment, write_trial

from harness import recording
from harness.commands import probe
from harness.errors import UnavailableError, UsageError
from harness.interpreter import Interpreter, examine, find_interpreter
from probes.experiment import Experiment
from probes.report.reading import read_experiment
from probes.text import render
from probes.validity import RefusedError, judge, require_alike

OTHER = Interpreter(path="/other/bin/python", python="3.12.1", torch="2.11.0", cuda=None)


def script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def python(path: Path, before: str = ":", options: str = "") -> Path:
    return script(path, before, f'exec "{sys.executable}" {options} "$@"')


@pytest.fixture
def legacy(tmp_path: Path) -> Path:
    """A Python whose torch is 2.6."""
    site = tmp_path / "site"
    for folder in ("torch", "torch-2.6.0.dist-info"):
        (site / folder).mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text('__version__ = "2.6.0"\n')
    (site / "torch-2.6.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.6.0\n")
    return python(tmp_path / "legacy", f'export PYTHONPATH="{site}:$PYTHONPATH"')


def test_python_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"python=nowhere/python: there is no such file"):
        find_interpreter("nowhere/python")
    (tmp_path / "text").write_text("no program")
    with pytest.raises(UsageError, match="cannot be executed"):
        find_interpreter(str(tmp_path / "text"))


def test_old_torch_is_named_with_what_does_the_same_here(legacy):
    with pytest.raises(UnavailableError) as caught:
        examine(find_interpreter(str(legacy)))
    assert f"{legacy}: Python 3." in str(caught.value)
    assert "torch 2.6.0: the trainer runs on torch 2.11 or later (training.collective_memory=" in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["exit 3"], "is no Python that says its version (it said nothing)"),
        (["echo '{torn'", 'echo \'{"python": "3"}\'', "echo '[1]'"], "is no Python that says its version"),
        ([f'exec "{sys.executable}" -I -S "$@"'], "has no torch"),
    ],
)
def test_python_that_cannot_run_ranks_says_why(tmp_path, lines, reason):
    with pytest.raises(UnavailableError) as caught:
        examine(find_interpreter(str(script(tmp_path / "python", *lines))))
    assert reason in str(caught.value)


@pytest.mark.distributed
def test_arm_with_an_old_torch_is_unavailable_and_one_with_a_usable_one_runs_under_it(tmp_path, legacy):
    """The ranks are without torch, the question before them is not."""
    mine = python(tmp_path / "mine")
    planned = experiment(
        tmp_path / "out",
        "aa",
        *("--arms", "same", "--arm", f"python={mine}", "--arm", f"python={legacy}", "--repeats", "2"),
        *("--mode", "rehearsal", "--training.device", "cpu", "--ranks", "0", "--metric", "peak_allocated_bytes"),
    )
    known = planned.not_run[f"python={legacy}"]
    assert known.verdict == "unavailable in this build"
    found = planned.arm(f"python={mine}").python
    assert found is not None
    assert found == Interpreter(path=str(mine), **found.versions())
    assert found.torch is not None

    # what a rank without torch states
    planned = replace(planned, arms=[arm if arm.python is None else unversioned(arm) for arm in planned.arms])
    (planned.directory / "experiment.json").unlink()
    planned.fix()
    analysis = probe.perform(planned, [], PROGRAM)

    assert {item.arm: item.verdict for item in analysis.comparisons} == {
        f"python={mine}": "no difference",
        f"python={legacy}": "unavailable in this build",
    }
    for trial in analysis.progress.trials:
        command = recording.read_json(planned.trial_directory(trial) / "manifest.json")["launcher"]["command"]
        assert command[0] == (sys.executable if trial.arm == "same" else str(mine))
    assert f"{legacy}" in render(analysis)
    assert read_experiment(planned.directory).arms == planned.arms


def unversioned(arm):
    return replace(arm, python=replace(arm.python, python=None, torch="none", cuda=None))


def of_two_torches(directory: Path) -> Experiment:
    """Planned without asking: arm B's Python is not there."""
    planned = experiment(directory, "aa", "--repeats", "2")
    arms = [planned.arms[0], replace(planned.arms[1], python=OTHER)]
    return replace(planned, arms=arms)


def trial_with(planned: Experiment, index: int, **versions: str | None) -> recording.Recording:
    directory = write_trial(planned, index)
    recording.merge_manifest(directory, {"versions": {"driver": "580", **versions}})
    judged = judge(planned, planned.order()[index], directory)
    assert judged.recording is not None
    return judged.recording


def test_arms_may_differ_in_the_torch_that_was_declared_and_in_nothing_else(tmp_path):
    planned = of_two_torches(tmp_path / "out")
    first, second = planned.order()[:2]
    other = OTHER.versions()
    versions = {name: other if planned.arm(name).python else {"python": "3.11.7", "torch": "2.13.0"} for name in
                (first.arm, second.arm)}  # fmt: skip
    one, two = (trial_with(planned, trial.index, **versions[trial.arm]) for trial in (first, second))
    assert require_alike(planned, second, two, first, one) == []

    two = trial_with(planned, second.index, **versions[second.arm] | {"driver": "570"})
    with pytest.raises(RefusedError, match=r"versions\.driver is '570'"):
        require_alike(planned, second, two, first, one)

    changed = first if planned.arm(first.arm).python else second
    with pytest.raises(RefusedError, match=r"ran with torch 2\.12\.0, but /other/bin/python had 2\.11\.0"):
        trial_with(planned, changed.index, **other | {"torch": "2.12.0"})


def test_torch_that_no_arm_declares_is_refused(tmp_path):
    planned = experiment(tmp_path / "out", "aa", "--repeats", "2")
    first, second = planned.order()[:2]
    one, two = trial_with(planned, first.index, torch="2.13.0"), trial_with(planned, second.index, torch="2.12.0")
    with pytest.raises(RefusedError, match=r"versions\.torch is '2\.12\.0'"):
        require_alike(planned, second, two, first, one)


def test_arms_of_record_streams_are_the_variable_or_the_emulation():
    knob, _ = probe._knob(arguments("record_streams", "--arms", "references,record_stream"))
    assert [arm.overrides for arm in knob.arms(["references", "record_stream"])] == [
        {"training.collective_memory": "references"},
        {"training.collective_memory": "record_stream"},
    ]
    mixed = knob.arms(["1", "record_stream_async"])
    assert [(arm.environment["TORCH_NCCL_AVOID_RECORD_STREAMS"], arm.overrides) for arm in mixed] == [
        ("1", {}),
        (None, {"training.collective_memory": "record_stream_async"}),
    ]


def test_emulation_needs_a_gpu_and_the_whole_answer_is_that(capsys):
    words = ["record_streams", "--arms", "references,record_stream", "--mode", "cpu", "--force"]
    words += ["--module", "workloads", "--config", "collectives"]
    assert probe.run(arguments(*words)) == 5
    assert "unavailable in this build: record_streams, mode cpu, collectives" in capsys.readouterr().out
