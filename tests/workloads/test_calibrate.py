"""`meshscope calibrate` on CPUs: a calibration that the ledger can read, and what becomes of a section that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from harness import calibration
from harness.cli import main
from harness.errors import EXIT_FAILED, EXIT_OK, EXIT_PARTIAL, EXIT_UNAVAILABLE, EXIT_USAGE
from harness.ledger import hardware
from harness.ledger.hardware_points import COLLECTIVE_KINDS, KERNEL_KINDS, HostKind

PROGRAM = (str(Path(__file__).parent / "calibration_program.py"),)


@pytest.mark.distributed
def test_two_ranks_on_cpus_are_measured(tmp_path, capsys):
    path = tmp_path / "cpu.json"

    code = main(["calibrate", "--mode", "cpu", "--quick", "--json", "--out", str(path)])

    captured = capsys.readouterr()
    found = hardware.load(str(path))
    assert json.loads(captured.out) == json.loads(path.read_text()) == found.to_json()
    lost = [name for name in found.unmeasured if name.startswith("host: ")]
    assert code == (EXIT_PARTIAL if lost else EXIT_OK), captured.err
    assert set(found.unmeasured) - set(lost) == {"overlaps", "outside_memory", "sustained"}, "no CPU has any of these"
    assert found.provenance.mode == "cpu"
    assert found.provenance.ranks == 2
    assert found.provenance.torch

    assert {point.kind for point in found.kernels} == set(KERNEL_KINDS)
    assert {point.kind for point in found.collectives} == set(COLLECTIVE_KINDS)
    named = {kind for name in lost for kind in name.removeprefix("host: ").split(", ")}
    assert {cost.kind for cost in found.host} == set(get_args(HostKind)) - named
    assert {"forward_operator", "backward_operator", "collective", "optimizer_step", "step"} <= {
        cost.kind for cost in found.host
    }, "these are no differences, which noise could hide"
    assert {(p.dtype, p.layout) for p in found.matrix_products} == {
        (dtype, layout)
        for dtype in ("bfloat16", "float32")
        for layout in ("forward", "input_gradient", "weight_gradient")
    }
    assert found.attention_ns(
        "backward", "float32", batch=1, queries=128, keys=128, heads=8, kv_heads=4, head_dim=32
    ) > found.attention_ns("forward", "float32", batch=1, queries=16, keys=16, heads=8, kv_heads=4, head_dim=32)
    assert "collectives: 10 points in" in captured.err


@pytest.fixture
def failing(monkeypatch, tmp_path):
    """Ranks of `PROGRAM` in which the named sections fail, and no whole steps, which the test above has."""
    monkeypatch.setattr(calibration, "PROGRAM", PROGRAM)
    monkeypatch.setattr(calibration, "_whole_steps", lambda *arguments: [])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run(*sections: str) -> int:
        monkeypatch.setenv("TORCH_FAILING", ",".join(sections))
        return main(["calibrate", "--mode", "cpu", "--out", str(tmp_path / "found.json")])

    return run


def starts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("meshscope-calibrate-*/*"))


@pytest.mark.distributed
def test_a_section_that_fails_loses_no_other(failing, tmp_path, capsys):
    assert failing("attention") == EXIT_PARTIAL

    found = hardware.load(str(tmp_path / "found.json"))
    assert found.unmeasured["attention"] == "rank 0: RuntimeError: no attention today"
    assert found.unmeasured["collectives"].startswith("its points cannot be: ")
    assert found.kernel_ns("elementwise", 1000) == 10, "measured by the second start"
    assert found.provenance.device == "a device"
    assert found.peaks is not None
    assert found.peaks.bytes_per_s == 1e11
    assert found.peaks.flops_per_s == {"bfloat16": 1e11}
    with pytest.raises(hardware.UnmeasuredError, match="no attention today"):
        found.attention_ns("forward", "bfloat16", batch=1, queries=1, keys=1, heads=1, kv_heads=1, head_dim=1)
    message = capsys.readouterr().err
    assert "meshscope calibrate: error: attention not measured: rank 0: RuntimeError: no attention today" in message
    assert starts(tmp_path) == ["start0", "start1"], "what the ranks wrote is kept, and named"
    assert f"what its ranks wrote: {tmp_path}" in message


@pytest.mark.distributed
def test_what_fails_twice_in_a_row_is_not_tried_for_every_section(failing, tmp_path, capsys):
    assert failing(*calibration.SECTIONS) == EXIT_FAILED

    assert "error: nothing could be measured: rank 0: RuntimeError: no matrix_products today" in capsys.readouterr().err
    assert starts(tmp_path) == ["start0", "start1"]
    assert not (tmp_path / "found.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--nproc", "0"], EXIT_USAGE, "world_size=0"),
        (["--mode", "rehearsal"], EXIT_USAGE, "invalid choice"),
        (["--nccl", "lib.so"], EXIT_USAGE, "--nccl is for --mode shared-gpu only"),
        (["--out", "/no/such/folder/file.json"], EXIT_USAGE, "no file can be written there"),
        (["--out", "."], EXIT_USAGE, "no file can be written there"),
        (["--out", "/dev/zero"], EXIT_USAGE, "no file can be written there"),
        (["--mode", "cpu", "--out", "/proc/file.json"], EXIT_USAGE, "/proc cannot be written to"),
        (["--mode", "real", "--nproc", "99"], EXIT_UNAVAILABLE, "mode real needs one CUDA device per rank"),
    ],
)
def test_refused_before_anything_starts(arguments, code, says, capsys):
    try:
        found = main(["calibrate", *arguments])
    except SystemExit as error:
        found = error.code

    assert found == code
    message = capsys.readouterr().err
    assert says in message
    assert message.count("\n") == 1
