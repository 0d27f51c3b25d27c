"""Arms that hang, die or run out of memory while the other rank waits in a real collective: the experiment says so,
keeps the other runs and leaves no process."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from experiments import PROGRAM, SMALL, arguments

from harness import recording
from harness.commands import probe
from harness.modes import Start
from harness.mps import CONTROL
from probes import engine
from probes.report.reading import read_analysis

pytestmark = pytest.mark.distributed

MPS_STAND_IN = Path(__file__).parents[1] / "launch" / "mps_control.py"
# Torch has to be imported and a group made within it.
HUNG_AFTER_S = "10"


def processes_of(folder: Path) -> list[str]:
    """Whatever runs that has the folder in its command line or among its variables, but for this process."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int(path.name) == os.getpid() or (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            words = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words:
            found.append(words.decode(errors="replace"))
    return found


def test_arms_that_hang_or_run_out_of_memory_in_a_collective(tmp_path):
    arms = "PROBED=fine,stops in a collective,runs out of memory in a collective"
    words = (arms, *SMALL, "--repeats", "2", "--timeout", HUNG_AFTER_S)
    planned = replace(probe.plan(arguments(*words)), directory=tmp_path)

    analysis = probe.perform(planned, [], PROGRAM)

    assert (analysis.verdict, analysis.decided) == ("worse", True)
    reasons = {item.arm.split(" in ")[0]: str(item.reason) for item in analysis.comparisons}
    assert "hangs: hung: no rank ended a step for 10 s" in reasons["stops"]
    assert "does not fit in memory: rank 1: RuntimeError: " in reasons["runs out of memory"]
    assert "can't allocate memory" in reasons["runs out of memory"]
    assert {arm["name"].split(" in ")[0]: arm["runs"] for arm in analysis.to_json()["arms"]} == {
        "fine": 1,
        "stops": 0,
        "runs out of memory": 0,
    }
    assert len(list((tmp_path / "trials").iterdir())) == 3, "an arm was tried again"
    (hung,) = (tmp_path / "trials").glob("*-stops*")
    assert "all_reduce" in recording.log_path(hung, 0).read_text(), "where the first rank stood"
    (fine,) = (tmp_path / "trials").glob("*-fine")
    assert recording.read_status(fine).state == "complete"
    assert processes_of(tmp_path) == []
    assert read_analysis(tmp_path).to_json() == analysis.to_json()


def test_rank_killed_in_a_collective_leaves_no_daemon(tmp_path, monkeypatch):
    """In mode shared-gpu, with a stand-in for NVIDIA's control program; the arm is not tried three times here."""
    program = tmp_path / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{MPS_STAND_IN}" "$@"\n')
    program.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(engine, "MAX_RERUNS", 0)
    planned = probe.plan(arguments("PROBED=fine,is killed in a collective", *SMALL, "--repeats", "2"))
    start = Start(mode="shared-gpu", why="", about={"shared_gpu": {"gpus": 1}})
    starts = {arm.name: start for arm in planned.arms}
    (tmp_path / "out").mkdir()
    planned = replace(planned, directory=tmp_path / "out", mode="shared-gpu", gpus=1, starts=starts)

    analysis = probe.perform(planned, [], PROGRAM)

    assert (analysis.verdict, analysis.decided) == ("worse", True)
    assert "is killed in a collective fails: rank 1 was killed by SIGKILL" in str(analysis.comparisons[0].reason)
    assert [arm["runs"] for arm in analysis.to_json()["arms"]] == [1, 0]
    assert processes_of(tmp_path) == []
    assert list((tmp_path / "tmp").glob("meshscope-mps-*")) == []
