"""What a report says of float8: layers that were converted and left, the kernel that ran, and what is not in effect."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from written import write_recording

from harness import recording
from harness.config import Decoder, Parallelism, Trainer
from harness.config_json import to_dict
from harness.float8 import Float8
from harness.report import Report, build
from harness.report.text import render

OUTCOME = {
    "recipe": "rowwise",
    "torchao": "0.18.0",
    "emulated": False,
    "gpu_has_float8": True,
    "converted": {"wq": 2, "w1": 2},
    "left": {"wo": {"count": 2, "reason": "not in float8.linears"}},
}
HEAD = {"lm_head": {"count": 1, "reason": "the head is never converted"}}


def config(*, emulate: bool = False, cuda_graphs: bool = False) -> Trainer.Config:
    """Two stages of two tensor-parallel ranks."""
    made = Trainer.Config(
        name="float8",
        world_size=4,
        model=Decoder.Config(n_layers=4),
        parallelism=Parallelism.Config(pp=2, dp_shard=1, tp=2),
        float8=Float8.Config(recipe="rowwise", emulate=emulate),
    )
    made.compile.blocks = made.compile.cuda_graphs = cuda_graphs
    return made


def report(
    directory: Path, *, products: int | None = 7, configuration: Trainer.Config | None = None, **changes: Any
) -> Report:
    """Of a run whose ranks each had `products` in a traced step, or no trace."""
    outcome = OUTCOME | {"emulated": changes.get("emulated", False)} | changes
    made = configuration or config()
    write_recording(directory, config=to_dict(made), ranks=4, world_size=4, manifest={"mode": "real"})
    for rank in range(4):
        left = {**outcome["left"], **(HEAD if rank >= 2 else {})}
        recording.write_json(recording.rank_path(directory, rank), {"rank": rank, "float8": {**outcome, "left": left}})
        if products is not None:
            write_products(recording.trace_path(directory, 2, rank), rank, products)
    return build(directory)


def write_products(path: Path, rank: int, products: int) -> None:
    common = {"ph": "X", "pid": 1, "tid": 1}
    events = [common | {"cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 900}]
    events += [common | {"cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1}]
    events += [common | {"cat": "cpu_op", "name": "aten::_scaled_mm", "ts": 3 + i, "dur": 1} for i in range(products)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events, "distributedInfo": {"rank": rank, "world_size": 4}}, file)


def titles(found: Report) -> list[str]:
    return [finding.title for finding in found.findings if "loat8" in finding.title]


def test_layers_are_those_of_the_model_and_products_those_of_all_ranks(tmp_path: Path) -> None:
    """Both stages have two layers, which their tensor-parallel ranks share."""
    found = report(tmp_path)
    assert found.float8 is not None
    assert found.float8.converted == {"wq": 4, "w1": 4}
    assert found.float8.left == {("wo", "not in float8.linears"): 4, ("lm_head", "the head is never converted"): 1}
    assert found.float8.products == 4 * 7
    assert titles(found) == []
    line = (
        "float8: rowwise (torchao 0.18.0), 8 linear layers converted (wq, w1), 5 left (wo: not in float8.linears; "
        "lm_head: the head is never converted), _scaled_mm 28 times in the traces"
    )
    assert line in render(found)
    said = found.to_json()["float8"]
    assert (said["recipe"], said["products"], said["left"][1]["count"]) == ("rowwise", 28, 1)


def test_converted_layers_that_multiply_in_another_precision(tmp_path: Path) -> None:
    (title,) = titles(report(tmp_path, products=0))
    assert title == "Float8 was asked for, and no float8 product (_scaled_mm) is in the traces"


def test_no_layer_is_converted(tmp_path: Path) -> None:
    found = report(tmp_path, products=0, converted={}, left={"wq": {"count": 2, "reason": "24 is no multiple of 16"}})
    (title,) = titles(found)
    assert title == "Float8 was asked for, and no linear layer is converted"
    (finding,) = [one for one in found.findings if one.title == title]
    assert (finding.severity, finding.evidence["left_layers"]) == ("high", 5)
    assert finding.where == "wq: 24 is no multiple of 16"


@pytest.mark.parametrize(("gpu_has_float8", "count"), [(True, 1), (False, 0)])
def test_emulation_where_there_are_kernels(tmp_path: Path, gpu_has_float8: bool, count: int) -> None:
    found = report(
        tmp_path, products=0, emulated=True, gpu_has_float8=gpu_has_float8, configuration=config(emulate=True)
    )
    assert len(titles(found)) == count
    assert "emulated by products in float32" in render(found)


@pytest.mark.parametrize(
    ("products", "cuda_graphs"),
    [pytest.param(None, False, id="no trace"), pytest.param(0, True, id="replayed without a word")],
)
def test_what_cannot_be_seen_is_no_finding(tmp_path: Path, products: int | None, cuda_graphs: bool) -> None:
    made = config()
    if cuda_graphs:
        made = config(cuda_graphs=True)
        made.parallelism, made.world_size = Parallelism.Config(dp_shard=2, tp=2), 4
    found = report(tmp_path, products=products, configuration=made)
    assert found.float8 is not None
    assert found.float8.products is None
    assert titles(found) == []


def test_nothing_is_said_of_other_runs_and_of_what_is_none(tmp_path: Path) -> None:
    write_recording(tmp_path / "plain", config=to_dict(Trainer.Config(world_size=2)))
    assert build(tmp_path / "plain").float8 is None
    found = report(tmp_path / "garbled", converted=["wq"])
    assert found.float8 is None
    assert any("float8 is left out" in error.reason for error in found.errors)
