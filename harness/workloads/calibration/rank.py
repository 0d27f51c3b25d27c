"""One rank of a calibration: `python -m harness.workloads.calibration.rank DIR`, started as any run is.

DIR/plan.json says which sections. Rank 0 writes DIR/sections/NAME.json as each ends, and a row for the launcher to
follow; an exception ends the rank as it does in any run, and the launcher starts again without that section.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness import recording
from harness.calibration import machine_path, read_plan, section_path
from harness.config_json import from_json
from harness.record.nvml import DeviceMemory
from harness.record.provenance import versions
from harness.record.throughput import datasheet_peak
from harness.trainer.trainer import abandoned_collectives, local_device, process_group
from harness.worker import prepare
from harness.workloads.calibration import collectives, host, kernels, memory, operators, sustained
from harness.workloads.calibration.clock import Clock
from harness.workloads.calibration.sizes import Sizes, sizes

ALL_RANKS = ("sustained", "host", "collectives", "overlaps", "outside_memory")
"""Sections in which every rank takes part; the others are measured on rank 0, while the rest wait."""


def main(directory: Path) -> None:
    rank = int(os.environ["RANK"])
    prepare(directory, rank)
    config = from_json((directory / "config.json").read_bytes())
    plan = read_plan(directory)
    device = local_device(config.training.device)
    chosen = sizes(device.type, quick=plan.quick)
    clock = Clock(device, blocks=chosen.blocks, block_ns=chosen.block_ns)
    if rank == 0:
        recording.write_json(machine_path(directory), machine(device))
    context = memory.context_bytes(device) if "outside_memory" in plan.sections else 0
    steps = recording.steps_path(directory, rank)
    steps.parent.mkdir(parents=True, exist_ok=True)
    with (
        process_group(device, config.training.init_timeout_s),
        abandoned_collectives(device),
        open(steps, "a", encoding="utf-8") as rows,
    ):
        for number, section in enumerate(plan.sections):
            began = time.monotonic()
            points = measure(section, clock, chosen, context) if rank == 0 or section in ALL_RANKS else []
            if rank == 0:
                recording.write_json(section_path(directory, section), {"points": [asdict(one) for one in points]})
                row = {"step": number, "section": section, "points": len(points), "seconds": time.monotonic() - began}
                rows.write(json.dumps(row) + "\n")
                rows.flush()
            clock.release()
            dist.barrier()


def measure(section: str, clock: Clock, chosen: Sizes, context: int) -> list[Any]:
    """The points of a section, dataclasses of `harness.ledger.hardware`."""
    if section == "matrix_products":
        return list(operators.matrix_products(clock, chosen))
    if section == "attention":
        return list(operators.attention(clock, chosen))
    if section == "kernels":
        return list(kernels.kernels(clock, chosen))
    if section == "sustained":
        return list(sustained.sustained(clock))
    if section == "host":
        return list(host.host(clock, chosen))
    if section == "collectives":
        return list(collectives.collectives(clock, chosen))
    if section == "overlaps":
        return list(collectives.overlaps(clock, chosen))
    return list(memory.outside_memory(clock.device, context))


def machine(device: torch.device) -> dict[str, Any]:
    """What runs here, for the provenance of the points; the peak of the datasheet, None where there is none."""
    nvml = DeviceMemory(device)
    nvml.close()
    known = versions(nvml.driver_version)
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else None
    peak = datasheet_peak(name) if name else None
    return {
        "device": name,
        **{key: known[key] for key in ("torch", "cuda", "cudnn", "nccl", "driver")},
        "peak_tflops": peak.tflops if peak else None,
        "peak_source": peak.source if peak else None,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
