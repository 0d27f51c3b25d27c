"""Measuring what this machine can do: ranks started as those of a run are, their points put together. Free of torch.

A section that fails ends its ranks; they are started again for those after it, so that one failure loses nothing else,
and its reason is in `Hardware.unmeasured`.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import msgspec

from harness.config import Decoder, Parallelism, Trainer, Training
from harness.doctor import Choice
from harness.ledger.hardware import Hardware
from harness.ledger.hardware_points import DType, HostCost, HostKind, Kernel, MatrixProduct, Peaks, Provenance
from harness.ledger.hardware_rules import matmul_flops
from harness.masking import masked_arguments
from harness.modes import Start, launch_in_mode
from harness.recording import read_json, read_recording, write_json

SECTIONS = (
    "outside_memory",  # first: what other sections make NCCL allocate would be counted
    "matrix_products",
    "attention",
    "kernels",
    "sustained",
    "host",
    "collectives",
    "overlaps",
)
STEPS = "host: whole steps"
PROGRAM = ("-m", "harness.workloads.calibration.rank")
TIMEOUT_S = 180.0
"""For a section."""
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What the ranks of one start measure, in this order."""

    sections: list[str]
    quick: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """`missing`: section -> why it has no points, though another machine would have some, or this one should;
    `hardware.unmeasured` also names those that a machine of this kind has none of. `has_failed`: ranks that should have
    measured one did not."""

    hardware: Hardware
    missing: dict[str, str]
    has_failed: bool


def section_path(directory: Path, section: str) -> Path:
    return directory / "sections" / f"{section}.json"


def machine_path(directory: Path) -> Path:
    return directory / "machine.json"


def read_plan(directory: Path) -> Plan:
    return msgspec.convert(read_json(directory / "plan.json"), Plan)


def calibration_config(world_size: int) -> Trainer.Config:
    """What the launcher is told of the ranks: how many."""
    return Trainer.Config(name="calibrate", world_size=world_size)


def small_run(world_size: int, device: str, *, tp: int = 1) -> Trainer.Config:
    """A training whose kernels are next to nothing: what its steps take is the host's time. On GPUs with the layers of
    Llama 3.2 1B, 16. FSDP2 over the ranks that `tp` leaves."""
    layers = 16 if device == "cuda" else 4
    return Trainer.Config(
        name="calibrate",
        world_size=world_size,
        model=Decoder.Config(vocab_size=512, dim=128, n_layers=layers, n_heads=8, n_kv_heads=8, ffn_dim=256),
        parallelism=Parallelism.Config(tp=tp),
        training=Training.Config(
            device="cuda" if device == "cuda" else "cpu",
            steps=12,
            seq_len=64,
            # CPUs without units for bfloat16 emulate it.
            mixed_precision_param="bfloat16" if device == "cuda" else "float32",
        ),
    )


def calibrate(choice: Choice, start: Start, world_size: int, directory: Path, *, quick: bool, tell: Tell) -> Measured:
    """Measures in `directory`, where each start of ranks has a folder of its own with its logs; `tell` gets a line as
    each section ends. Raises KeyboardInterrupt once all ranks have ended."""
    config = calibration_config(world_size)
    config.training.device = choice.device
    absent, missing = _without_points(choice, world_size)
    left = [section for section in SECTIONS if section not in absent | missing]
    points: dict[str, list[Any]] = {}  # of the sections' dataclasses in harness.ledger.hardware
    machine: dict[str, Any] = {}
    starts = barren = 0
    has_failed = False
    while left:
        place = directory / f"start{starts}"
        starts += 1
        (place / "sections").mkdir(parents=True)
        write_json(place / "plan.json", {"sections": left, "quick": quick})
        status = launch_in_mode(start, config, place, program=PROGRAM, timeout_s=TIMEOUT_S, on_step=_teller(tell))
        if machine_path(place).exists():
            machine = read_json(machine_path(place))
        done = [section for section in left if section_path(place, section).exists()]
        for section in done:
            try:
                points[section] = _points(place, section)
            except msgspec.ValidationError as error:  # a figure that no machine has
                missing[section], has_failed = f"its points cannot be: {error}", True
        left, barren = left[len(done) :], 0 if done else barren + 1
        if left:
            reason = status.reason or "its ranks ended before it"
            lost = left if barren > 1 else left[:1]  # what fails twice in a row is no matter of the section
            missing |= dict.fromkeys(lost, reason)
            has_failed = True
            tell(f"{', '.join(lost)}: failed: {reason}")
            left = left[len(lost) :]
    if points:
        points["host"] = points.get("host", []) + _whole_steps(choice, start, world_size, directory, missing, tell)
        _name_absent_host_costs(points["host"], world_size, missing)
    return Measured(
        hardware=_assembled(choice, world_size, machine, points, absent | missing),
        missing=missing,
        has_failed=has_failed or STEPS in missing,
    )


