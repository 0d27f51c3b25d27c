"""What a report says of reserved bytes that were unused: the figures of `meshscope whatif`, and how sure they are."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from whatif.program import MIB, Program

from harness.cli import main
from harness.report import build, reserved
from harness.report.finding import Finding
from harness.text import size

H200 = Path(__file__).parents[1] / "whatif" / "h200"


def holes(conf: str = "") -> Program:
    """Blocks of 300 MiB, every other freed, then one of 500 MiB, which fits into none of the holes."""
    program = Program(conf)
    held = [program.alloc(300 * MIB, line=1) for _ in range(10)]
    for block in held[::2]:
        program.free(block)
    program.alloc(500 * MIB, line=2)
    return program


def write(folder: Path, program: Program, *, rank: int = 0, skip: int = 0) -> Path:
    path = folder / f"rank{rank}_snapshot.pickle"
    path.write_bytes(pickle.dumps(program.snapshot(skip), protocol=4))
    return path


def unused(path: Path) -> list[Finding]:
    return [finding for finding in build(path).findings if "unused_bytes" in finding.evidence]


def what_if(capsys, path: Path, *options: str) -> list[dict]:
    assert main(["whatif", str(path), "--json", *options]) == 0
    [file] = json.loads(capsys.readouterr().out)["files"]
    return file["devices"][0]["cases"]


def test_figures_are_those_of_whatif(tmp_path, capsys):
    path = write(tmp_path, holes())
    recorded, other = what_if(capsys, path, "--alloc-conf", "expandable_segments:True")
    [found] = unused(tmp_path)
    assert found.evidence == {
        "peak_reserved_bytes": recorded["peak_reserved_bytes"],
        "unused_bytes": recorded["at_peak"]["unused_bytes"],
        "pending_bytes": 0,
        "expandable_segments_reserved_bytes": other["peak_reserved_bytes"],
    }
    assert found.evidence["unused_bytes"] == 1500 * MIB
    assert found.severity == "medium"
    assert found.title.endswith(
        f"; with expandable_segments:True {size(other['peak_reserved_bytes'])} would have been reserved (predicted)"
    )
    assert found.where == f"rank 0; {size(1500 * MIB)} large, stream 0"


def test_a_setting_that_reserves_more_is_said_to_as_an_h200_did():
    [found] = unused(H200 / "fsdp2.pickle.gz")
    measured = json.loads((H200 / "measured.json").read_text())["fsdp2"]["expandable_segments:True"]
    assert found.evidence["expandable_segments_reserved_bytes"] == measured > found.evidence["peak_reserved_bytes"]
    assert f"with expandable_segments:True {size(measured)} would" in found.title
    assert found.advice.startswith("No setting tried would reserve less. meshscope whatif ")
    assert found.severity == "low"


def test_with_expandable_segments_the_other_setting_is_without(tmp_path, capsys):
    program = holes("max_split_size_mb:200,expandable_segments:True")
    program.free(program.alloc(900 * MIB))
    program.alloc(2 * MIB)
    conf = "max_split_size_mb:200,expandable_segments:False"
    path = write(tmp_path, program)
    _, other = what_if(capsys, path, "--alloc-conf", conf)
    [found] = unused(path)
    assert found.evidence["without_expandable_segments_reserved_bytes"] == other["peak_reserved_bytes"]
    assert f"with {conf} {size(other['peak_reserved_bytes'])} would" in found.title


def waiting() -> Program:
    """Five blocks of 300 MiB, of which the last finds the others freed and not yet reusable, beside one of 100 MiB."""
    program = Program()
    program.alloc(100 * MIB)
    for _ in range(4):
        program.free(program.alloc(300 * MIB), pending=True)
    program.alloc(300 * MIB)
    return program


@pytest.mark.parametrize(("skip", "about"), [(0, ""), (2, "about ")])
def test_blocks_that_wait_for_a_stream(tmp_path, capsys, skip, about):
    """Beyond doubt even where the history starts after the first block."""
    path = write(tmp_path, waiting(), skip=skip)
    reusable = what_if(capsys, path, "--without-pending")[-1]
    [found] = unused(path)
    assert found.evidence["pending_bytes"] == found.evidence["unused_bytes"] == 1200 * MIB
    assert found.evidence["without_pending_reserved_bytes"] == reusable["peak_reserved_bytes"] == 400 * MIB
    assert found.evidence.get("doubt_bytes") == (int(0.033 * 1600 * MIB) if skip else None)
    assert found.title == (
        f"{size(1200 * MIB)} of {size(1600 * MIB)} reserved were unused at the peak, {size(1200 * MIB)} of it freed "
        f"and waiting for a stream; with freed blocks reusable at once {about}{size(400 * MIB)} would have been "
        "reserved (predicted)"
    )
    assert "Set PYTORCH_ALLOC_CONF" not in found.advice, "blocks that wait do so in expandable segments, too"


def test_what_a_start_in_the_middle_leaves_open_is_no_figure(tmp_path):
    """Laid out afresh, the holes are not there: the recorded settings alone then differ by all that was unused."""
    [found] = unused(write(tmp_path, holes(), skip=30))
    assert found.evidence["doubt_bytes"] == 1500 * MIB
    assert found.title == f"{size(1500 * MIB)} of {size(3500 * MIB)} reserved were unused at the peak"
    assert f"a doubt of {size(1500 * MIB)}" in found.advice
    assert "No setting" not in found.advice


def test_a_history_too_long_to_replay_is_left_to_the_command(tmp_path, monkeypatch):
    path = write(tmp_path, holes())
    monkeypatch.setattr(reserved, "EVENTS_REPLAYED", 31)
    [found] = unused(tmp_path)
    assert found.evidence == {"peak_reserved_bytes": 3500 * MIB, "unused_bytes": 1500 * MIB, "pending_bytes": None}
    assert found.advice == (
        f"meshscope whatif {path} --alloc-conf expandable_segments:True says what another setting would have reserved "
        "(32 events)."
    )


def test_nothing_is_predicted_by_a_model_that_does_not_reproduce_the_recording(tmp_path):
    program = holes()
    program.conf = "roundup_power2_divisions:2"
    [found] = unused(write(tmp_path, program))
    assert found.evidence == {"peak_reserved_bytes": 3500 * MIB, "unused_bytes": 1500 * MIB, "pending_bytes": None}


def test_the_worst_of_several_ranks(tmp_path):
    little = Program()
    little.free(little.alloc(300 * MIB))
    little.alloc(500 * MIB)
    for rank, program in enumerate([little, holes(), little]):
        write(tmp_path, program, rank=rank)
    [found] = unused(tmp_path)
    assert found.where.startswith("rank 1, the most of 3 snapshots; ")


@pytest.mark.parametrize(("hole", "beside", "said"), [(300, 5000, True), (300, 6000, False), (200, 1000, False)])
def test_little_is_not_worth_a_word(tmp_path, hole, beside, said):
    """MiB: less than 5 % of what is reserved, and less than 256 MiB."""
    program = Program()
    program.free(program.alloc(hole * MIB))
    program.alloc(beside * MIB)
    write(tmp_path, program)
    assert bool(unused(tmp_path)) is said
