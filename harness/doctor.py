"""What this machine can run, what is missing, and the command that provides it.

Nothing here imports torch but `examine`, and that only when it is called.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import runpy
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import pynvml

from harness.config import Trainer
from harness.errors import UnavailableError
from harness.recording import Mode

INSTALL_TORCH = "pip install 'torch>=2.11,<2.14'"
OLDEST_TORCH = (2, 11)
# What NCCL's shared-memory transport needs on a host; containers start with 64 MiB unless told otherwise.
SHARED_MEMORY_BYTES = 256 * 2**20
LATER_MODES = ("shared-gpu", "rehearsal")
# Least resident memory of a process that has imported torch and joined a group, what all share not counted.
RANK_MEMORY_BYTES = 128 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    name: str
    uuid: str
    memory_bytes: int
    driver: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line: `fix` is the command or step that turns `missing` into `ok`."""

    name: str
    state: Literal["ok", "missing", "optional"]
    value: str
    fix: str | None = None


@dataclass(kw_only=True, slots=True)
class Report:
    """`modes` maps a mode to the greatest number of ranks, 0 if it cannot run, None if only memory limits it."""

    checks: list[Check] = field(default_factory=list)
    modes: dict[str, int | None] = field(default_factory=dict)
    gpus: list[Gpu] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": 1, "mode": None, **msgspec.to_builtins(self), "errors": []}


def choose_mode(config: Trainer.Config, requested: Mode | None) -> tuple[Mode, str]:
    """The mode to run `config` in, and the reason in words.

    Without a request: `real` if there is a CUDA device for each rank, else `cpu` if the configuration lets it.
    Raises `UnavailableError` if this machine cannot do what is asked for.
    """
    if requested in LATER_MODES:
        raise UnavailableError(f"mode {requested} is not in this version: use --mode real or --mode cpu")
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError(f"torch is not installed: {INSTALL_TORCH}")
    wanted = config.training.device
    if requested == "cpu" or (requested is None and wanted == "cpu"):
        _require_memory(config.world_size)
        return "cpu", "asked for"

    usable, why = usable_gpus()
    short = f"{len(usable)} usable CUDA devices for {config.world_size} ranks" + (f", {why}" if why else "")
    if len(usable) >= config.world_size:
        return "real", f"{len(usable)} CUDA devices"
    if requested is None and wanted == "auto":
        _require_memory(config.world_size)
        return "cpu", short
    raise UnavailableError(
        f"mode real needs one CUDA device per rank, here are {short}: lower --nproc or use --mode cpu"
    )


