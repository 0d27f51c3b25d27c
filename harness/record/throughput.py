"""Tokens per second, TFLOP/s and MFU of a step, and the peak that MFU is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch

# Dense bfloat16 peak of one device in TFLOP/s, from NVIDIA's datasheets (without sparsity, at boost clock).
# First match wins: the PCIe and NVL variants run slower than the SXM modules of the same name.
DATASHEET_TFLOPS: tuple[tuple[str, float], ...] = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H200 NVL", 835.0),
    ("H100", 989.0),
    ("H200", 989.0),
    ("GH200", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("A10", 125.0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """`tflops` is None where no peak is known: MFU is then unknown too, never measured against a guess. `source` says
    where the peak is from, or why there is none."""

    tflops: float | None = None
    source: str | None = None


def device_peak(device: torch.device, configured_tflops: float | None, no_peak: str | None = None) -> Peak:
    """`no_peak`: why that of the datasheet is none for what runs."""
    if configured_tflops is not None:
        return Peak(tflops=configured_tflops, source="recorder.peak_tflops")
    if no_peak is not None or device.type != "cuda":
        return Peak(source=no_peak)
    return datasheet_peak(torch.cuda.get_device_name(device))


def datasheet_peak(name: str) -> Peak:
    """By the name that the driver gives, such as `NVIDIA A100-SXM4-80GB`."""
    words = name.replace("-", " ").split()
    for model, tflops in DATASHEET_TFLOPS:
        if all(word in words for word in model.split()):
            return Peak(tflops=tflops, source=f"datasheet: {model}, dense bfloat16")
    return Peak()


class Figures(TypedDict):
    """None where unknown."""

    tokens_per_s: float | None
    tflops_per_s: float | None
    mfu_pct: float | None
    mfu_peak_source: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Figures of one device: the work of a rank's data is shared by `devices_per_token` devices.

    `flops_per_token` are those of the model (forward and backward, no recomputation), so MFU is that of PaLM
    (arXiv 2204.02311, appendix B). All are unknown if `known` is False: a step that sends nothing (rehearsal) takes
    no time that a rate could be made of.
    """

    peak: Peak
    flops_per_token: int | None
    devices_per_token: int
    known: bool = True

    def of_step(self, tokens: int | None, wall_ns: int | None) -> Figures:
        unknown = tokens is None or not wall_ns or not self.known
        per_second = None if unknown else tokens / (wall_ns / 1e9) / self.devices_per_token  # type: ignore[operator]
        known = per_second is not None and self.flops_per_token is not None
        tflops = per_second * self.flops_per_token / 1e12 if known else None  # type: ignore[operator]
        has_mfu = tflops is not None and self.peak.tflops is not None
        return {
            "tokens_per_s": per_second,
            "tflops_per_s": tflops,
            "mfu_pct": 100 * tflops / self.peak.tflops if has_mfu else None,  # type: ignore[operator]
            "mfu_peak_source": self.peak.source if has_mfu else None,
        }