def _without_points(choice: Choice, world_size: int) -> tuple[dict[str, str], dict[str, str]]:
    """Sections that this kind of machine has none of, and those that need more ranks or another mode; with reasons."""
    absent, missing = {}, {}
    if choice.device == "cpu":
        absent["sustained"] = "of a CPU all points are"
        absent["overlaps"] = "a CPU has no streams on which a collective runs beside compute"
        absent["outside_memory"] = "a CPU has no such memory"
    elif choice.mode == "shared-gpu":
        missing["outside_memory"] = "of a GPU that ranks share nobody can say whose memory it is"
    if world_size == 1:
        missing["collectives"] = "one rank sends nothing: they need two (--nproc 2)"
        if choice.device == "cuda":
            missing["overlaps"] = missing["collectives"]
    return absent, missing


def _teller(tell: Tell) -> Callable[[int, dict[str, Any]], None]:
    def on_step(rank: int, row: Mapping[str, Any]) -> None:
        if rank == 0:
            tell(f"{row['section']}: {row['points']} points in {row['seconds']:.1f} s")

    return on_step


def _whole_steps(
    choice: Choice, start: Start, world_size: int, directory: Path, missing: dict[str, str], tell: Tell
) -> list[HostCost]:
    """What a step of the trainer takes for its optimizer, and besides its phases: median of the untagged ones."""
    place = directory / "steps"
    place.mkdir()
    began = time.monotonic()
    status = launch_in_mode(start, small_run(world_size, choice.device), place, timeout_s=TIMEOUT_S)
    if status.state != "complete":
        missing[STEPS] = status.reason or "its ranks ended before it"
        tell(f"{STEPS}: failed: {missing[STEPS]}")
        return []
    rows = [row for row in read_recording(place).steps[0] if not row["tags"]]
    phases = [{name: phase["wall_ns"] for name, phase in row["phases"].items()} for row in rows]
    optimizer = statistics.median(phase["optimizer"] for phase in phases)
    rest = statistics.median(row["wall_ns"] - sum(phase.values()) for row, phase in zip(rows, phases, strict=True))
    tell(f"{STEPS}: 2 points in {time.monotonic() - began:.1f} s")
    return [HostCost(kind="optimizer_step", ns=round(optimizer)), HostCost(kind="step", ns=max(1, round(rest)))]


def _name_absent_host_costs(costs: list[HostCost], world_size: int, missing: dict[str, str]) -> None:
    """Those that no failure explains."""
    absent = sorted(set(get_args(HostKind)) - {cost.kind for cost in costs})
    if absent and "host" not in missing and STEPS not in missing:
        why = "they need two ranks (--nproc 2)" if world_size == 1 else "lost in this machine's noise"
        missing[f"host: {', '.join(absent)}"] = why


def _points(place: Path, section: str) -> list[Any]:
    types = get_type_hints(Hardware, include_extras=True)
    return cast(list[Any], msgspec.convert(read_json(section_path(place, section))["points"], types[section]))


def _assembled(
    choice: Choice,
    world_size: int,
    machine: Mapping[str, Any],
    points: Mapping[str, Any],
    unmeasured: dict[str, str],
) -> Hardware:
    hardware = Hardware(
        provenance=Provenance(
            device=machine.get("device") or cpu_name(),
            mode=choice.mode,
            ranks=world_size,
            date=time.strftime("%Y-%m-%d"),
            command=" ".join(["meshscope", *masked_arguments(sys.argv)[1:]]),
            source="measured by meshscope calibrate",
            host_cpu=cpu_name(),
            host_cores=os.cpu_count(),
            **{name: machine.get(name) for name in ("torch", "cuda", "cudnn", "nccl", "driver")},
        ),
        peaks=_peaks(points.get("matrix_products", []), points.get("kernels", []), machine),
        unmeasured=unmeasured,
    )
    return replace(hardware, **points)


def _peaks(products: list[MatrixProduct], kernels: list[Kernel], machine: Mapping[str, Any]) -> Peaks | None:
    """Operations: of the datasheet for bfloat16, else of the fastest product here. Bytes: of the largest elementwise
    kernel, since smaller ones are read from a cache."""
    streaming = max((k for k in kernels if k.kind == "elementwise"), key=lambda k: k.bytes, default=None)
    if streaming is None or not products:
        return None
    flops: dict[DType, float] = {}
    for product in products:
        rate = matmul_flops(product.m, product.n, product.k) / product.ns * 1e9
        flops[product.dtype] = max(rate, flops.get(product.dtype, 0.0))
    source = "the fastest product measured here"
    if machine.get("peak_tflops") is not None:
        flops["bfloat16"] = machine["peak_tflops"] * 1e12
        source = f"{machine['peak_source']}; float32: {source}"
    return Peaks(
        flops_per_s=flops,
        flops_source=source,
        bytes_per_s=streaming.bytes / streaming.ns * 1e9,
        bytes_source=f"an elementwise kernel of {streaming.bytes:,} bytes here",
    )


def cpu_name() -> str:
    """As the kernel calls it (Linux), else what Python knows of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