def _require_memory(world_size: int) -> None:
    """Raises `UnavailableError` for more ranks than this machine's memory can hold even if their model is nothing."""
    most = max(1, _memory_bytes() // RANK_MEMORY_BYTES)
    if world_size > most:
        raise UnavailableError(
            f"world_size={world_size}: this machine's {_memory_bytes() / 2**30:.1f} GiB of memory hold at most {most} "
            "ranks of mode cpu: lower it (--nproc), or predict it with meshscope ledger"
        )


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def usable_gpus() -> tuple[list[Gpu], str | None]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves and the installed torch can use, and why there are none."""
    gpus, why = visible_gpus()
    if gpus and not _cuda_build():
        return [], "torch is a CPU build"
    return gpus, why


def visible_gpus() -> tuple[list[Gpu], str | None]:
    """The GPUs NVML reports, less those that CUDA_VISIBLE_DEVICES hides, and why there are none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"NVML: {error}"
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        gpus = [
            Gpu(
                name=pynvml.nvmlDeviceGetName(handle),
                uuid=pynvml.nvmlDeviceGetUUID(handle),
                memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                driver=driver,
            )
            for handle in handles
        ]
    except pynvml.NVMLError as error:
        return [], f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()
    return _select_visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _select_visible(gpus: list[Gpu], variable: str | None) -> tuple[list[Gpu], str | None]:
    """CUDA's rule: indices or prefixes of UUIDs, in the order given, up to the first that is none (CUDA C++
    Programming Guide, environment variables)."""
    if variable is None:
        return gpus, None if gpus else "NVML reports none"
    visible = []
    for entry in variable.split(","):
        word = entry.strip()
        if word.isdecimal():
            match = gpus[int(word) : int(word) + 1]
        else:
            match = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
        if len(match) != 1:
            break
        visible += match
    return visible, None if visible else f"CUDA_VISIBLE_DEVICES={variable}"


def _cuda_build() -> str | None:
    """The CUDA version torch was built for, read from its version file; None for a CPU build or no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    cuda: str | None = runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda")
    return cuda


def examine() -> Report:
    """Everything `meshscope doctor` says."""
    report = Report()
    report.checks.append(Check(name="python", state="ok", value=f"{platform.python_version()} ({sys.executable})"))
    gloo, nccl = _examine_torch(report.checks)
    report.gpus, why_no_gpu = visible_gpus()
    _examine_gpus(report, why_no_gpu, gloo_only=gloo and not nccl)
    _examine_host(report)
    report.checks.append(_examine_hta())
    report.modes = {
        "cpu": None if gloo else 0,
        "real": len(report.gpus) if nccl else 0,
        **dict.fromkeys(LATER_MODES, 0),
    }
    return report


def _examine_torch(checks: list[Check]) -> tuple[bool, bool]:
    """Whether torch has gloo, and CUDA with NCCL."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:  # OSError: a CUDA library it links is missing
        reason = str(error).splitlines()[0]
        checks.append(Check(name="torch", state="missing", value=reason, fix=INSTALL_TORCH))
        return False, False
    version = torch.__version__
    major, minor = (int(part) for part in version.split(".")[:2])
    recent = (major, minor) >= OLDEST_TORCH
    checks.append(
        Check(
            name="torch",
            state="ok" if recent else "missing",
            value=f"{version}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"),
            fix=None if recent else INSTALL_TORCH,
        )
    )
    gloo = recent and dist.is_available() and dist.is_gloo_available()
    nccl = recent and dist.is_available() and dist.is_nccl_available() and torch.version.cuda is not None
    names = (["gloo"] if gloo else []) + ([_nccl_name()] if nccl else [])
    checks.append(
        Check(
            name="backends",
            state="ok" if gloo else "missing",
            value=", ".join(names) or "none",
            fix=None if gloo else INSTALL_TORCH,
        )
    )
    return gloo, nccl


def _nccl_name() -> str:
    import torch.cuda.nccl

    return "NCCL " + ".".join(str(part) for part in torch.cuda.nccl.version())


def _examine_gpus(report: Report, why_none: str | None, *, gloo_only: bool) -> None:
    checks = report.checks
    if not report.gpus:
        fix = "only for mode real: a machine with NVIDIA GPUs and their driver (nvidia-smi must list them)"
        checks.append(Check(name="GPUs", state="optional", value=f"none ({why_none})", fix=fix))
        return
    kinds = sorted({f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in report.gpus})
    checks.append(Check(name="GPUs", state="ok", value=f"{len(report.gpus)} × {'; '.join(kinds)}"))
    checks.append(Check(name="driver", state="ok", value=f"{report.gpus[0].driver} (NVML answers)"))
    if gloo_only:
        fix = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
        checks.append(Check(name="CUDA in torch", state="missing", value="CPU build on a machine with GPUs", fix=fix))
    if shutil.which("nvidia-cuda-mps-control") is None:
        checks.append(Check(name="MPS", state="optional", value="not installed", fix="comes with the NVIDIA driver"))
        return
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    running = (pipe / "control").exists()
    checks.append(
        Check(
            name="MPS",
            state="ok" if running else "optional",
            value="running" if running else "not running",
            fix=None if running else "nvidia-cuda-mps-control -d",
        )
    )


def _examine_host(report: Report) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    report.checks.append(Check(name="cores", state="ok", value=str(cores)))
    report.checks.append(Check(name="memory", state="ok", value=f"{_memory_bytes() / 2**30:.1f} GiB"))
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return
    size = shutil.disk_usage(shared).total
    enough = size >= SHARED_MEMORY_BYTES or not report.gpus
    report.checks.append(
        Check(
            name="/dev/shm",
            state="ok" if enough else "missing",
            value=f"{size / 2**30:.2f} GiB",
            fix=None if enough else "NCCL needs more: start the container with --shm-size=1g or --ipc=host",
        )
    )


def _examine_hta() -> Check:
    if importlib.util.find_spec("hta") is None:
        return Check(name="HTA", state="optional", value="not installed", fix="pip install 'meshscope[hta]'")
    return Check(name="HTA", state="ok", value="installed")
