"""What a report says of torch.compile: what was compiled, what is not in effect, and what is no such statement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from written import write_recording

from harness import recording
from harness.config import Decoder, Trainer
from harness.config_json import to_dict
from harness.report import Report, build
from harness.report.text import render

OUTCOME: dict[str, Any] = {
    "backend": "inductor",
    "layers": 4,
    "layer_kinds": 1,
    "layer_graphs": 1,
    "loss_graphs": 1,
    "graph_breaks": 0,
    "recompile_reasons": [],
    "ran_eagerly": {},
    "cuda_graphs": None,
}
GRAPHS = {"graphs": 8, "captured": 8, "skips": 0, "skip_reasons": []}


def report(directory: Path, outcome: object) -> Report:
    """Of two ranks, the second of which says `outcome`."""
    config = Trainer.Config(name="compiled", world_size=2, model=Decoder.Config(n_layers=4))
    config.compile.blocks = config.compile.loss = True
    write_recording(directory, config=to_dict(config), manifest={"mode": "real"})
    for rank, one in enumerate((OUTCOME, outcome)):
        recording.write_json(recording.rank_path(directory, rank), {"rank": rank, "compile": one})
    return build(directory)


def titles(found: Report) -> list[str]:
    return [one.title for one in found.findings if "compile" in one.title or "CUDA graphs" in one.title]


def test_what_was_compiled_is_a_line(tmp_path: Path) -> None:
    found = report(tmp_path, OUTCOME)
    assert "compile: inductor; 4 layers in 1 graph; the loss" in render(found)
    assert titles(found) == []


def test_a_part_that_ran_without_is_a_finding(tmp_path: Path) -> None:
    found = report(tmp_path, OUTCOME | {"ran_eagerly": {"layers.2": 3, "loss": 2}})
    assert titles(found) == ["torch.compile was asked for, and 2 parts ran without it"]
    assert "not compiled: layers.2, loss" in render(found)


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({}, []),
        ({"captured": 17}, ["CUDA graphs are captured again and again: 17 times, 8 of them"]),
        ({"captured": 0}, ["CUDA graphs were asked for, and none was captured"]),
        ({"skips": 3}, ["CUDA graphs were left out 3 times"]),
    ],
)
def test_cuda_graphs(tmp_path: Path, changes: dict[str, int], title: list[str]) -> None:
    assert titles(report(tmp_path, OUTCOME | {"cuda_graphs": GRAPHS | changes})) == title


def test_recordings_that_do_not_say_how_many_graphs_a_step_replays(tmp_path: Path) -> None:
    older = {name: value for name, value in GRAPHS.items() if name != "graphs"}
    found = report(tmp_path, OUTCOME | {"cuda_graphs": older | {"captured": 100}})
    assert titles(found) == []
    assert found.compilation is not None
    assert found.compilation.captured == 100


@pytest.mark.parametrize(
    "outcome",
    [
        ["inductor"],
        {"backend": "inductor"},
        OUTCOME | {"layers": "4"},
        OUTCOME | {"ran_eagerly": {"loss": "often"}},
        OUTCOME | {"recompile_reasons": 3},
        OUTCOME | {"cuda_graphs": []},
        OUTCOME | {"cuda_graphs": {"captured": 1}},
        OUTCOME | {"cuda_graphs": GRAPHS | {"skips": None}},
    ],
)
def test_what_is_garbled_is_left_out_and_named(tmp_path: Path, outcome: object) -> None:
    found = report(tmp_path, outcome)
    assert found.compilation is not None  # of the other rank
    assert found.compilation.layers == 4
    (reason,) = [error.reason for error in found.errors if "rank1.json" in error.file]
    assert reason.startswith("compile is left out: ")
