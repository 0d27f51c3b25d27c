"""The mode a run can have on this machine, decided before anything starts and without importing torch."""

from __future__ import annotations

import importlib.util
import os
import runpy
from importlib.machinery import ModuleSpec
from pathlib import Path

from harness.config import Trainer
from harness.doctor.facts import ask_driver
from harness.errors import UnavailableError
from harness.nvml import NvmlError, read_machine, visible_gpus
from harness.recording import Mode

INSTALL_TORCH = "pip install 'torch>=2.11,<2.14'"
LATER_MODES = ("shared-gpu", "rehearsal")
# Least resident memory of a process that has imported torch and joined a group, what all share not counted.
RANK_MEMORY_BYTES = 128 * 2**20


def choose_mode(config: Trainer.Config, requested: Mode | None) -> tuple[Mode, str]:
    """The mode to run `config` in, and the reason in words.

    Without a request: `real` if there is a CUDA device for each rank, else `cpu` if the configuration lets it.
    Raises `UnavailableError` if this machine cannot do what is asked for.
    """
    if requested in LATER_MODES:
        raise UnavailableError(f"mode {requested} is not in this version: use --mode real or --mode cpu")
    if find_torch() is None:
        raise UnavailableError(f"torch is not installed: {INSTALL_TORCH}")
    wanted = config.training.device
    if requested == "cpu" or (requested is None and wanted == "cpu"):
        _require_memory(config.world_size)
        return "cpu", "asked for"

    usable, why = usable_devices()
    short = f"{usable} usable CUDA devices for {config.world_size} ranks" + (f", {why}" if why else "")
    if usable >= config.world_size:
        return "real", f"{usable} CUDA devices"
    if requested is None and wanted == "auto":
        _require_memory(config.world_size)
        return "cpu", short
    raise UnavailableError(
        f"mode real needs one CUDA device per rank, here are {short}: lower --nproc or use --mode cpu"
    )


def _require_memory(world_size: int) -> None:
    """Raises `UnavailableError` for more ranks than this machine's memory can hold even if their model is nothing."""
    memory = memory_bytes()
    most = max(1, memory // RANK_MEMORY_BYTES)
    if world_size > most:
        raise UnavailableError(
            f"world_size={world_size}: this machine's {memory / 2**30:.1f} GiB of memory hold at most {most} "
            "ranks of mode cpu: lower it (--nproc), or predict it with meshscope ledger"
        )


def memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def usable_devices() -> tuple[int, str | None]:
    """How many CUDA devices CUDA_VISIBLE_DEVICES leaves to the installed torch, and why there are none."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        count = len(visible_gpus(read_machine(), variable))
    except NvmlError as error:  # some containers have CUDA without NVML
        count = len(ask_driver().identifiers or ())
        if count == 0:
            return 0, f"NVML: {error}"
    if count == 0:
        return 0, "NVML reports none" if variable is None else f"CUDA_VISIBLE_DEVICES={variable}"
    if not cuda_of_torch():
        return 0, "torch is a CPU build"
    return count, None


def find_torch() -> ModuleSpec | None:
    """Where torch would be imported from, None if it cannot be."""
    try:
        return importlib.util.find_spec("torch")
    except (ImportError, ValueError):  # something in its place refuses to be imported
        return None


def cuda_of_torch() -> str | None:
    """The CUDA version torch was built for, read from its version file; None for a CPU build or no torch."""
    spec = find_torch()
    if spec is None or spec.origin is None:
        return None
    try:
        cuda: str | None = runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda")
    except OSError:
        return None
    return cuda
