"""Pipeline actions read from traces: kernels launched in them on a GPU, the recorder's phases on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trace_builder import annotation, kernel, launch, nccl, step, write

from harness.compare.pipeline import pipeline_of
from harness.report import build
from harness.report.text import render
from harness.sources import find_sources
from harness.trace import read_captures


def measured(path: Path) -> list[tuple[str, int, int]]:
    (capture,), errors = read_captures(find_sources(path))
    assert errors == []
    return [(str(one.action), one.start_ns, one.end_ns) for one in capture.pipeline]


def test_on_a_gpu_an_action_is_the_kernels_launched_in_it_whatever_thread_launches(tmp_path):
    events = [
        step(0, 0, 1000),
        annotation("PP:0UNSHARD", 5, 5),
        annotation("PP:0F0", 10, 50),
        launch(12, 1),
        launch(20, 2),
        kernel("gemm", 100, 30, correlation=1),
        kernel("gemm", 150, 30, correlation=2),
        annotation("PP:0B0", 70, 60),
        launch(80, 3, tid=200),  # autograd's thread
        launch(90, 4),
        nccl("SendRecv", 190, 500, correlation=4),  # waits, and is no computation
        kernel("gemm", 300, 20, correlation=3),
        annotation("PP:1RECV_F0", 140, 10),
    ]
    assert measured(write(tmp_path / "rank0_trace.json", events)) == [
        ("0F0", 100_000, 180_000),
        ("0B0", 300_000, 320_000),
    ]


def test_an_action_that_launches_nothing_is_left_out(tmp_path):
    events = [step(0, 0, 100), annotation("PP:0I0", 5, 5), annotation("PP:0F0", 10, 5), launch(11, 1)]
    assert measured(write(tmp_path / "rank0_trace.json", [*events, kernel("gemm", 20, 5, correlation=1)])) == [
        ("0F0", 20_000, 25_000)
    ]


def test_on_the_host_waiting_for_the_input_does_not_count(tmp_path):
    events = [
        step(0, 0, 1000),
        annotation("PP:1F0", 10, 100),
        annotation("forward", 60, 20),
        annotation("forward", 90, 15),  # the loss
        annotation("forward", 60, 500, tid=7),  # another thread's
        annotation("PP:(1F1;1B0)OVERLAP_F_B", 200, 100),
        annotation("forward", 210, 30),
        annotation("backward", 250, 40),
    ]
    assert measured(write(tmp_path / "rank0_trace.json", events)) == [
        ("1F0", 60_000, 105_000),
        ("1F1", 210_000, 240_000),
        ("1B0", 250_000, 290_000),
    ]


def test_without_phases_a_host_range_stands_for_its_action(tmp_path):
    """As another trainer writes them. What overlaps cannot be told apart then; names that are no action are let be."""
    both = "(1F1;1B0)OVERLAP_F_B"
    events = [step(0, 0, 1000), annotation("PP:1F0", 10, 100), annotation(f"PP:{both}", 200, 100)]
    events += [annotation("PP:eval", 400, 10), annotation("PP:1X0", 420, 10)]
    assert measured(write(tmp_path / "rank0_trace.json", events)) == [
        ("1F0", 10_000, 110_000),
        (both, 200_000, 300_000),
    ]


@pytest.fixture
def foreign(tmp_path) -> Path:
    """Two ranks of another trainer: rank 1 computes while rank 0 is idle, and the other way round."""
    for rank, (forward, backward) in enumerate([((0, 100), (300, 100)), ((100, 100), (200, 100))]):
        events: list[Any] = [step(5, 0, 1000)]
        events += [annotation(f"PP:{rank}F0", *forward), annotation(f"PP:{rank}B0", *backward)]
        write(tmp_path / f"rank{rank}_trace.json", events, rank=rank)
    return tmp_path


def test_bubbles_of_another_trainers_traces(foreign):
    captures, _ = read_captures(find_sources(foreign))
    pipeline = pipeline_of(None, captures)
    assert pipeline is not None
    (one,) = pipeline.measured
    assert (one.step, one.source) == (5, "host")
    for bubble in one.bubbles:
        assert (bubble.busy, bubble.span, bubble.pct) == (200_000, 400_000, 50.0)
    assert pipeline.costs_ns == {"B": 100_000, "F": 100_000}
    assert pipeline.to_json()["planned"]["ranks"] == []
    text = render(build(foreign))
    quarter = 24
    assert f"    0  {'0' * quarter}{'·' * 2 * quarter}{'a' * quarter}" in text
    assert f"    1  {'·' * quarter}{'0' * quarter}{'a' * quarter}{'·' * quarter}" in text


def test_a_part_that_a_stage_never_computes_costs_it_nothing(tmp_path):
    """torch's first stage has no I: what comes first has no input to differentiate."""
    for rank, kinds in enumerate(["FW", "FIW"]):
        spans = [annotation(f"PP:{rank}{kind}0", 100 * place, 50) for place, kind in enumerate(kinds)]
        write(tmp_path / f"rank{rank}_trace.json", [step(5, 0, 1000), *spans], rank=rank)
    captures, _ = read_captures(find_sources(tmp_path))
    pipeline = pipeline_of(None, captures)
    assert pipeline is not None
    costs = {(stage, kind): 50_000 for stage in (0, 1) for kind in "FIW"}
    assert pipeline.stage_costs_ns == costs | {(0, "I"): 0}


def test_a_trace_without_a_pipeline_has_none(tmp_path):
    write(tmp_path / "rank0_trace.json", [step(0, 0, 10), annotation("forward", 1, 5)])
    captures, _ = read_captures(find_sources(tmp_path))
    assert captures[0].pipeline == []
    assert pipeline_of(None, captures) is None
