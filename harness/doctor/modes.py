"""The mode a run can have on this machine, decided before anything starts and without importing torch."""

from __future__ import annotations

import importlib.util
import os
import runpy
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Literal, NamedTuple

from harness.config import Trainer
from harness.doctor.facts import ask_driver
from harness.errors import UnavailableError
from harness.nvml import NvmlError, read_machine, visible_gpus
from harness.recording import Mode
from harness.text import counted

INSTALL_TORCH = "pip install 'torch>=2.11,<2.14'"
# Least resident memory of a process that has imported torch and joined a group, what all share not counted.
RANK_MEMORY_BYTES = 128 * 2**20


class Choice(NamedTuple):
    """A mode, where its tensors live, how many CUDA devices there are for it, and the reason in words."""

    mode: Mode
    device: Literal["cuda", "cpu"]
    gpus: int
    why: str


def choose_mode(config: Trainer.Config, requested: Mode | None) -> Choice:
    """The mode to run `config` in.

    Without a request: `real` if there is a CUDA device for each rank, else `cpu` if the configuration lets it.
    Raises `UnavailableError` if this machine cannot do what is asked for.
    """
    if find_torch() is None:
        raise UnavailableError(f"torch is not installed: {INSTALL_TORCH}")
    wanted, ranks = config.training.device, config.world_size
    if requested == "rehearsal" and wanted == "cpu":
        return Choice("rehearsal", "cpu", 0, "on the CPU, as asked for")
    if requested == "cpu" or (requested is None and wanted == "cpu"):
        _require_memory(ranks)
        return Choice("cpu", "cpu", 0, "asked for")

    usable, why = usable_devices()
    short = f"{usable} usable CUDA devices for {ranks} ranks" + (f", {why}" if why else "")
    if requested == "rehearsal":
        if usable:
            return Choice("rehearsal", "cuda", usable, "on one GPU")
        if wanted == "auto":
            return Choice("rehearsal", "cpu", 0, f"on the CPU, no usable CUDA device: {why}")
        raise UnavailableError(
            f"mode rehearsal of training.device=cuda needs a CUDA device, here is none ({why}): use "
            "--training.device cpu, which tracks tensors instead of the CUDA allocator"
        )
    if requested == "shared-gpu":
        if not usable:
            raise UnavailableError(f"mode shared-gpu needs a CUDA device, here is none ({why}): use --mode rehearsal")
        return Choice("shared-gpu", "cuda", usable, f"{ranks} ranks on {counted(usable, 'GPU')}")
    if usable >= ranks:
        return Choice("real", "cuda", usable, f"{usable} CUDA devices")
    if requested is None and wanted == "auto":
        _require_memory(ranks)
        return Choice("cpu", "cpu", 0, short)
    raise UnavailableError(
        f"mode real needs one CUDA device per rank, here are {short}: lower --nproc, use --mode cpu, or --mode "
        "rehearsal for the memory of each rank"
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
