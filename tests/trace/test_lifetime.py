"""The life of an FSDP unit: from real recordings, from traces written by hand, and from what holds none."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from html_page import Page
from trace_builder import annotation, group, kernel, launch, nccl, step, write
from written import write_kernels, write_recording

from harness.cli import main
from harness.compare import Lifetime, Wanted
from harness.report import build
from harness.report.html import page
from harness.report.lifetime_figure import draw, windows
from harness.report.text import render

RECORDED = Path(__file__).parents[2] / "runs" / "recorded"
MIB = 2**20

# Of layers.1, host µs: what FSDP2 opens, and what is launched in it at which µs of the device.
RANGES = {
    "FSDP::pre_forward (layers.1)": (100, 20),
    "FSDP::all_gather (layers.1)": (101, 10),
    "FSDP::all_gather_copy_out (layers.1)": (112, 6),
    "FSDP::post_forward (layers.1)": (140, 2),
    "FSDP::pre_backward (layers.2)": (200, 30),
    "FSDP::all_gather (layers.1) ": (205, 10),
    "FSDP::pre_backward (layers.1)": (300, 20),
    "FSDP::all_gather_copy_out (layers.1) ": (301, 6),
    "FSDP::post_backward_accumulate (layers.1)": (340, 2),
    "FSDP::post_backward_reshard (layers.1)": (343, 2),
    "FSDP::post_backward_reduce (layers.1)": (346, 20),
    "Optimizer.step#AdamW.step": (400, 50),
}
GATHER = group("1", "mesh_dp_shard", [0, 1], "_allgather_base") | {
    "In msg nelems": 512,
    "Out msg nelems": 1024,
    "dtype": "BFloat16",
}
SCATTER = group("1", "mesh_dp_shard", [0, 1], "_reduce_scatter_base") | {
    "In msg nelems": 1024,
    "Out msg nelems": 512,
    "dtype": "Float",
}
# (launched at, kernel's name or metadata of its collective, stream, start, duration)
LAUNCHED = [
    (102, "cast", 18, 1000, 10),
    (103, GATHER, 22, 1010, 100),
    (113, "copy_out", 7, 1110, 10),
    (125, "forward_gemm", 7, 1125, 75),
    (206, "cast", 18, 2000, 10),
    (207, GATHER, 22, 2010, 50),
    (216, "gemm_of_layers.2", 7, 2000, 100),
    (302, "copy_out", 7, 3000, 10),
    (325, "backward_gemm", 7, 3020, 180),
    (347, "chunk_cat", 7, 3200, 20),
    (348, SCATTER, 26, 3220, 80),
    (410, "adamw", 7, 4000, 100),
]


def events(ranges=RANGES, launched=LAUNCHED):
    found = [step(5, 0, 500), *(annotation(name.strip(), *times) for name, times in ranges.items())]
    for number, (at, what, stream, start, dur) in enumerate(launched, start=1):
        found.append(launch(at, number))
        if isinstance(what, str):
            found.append(kernel(what, start, dur, stream=stream, correlation=number))
        else:
            found.append(nccl("AllGather", start, dur, stream=stream, correlation=number, **what))
    return found


def life(path: Path, **wanted: str) -> Lifetime:
    found = build(path, wanted=Wanted(**wanted)).lifetime
    assert found is not None
    return found


def spans(found: Lifetime, what: str) -> list[tuple[int, int]]:
    """µs after the first kernel, which starts at 1000."""
    return [(row.start_ns // 1000 + 1000, row.end_ns // 1000 + 1000) for row in found.rows if row.what == what]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write(tmp_path / "rank0_trace.json", events())


def test_every_state_begins_and_ends_with_the_kernels_that_write_and_use_it(written):
    found = life(written, unit="layers.1")
    assert (found.unit, found.rank, found.step, found.source) == ("layers.1", 0, 5, "device")
    assert spans(found, "all-gather input") == [(1000, 1010), (2000, 2010)]
    assert spans(found, "all-gather output") == [(1000, 1120), (2000, 3010)]
    assert spans(found, "unsharded parameters") == [(1110, 1200), (3000, 3200)]
    assert spans(found, "unsharded gradients") == [(3020, 3220)]
    assert spans(found, "reduce-scatter input") == [(3200, 3300)]
    assert spans(found, "gradient shards") == [(3300, 4100)]
    assert spans(found, "sharded parameters") == [(1000, 4100)]
    assert [
        (row.what, row.phase, row.start_ns // 1000 + 1000, row.end_ns // 1000 + 1000)
        for row in found.of_kind("compute")
    ] == [
        ("forward", "forward", 1125, 1200),
        ("backward", "backward", 3020, 3200),
    ]


def test_collectives_with_bytes_exposure_and_stream(written):
    first, second, scatter = life(written, unit="layers.1").of_kind("communication")
    assert [row.what for row in (first, second, scatter)] == ["all_gather", "all_gather", "reduce_scatter"]
    assert [row.bytes for row in (first, second, scatter)] == [2048, 2048, 4096]
    assert [row.streams for row in (first, second, scatter)] == [(22,), (22,), (26,)]
    assert {row.dimension for row in (first, second, scatter)} == {"mesh_dp_shard"}
    assert [row.exposed_ns for row in (first, second, scatter)] == [100_000, 0, 80_000]
    assert [row.prefetched for row in (first, second, scatter)] == [False, True, False]
    assert first.wait_ns is None  # there is no other rank


def test_bytes_without_a_configuration_are_the_traces_or_unknown(written):
    known = {
        row.what: (row.bytes, row.source, row.measured) for row in life(written, unit="layers.1").of_kind("storage")
    }
    assert known["all-gather input"] == (1024, "trace", True)
    assert known["all-gather output"] == (2048, "trace", True)
    assert known["unsharded parameters"] == (2048, "trace", False)
    assert known["reduce-scatter input"] == (4096, "trace", True)
    assert known["sharded parameters"] == known["gradient shards"] == (None, None, None)


def test_phases_without_named_ones_are_those_of_the_units_and_the_optimizer(written):
    phases = [
        (phase.phase, phase.start_ns // 1000 + 1000, phase.end_ns // 1000 + 1000) for phase in life(written).phases
    ]
    assert phases == [("forward", 1000, 1200), ("backward", 2000, 3220), ("optimizer", 4000, 4100)]


def test_who_waits(tmp_path):
    """Rank 1 arrives 60 µs later at the first all-gather, and the clocks agree."""
    late = [
        (at, w, s, start + 60, dur - 60) if at == 103 else (at, w, s, start, dur) for at, w, s, start, dur in LAUNCHED
    ]
    for rank, launched in ((0, LAUNCHED), (1, late)):
        write(tmp_path / f"rank{rank}_trace.json", events(launched=launched), rank=rank)
    first, second, _ = life(tmp_path, unit="layers.1").of_kind("communication")
    assert (first.wait_ns, first.last_rank) == (60_000, 1)
    assert second.wait_ns == 0


def test_a_reduction_that_a_pipeline_leaves_for_later_reduces_what_was_added_up(tmp_path):
    """The backward adds up, cast within its reshard range; a post-backward of its own reduces, right at its start."""
    ranges = {name: times for name, times in RANGES.items() if "reduce" not in name}
    ranges |= {
        "FSDP::post_backward_accumulate (layers.1) ": (380, 2),
        "FSDP::post_backward_reshard (layers.1) ": (383, 2),
        "FSDP::post_backward_reduce (layers.1)": (386, 10),
    }
    launched = [(at + 40 if at in (347, 348) else at, *rest) for at, *rest in LAUNCHED]
    path = write(tmp_path / "rank0_trace.json", events(ranges, [*launched, (344, "to_float", 7, 3200, 5)]))
    found = life(path, unit="layers.1")
    assert spans(found, "unsharded gradients") == [(3020, 3205)]
    assert spans(found, "accumulated gradients") == [(3205, 3220)]
    assert spans(found, "reduce-scatter input") == [(3200, 3300)]
    assert spans(found, "gradient shards") == [(3300, 4100)]
    assert [row.what for row in found.of_kind("communication")] == ["all_gather", "all_gather", "reduce_scatter"]


@pytest.mark.parametrize("missing", list(RANGES))
def test_a_trace_that_lacks_any_range_is_read_all_the_same(tmp_path, missing):
    ranges = {name: times for name, times in RANGES.items() if name != missing}
    path = write(tmp_path / "rank0_trace.json", events(ranges))
    found = life(path, unit="layers.1")
    assert all(0 <= row.start_ns <= row.end_ns <= found.span_ns for row in found.rows), missing
    report = build(path, wanted=Wanted(unit="layers.1"))
    assert "Life of layers.1" in render(report)
    assert Page(draw(found)).open == []


@pytest.mark.parametrize("kept", range(len(LAUNCHED)))
def test_a_step_whose_end_is_missing_is_left_out_or_read_as_far_as_it_goes(tmp_path, kept):
    """Every prefix of what ran; the last launch may lack its kernel."""
    path = write(tmp_path / "rank0_trace.json", [*events(launched=LAUNCHED[:kept]), launch(120, 99)])
    report = build(path)
    assert report.lifetime is not None or report.no_lifetime
    assert "Life of" in render(report)


def test_ranges_within_ranges_of_the_same_name_and_without_an_end(tmp_path):
    nested = {
        f"{name}{' ' * extra}": (start + extra, max(dur - 2 * extra, 0))
        for name, (start, dur) in RANGES.items()
        for extra in (0, 1, 2)
    }
    found = life(write(tmp_path / "rank0_trace.json", events(nested)), unit="layers.1")
    assert all(0 <= row.start_ns <= row.end_ns <= found.span_ns for row in found.rows)


def test_names_are_a_strangers_words(tmp_path):
    evil = {name.replace("layers.1", "<script>alert(1)</script>\x1b[2J$x_1$"): times for name, times in RANGES.items()}
    path = write(tmp_path / "rank0_trace.json", events(evil))
    report = build(path)
    assert report.lifetime is not None
    assert "<script>" not in page(report)
    assert "\x1b" not in render(report)


def test_one_line_says_why_there_is_none(tmp_path, capsys):
    foreign = write_kernels(tmp_path / "rank0_trace.json.gz", [("gemm", None, 7, 10, 100)])
    assert "Life of a parameter: the traces have no FSDP:: ranges" in render(build(foreign))
    assert build(foreign).to_json()["lifetime"] is None
    assert "Life of a parameter: no trace" in page(build(foreign))
    untraced = write_recording(tmp_path / "untraced")
    assert "Life of" not in render(build(untraced))
    assert main(["report", str(untraced), "--unit", "layers.1"]) == 2
    assert "--unit layers.1: no trace with a whole step" in capsys.readouterr().err
    assert main(["report", str(foreign), "--parameter", "layers.1.w.weight"]) == 2
    assert "--parameter layers.1.w.weight: the traces have no FSDP:: ranges" in capsys.readouterr().err


def test_a_wrong_name_is_one_line_with_those_there_are(capsys):
    path = str(RECORDED / "h200x2_fsdp2")
    assert main(["report", path, "--unit", "layers.99"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "--unit layers.99" in said.err
    assert "tok_embeddings, norm, lm_head; layers.0 to layers.15" in said.err
    assert main(["report", path, "--parameter", "layers.3.nothing.weight"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "it has layers.3.attention_norm.weight, layers.3.attention.wq.weight" in said


def test_a_real_step_of_an_h200_with_bytes_of_trace_snapshot_and_configuration():
    """1B on FSDP4 × TP2: a layer has 30,408,704 + 4,096 elements per tensor-parallel rank, norms whole."""
    report = build(RECORDED / "h200_1b_fsdp4_tp2", wanted=Wanted(parameter="layers.3.feed_forward.w1.weight"))
    found = report.lifetime
    assert found is not None
    elements = 30_412_800
    sizes = {row.what: (row.bytes, row.source) for row in found.of_kind("storage")}
    assert sizes == {
        "sharded parameters": (elements, "configuration"),
        "all-gather input": (elements // 2, "trace"),
        "all-gather output": (2 * elements, "trace"),
        "unsharded parameters": (2 * elements, "snapshot"),
        "unsharded gradients": (2 * elements, "configuration"),
        "reduce-scatter input": (4 * elements, "trace"),
        "gradient shards": (elements, "configuration"),
    }
    order = [row.what for row in found.rows if row.kind != "compute" and row.phase in ("all", "backward")]
    assert order == [
        "sharded parameters",
        "all-gather input",
        "all-gather output",
        "all_gather",
        "unsharded parameters",
        "unsharded gradients",
        "reduce-scatter input",
        "reduce_scatter",
        "gradient shards",
    ]
    one = found.parameter
    assert one is not None
    assert (one.whole, one.gathered, one.shard) == ((8192, 2048), (4096, 2048), (1024, 2048))
    assert (one.gathered_bytes, one.shard_bytes) == (16 * MIB, 8 * MIB)
    assert {row.dimension for row in found.of_kind("communication")} == {"mesh_dp_shard"}
    matching = [c for c in report.overlap["cross_rank"]["collectives"] if c["wait_ns"]]
    for row in found.of_kind("communication"):
        waits = [(c["wait_ns"]["0"], c["last_rank"]) for c in matching if c["kind"] == row.what and "0" in c["wait_ns"]]
        assert (row.wait_ns, row.last_rank) in waits


def test_figures_of_the_page_are_those_of_json(tmp_path, capsys):
    file = tmp_path / "report.html"
    assert main(["report", str(RECORDED / "h200x2_fsdp2"), "--unit", "layers.2", "--json", "--html", str(file)]) == 0
    said = json.loads(capsys.readouterr().out)["lifetime"]
    text = file.read_text()
    shown = Page(text).figures("start_ns")
    assert shown == [row["start_ns"] for row in said["rows"]]
    assert said["unit"] == "layers.2"
    assert all(first["start_ns"] <= second["start_ns"] for first, second in pairwise(said["rows"]))


def test_what_is_enlarged_holds_the_passes(written):
    found = life(written, unit="layers.1")
    forward, backward = windows(found)
    (first, second) = found.of_kind("compute")
    assert forward.start <= 0 + first.start_ns
    assert first.end_ns <= forward.end
    scatter = found.of_kind("communication")[-1]
    assert backward.start <= second.start_ns
    assert scatter.end_ns <= backward.end


@pytest.mark.shared_data
def test_a_single_shard_is_cast_and_copied_in_the_units_own_ranges(recordings):
    """TP2 without sharding on two H200s: the allocator's history has what the trace has no collective for."""
    report = build(recordings / "h200x2_tp2")
    found = report.lifetime
    assert found is not None
    assert found.of_kind("communication") == []
    assert "one shard: nothing is gathered or scattered, parameters are cast and copied" in found.notes
    sizes = {row.what: (row.bytes, row.source) for row in found.of_kind("storage")}
    assert sizes["unsharded parameters"] == (2 * 30_412_800, "snapshot")
    assert sizes["reduce-scatter input"] == (4 * 30_412_800, "snapshot")
    assert [row.phase for row in found.of_kind("storage") if row.what == "unsharded parameters"] == [
        "forward",
        "backward",
    ]
