"""Tokens per second, TFLOP/s and MFU, by hand; nothing is claimed where something is unknown."""

import pytest
import torch

from harness.record.throughput import DATASHEET_TFLOPS, Peak, Throughput, datasheet_peak, device_peak

UNKNOWN = {"tokens_per_s": None, "tflops_per_s": None, "mfu_pct": None, "mfu_peak_source": None}


def test_figures_are_per_device() -> None:
    throughput = Throughput(peak=Peak(tflops=100.0, source="s"), flops_per_token=10**9, devices_per_token=4)
    # 80,000 tokens in 0.5 s over 4 devices: 40,000 a second each, 40 TFLOP/s, 40 % of 100.
    assert throughput.of_step(80_000, 500_000_000) == {
        "tokens_per_s": 40_000.0,
        "tflops_per_s": pytest.approx(40.0),
        "mfu_pct": pytest.approx(40.0),
        "mfu_peak_source": "s",
    }


def test_unknown_stays_unknown() -> None:
    nothing = Throughput(peak=Peak(), flops_per_token=None, devices_per_token=1)
    assert nothing.of_step(None, 10) == UNKNOWN
    assert nothing.of_step(10, 10**9) == {**UNKNOWN, "tokens_per_s": 10.0}
    assert device_peak(torch.device("cpu"), None) == Peak()
    assert device_peak(torch.device("cpu"), 2.0) == Peak(tflops=2.0, source="recorder.peak_tflops")


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GeForce RTX 9999", None),
    ],
)
def test_datasheet_by_device_name(name: str, tflops: float | None) -> None:
    assert datasheet_peak(name).tflops == tflops


def test_no_entry_is_hidden_by_one_before() -> None:
    for model, tflops in DATASHEET_TFLOPS:
        assert datasheet_peak(f"NVIDIA {model}").tflops == tflops
