"""What-if against an H200: the snapshot of a run without a setting tells what runs with one reserved, to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli import main

FOLDER = Path(__file__).parent / "h200"
MEASURED = json.loads((FOLDER / "measured.json").read_text())


@pytest.mark.parametrize("name", ["fsdp2", "fsdp4_tp2"])
def test_a_run_without_settings_predicts_those_with_one(capsys: pytest.CaptureFixture[str], name: str) -> None:
    measured: dict[str, int] = MEASURED[name]
    asked = [word for conf in measured for word in ("--alloc-conf", conf)]
    limit = ["--limit-gib", repr(MEASURED["total_bytes"] / 2**30)]
    assert main(["whatif", str(FOLDER / f"{name}.pickle.gz"), *asked, *limit, "--json"]) == 0
    [device] = json.loads(capsys.readouterr().out)["files"][0]["devices"]
    assert device["fidelity"]["exact"] is True
    found = {case["alloc_conf"]: case["peak_reserved_bytes"] for case in device["cases"]}
    assert {conf: found[conf] for conf in measured} == measured
    assert all(case["out_of_memory"] is None for case in device["cases"])
