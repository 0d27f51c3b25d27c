"""What a machine can do, read from a file: exact where it was measured, sensible between, one line for a bad file."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

import pytest

from harness.errors import InputError, UsageError
from harness.ledger import hardware
from harness.ledger.hardware import Hardware, UnmeasuredError
from harness.ledger.hardware_points import (
    COLLECTIVE_KINDS,
    Collective,
    Kernel,
    MatrixProduct,
    Overlap,
    Peaks,
    Provenance,
)
from harness.ledger.hardware_rules import Point, attention_flops, between, by_size, roofline_ns, sent_share
from harness.ledger.hardware_text import report

ABOUT = Provenance(device="a device", mode="real", ranks=2, date="2026-11-30", command="none", source="made up")
MIB = 2**20
SIZES = [2**power for power in range(3, 32)]


@pytest.fixture(scope="module")
def h200() -> Hardware:
    return hardware.load("h200")


def test_the_shipped_calibration_is_found_by_its_device_and_says_where_it_is_from(h200):
    assert "h200" in hardware.shipped()
    assert hardware.fitting("NVIDIA H200") == "h200"
    assert hardware.fitting("a device that nobody has") is None
    assert h200.provenance.device == "NVIDIA H200"
    assert h200.provenance.mode == "real", "times of ranks that share a GPU are not a cluster's"
    assert (hardware.SHIPPED / "h200.json").stat().st_size < 200_000


def test_a_file_is_read_as_it_was_written(h200, tmp_path):
    path = tmp_path / "copy.json"
    path.write_text(json.dumps(h200.to_json()))

    assert hardware.load(str(path)) == h200


def test_exact_at_every_measured_point(h200):
    for p in h200.matrix_products:
        assert h200.matmul_ns(p.dtype, p.m, p.n, p.k, p.layout) == p.ns
    for a in h200.attention:
        shape = {name: getattr(a, name) for name in ("batch", "queries", "keys", "heads", "kv_heads", "head_dim")}
        assert h200.attention_ns(a.direction, a.dtype, **shape, causal=a.causal) == a.ns
    for k in h200.kernels:
        assert h200.kernel_ns(k.kind, k.bytes) == k.ns
    for c in h200.collectives:
        assert h200.collective_ns(c.kind, c.ranks, c.bytes) == c.ns
    for cost in h200.host:
        assert h200.host_ns(cost.kind) == cost.ns


def test_what_moves_more_bytes_takes_no_less_time(h200):
    for kind in {point.kind for point in h200.kernels}:
        times = [h200.kernel_ns(kind, size) for size in SIZES if size >= MIB]  # below, kernels of one kind are several
        assert times == sorted(times), kind
    for kind in COLLECTIVE_KINDS:
        times = [h200.collective_ns(kind, 2, size) for size in SIZES]
        assert times == sorted(times), kind


def test_twice_the_work_takes_no_less_time(h200):
    lengths = [256 * 2**power for power in range(8)]
    for dtype in h200.peaks.flops_per_s:
        for m in lengths:
            for n, k in ((512, 2048), (2048, 2048), (4096, 4096), (14336, 4096)):
                once = h200.matmul_ns(dtype, m, n, k)
                for twice in ((2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)):
                    assert h200.matmul_ns(dtype, *twice) >= once, (dtype, m, n, k, twice)
    heads = {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 64}
    for direction in ("forward", "backward"):
        times = [h200.attention_ns(direction, "bfloat16", queries=n, keys=n, **heads) for n in lengths]
        assert times == sorted(times)


def test_products_left_out_are_predicted_from_the_others(h200):
    """pytest -rP shows the figures of docs/calibration.md."""
    points = [p for p in h200.matrix_products if p.dtype == "bfloat16"]
    errors = []
    for p in points:
        others = dataclasses.replace(h200, matrix_products=[q for q in points if q is not p])
        errors.append(100 * abs(others.matmul_ns(p.dtype, p.m, p.n, p.k, p.layout) / p.ns - 1))
    errors.sort()
    median, mean, tenth = statistics.median(errors), statistics.mean(errors), errors[-len(errors) // 10]
    print(f"{len(points)} products left out: median {median:.1f} %, mean {mean:.1f} %, nine of ten {tenth:.1f} %")

    assert median < 4
    assert tenth < 15


def test_no_predicted_product_is_faster_than_the_roofline(h200):
    peak = h200.peaks.flops_per_s["bfloat16"]
    for m, n, k in ((4096, 4096, 4096), (16384, 14336, 4096), (65536, 8192, 28672)):
        assert h200.matmul_ns("bfloat16", m, n, k) > 2 * m * n * k / peak * 1e9


def test_by_size_is_a_line_between_points_and_a_bandwidth_beyond():
    points = [(1_000, 10), (3_000, 20), (5_000, 60)]

    assert [by_size(points, size) for size in (1, 1_000, 2_000, 3_000, 4_000, 5_000)] == [10, 10, 15, 20, 40, 60]
    assert by_size(points, 10_000) == 120


def test_between_points_the_efficiency_is_between_theirs():
    fast, slow = Point((1.0,), 100.0, 100), Point((4.0,), 700.0, 1600)  # with a latency of 100: half of it, and twice

    assert between((2.0,), 300.0, [fast, slow]) == 400, "in the middle their geometric mean, which is 1"
    assert between((1.0,), 300.0, [fast, slow]) == 200, "another mask at the same place has its efficiency"
    for far in (1e-9, 1e9):
        assert 200 < between((far,), 300.0, [fast, slow]) < 800


def test_roofline_is_what_takes_longer():
    assert roofline_ns(flops=4e9, size=1.0, flops_per_s=2e12, bytes_per_s=1e12) == pytest.approx(2e6)
    assert roofline_ns(flops=1.0, size=3e9, flops_per_s=2e12, bytes_per_s=1e12) == pytest.approx(3e6)


def test_causal_attention_is_a_triangle_and_backward_five_products_for_two():
    full = attention_flops("forward", 1, 8, 8, 2, 16, False)

    assert full == 4 * 2 * 8 * 8 * 16
    assert attention_flops("forward", 1, 8, 8, 2, 16, True) == full / 2
    assert attention_flops("backward", 1, 8, 8, 2, 16, False) == full * 5 / 2


def test_other_numbers_of_ranks_are_extrapolated_from_the_nearest(h200):
    made = Hardware(provenance=ABOUT, collectives=[Collective(kind="all_gather", ranks=2, bytes=1_000, ns=500)])

    assert made.measured_ranks("all_gather") == [2]
    assert made.collective_ns("all_gather", 4, 1_000) == 750  # each sends 3/4 of the whole instead of 1/2
    assert made.collective_ns("all_gather", 1, 1_000) == 0, "one rank sends nothing"
    assert sent_share("all_reduce", 4) == 1.5
    with pytest.raises(UnmeasuredError, match="has no reduce_scatter"):
        made.collective_ns("reduce_scatter", 2, 1_000)


def test_beside_one_another():
    made = Hardware(
        provenance=ABOUT,
        overlaps=[Overlap(kind="all_gather", ranks=2, compute_factor=1.1, collective_factor=1.2)],
    )

    assert made.overlap("all_gather", 8) == (1.1, 1.2)
    assert made.overlap("all_reduce", 8) == (1.0, 1.0)


def test_what_was_not_measured_is_no_guess_and_says_why():
    made = Hardware(provenance=ABOUT, unmeasured={"kernels": "its ranks were killed"})

    with pytest.raises(UnmeasuredError, match=r"a device has no adamw kernels: its ranks were killed"):
        made.kernel_ns("adamw", 1)
    with pytest.raises(UnmeasuredError, match="products in bfloat16"):
        made.matmul_ns("bfloat16", 1, 1, 1)
    with pytest.raises(UnmeasuredError, match="attention forward in float32"):
        made.attention_ns("forward", "float32", batch=1, queries=1, keys=1, heads=1, kv_heads=1, head_dim=1)
    with pytest.raises(UnmeasuredError, match="no host time for step"):
        made.host_ns("step")
    assert made.kernel_ns("adamw", 0) == 0, "no bytes, no kernel"


PEAKS = {"flops_per_s": {"bfloat16": 1e12}, "flops_source": "", "bytes_per_s": 1e12, "bytes_source": ""}
POINT = {"kind": "fill", "bytes": 8, "ns": 5}
GOOD = Hardware(provenance=ABOUT, kernels=[Kernel(**POINT)]).to_json()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "truncated"),
        ("[]", "Expected `object`"),
        ("{", "truncated"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("{}", "schema_version 1 .it says None"),
        (json.dumps({**GOOD, "schema_version": 2}), "it says 2"),
        (json.dumps({**GOOD, "provenance": {}}), "missing required field `device`"),
        (json.dumps({**GOOD, "kernels": [{**POINT, "ns": 0}]}), r"\$.kernels\[0\].ns"),
        (json.dumps({**GOOD, "kernels": [{**POINT, "ns": 1.5}]}), r"\$.kernels\[0\].ns"),
        (json.dumps({**GOOD, "kernels": [{**POINT, "kind": "magic"}]}), "invalid enum value 'magic'"),
        (json.dumps({**GOOD, "kernels": [POINT, {**POINT, "ns": 6}]}), "kernels: .* more than once"),
        (json.dumps({**GOOD, "peaks": {"flops_per_s": {"int4": 1}}}), "peaks"),
        (json.dumps({**GOOD, "peaks": {**PEAKS, "bytes_per_s": 1e-300}}), r"\$.peaks.bytes_per_s"),
        (json.dumps({**GOOD, "peaks": {**PEAKS, "flops_per_s": {"bfloat16": 1e-300}}}), r"\$.peaks.flops_per_s"),
        (json.dumps({**GOOD, "collectives": [{"kind": "send", "ranks": 1, "bytes": 8, "ns": 5}]}), r"\.ranks"),
    ],
)
def test_a_bad_file_is_one_line_with_its_place(text, says, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)

    with pytest.raises(InputError, match=says) as raised:
        hardware.load(str(path))

    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(b"\x80\xff\x00")

    with pytest.raises(InputError, match="is not a JSON object"):
        hardware.load(str(path))


def test_no_such_file_names_those_that_are_shipped(tmp_path):
    with pytest.raises(UsageError, match=r"no such file.*shipped: .*h200.*meshscope calibrate"):
        hardware.load(str(tmp_path / "missing.json"))
    with pytest.raises(UsageError, match=r"is not a file.*shipped: .*h200"):
        hardware.load(str(tmp_path))


def test_report_shows_every_section_and_what_is_missing(h200):
    text = report(h200)

    for expected in (
        "NVIDIA H200",
        "2048 to 8192",
        "log_softmax",
        "fsdp_forward_unit",
        "all_gather",
        "first_collective",
    ):
        assert expected in text
    made = Hardware(
        provenance=ABOUT,
        peaks=Peaks(flops_per_s={"float32": 1e12}, flops_source="here", bytes_per_s=1e9, bytes_source="here"),
        matrix_products=[
            MatrixProduct(dtype="float32", layout="weight_gradient", m=128, n=64, k=32, ns=1_000),
            MatrixProduct(dtype="float32", layout="input_gradient", m=32, n=64, k=128, ns=2_000),
        ],
        unmeasured={"collectives": "one rank"},
    )
    row = next(line for line in report(made).splitlines() if "64 to 128" in line)
    assert row.split() == ["float32", "64", "to", "128", "32", "n/a", "0.262", "0.524"], "one linear layer, 32 tokens"
    assert "collectives: one rank" in report(made)


def test_every_path_of_the_folder_is_read():
    for path in Path(hardware.SHIPPED).iterdir():
        assert hardware.read(path).provenance.source
