"""Everything `meshscope doctor` says, put together."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from harness import __version__
from harness.compilation import compiler
from harness.doctor import gpu_checks, shared_gpu
from harness.doctor.facts import Facts, TorchFacts, gather
from harness.doctor.findings import Check, Device, ModeState, Report
from harness.doctor.modes import INSTALL_TORCH, find_torch, memory_bytes
from harness.doctor.shared_gpu import Nccl
from harness.float8 import INSTALL
from harness.ledger import hardware
from harness.nvml import visible_gpus
from harness.variables import Library, Variable, configuration_files
from harness.variables import examine as examine_variables

OLDEST_TORCH = (2, 11)
# What NCCL's shared-memory transport needs on a host; containers start with 64 MiB unless told otherwise.
SHARED_MEMORY_BYTES = 256 * 2**20
REINSTALL_TORCH = (
    INSTALL_TORCH.replace("install", "install --force-reinstall") + " (python -c 'import torch' says more)"
)
REINSTALL_TORCHAO = (
    "pip install --force-reinstall --no-deps 'torchao>=0.17,<0.19' (python -c 'import torchao.float8' says more)"
)
UNAVAILABLE = ModeState(available=False, reason="see the checks that are not ok")
CUDA_BUILD = "install a CUDA build of torch: https://pytorch.org/get-started/locally"


def examine(environment: Mapping[str, str] = os.environ) -> Report:
    """Asks torch, the driver and NVML, each in its own process and with a timeout; never raises for what they do."""
    spec = find_torch()
    facts = gather(with_torch=spec is not None, with_torchao=spec is not None and _installed("torchao"))
    report = Report()
    report.devices = _devices(facts, environment)
    report.variables = _variables(
        report, facts, environment, Path(spec.origin).parent if spec and spec.origin else None
    )
    usable = gpu_checks.usable_devices(facts, environment)
    nccl = shared_gpu.find_nccl(facts.torch, environment)
    cpu = facts.torch.gloo and _recent(facts.torch)
    report.modes = {
        "cpu": ModeState(available=True) if cpu else UNAVAILABLE,
        "real": ModeState(available=True, max_ranks=usable) if cpu and facts.torch.nccl and usable else UNAVAILABLE,
        "shared-gpu": _shared_gpu(facts, nccl, usable) if cpu else UNAVAILABLE,
        "rehearsal": ModeState(available=True) if cpu else UNAVAILABLE,
    }
    report.checks = [
        *_software(),
        *_torch(facts, nccl, environment),
        *gpu_checks.examine(facts, environment),
        *_host(has_gpus=bool(report.devices)),
        *_settings(report.variables, environment),
        _torchao(facts),
        _compiler(),
        *_calibrations(facts),
    ]
    return report


def _shared_gpu(facts: Facts, nccl: Nccl | str, usable: int) -> ModeState:
    reason = shared_gpu.missing(nccl, facts.cuda, usable)
    if reason is not None:
        return ModeState(available=False, reason=reason)
    fitting = shared_gpu.fewest_multiprocessors(facts.cuda) // shared_gpu.FEWEST_KERNELS_AT_ONCE
    return ModeState(available=True, max_ranks=usable * fitting)


def _devices(facts: Facts, environment: Mapping[str, str]) -> list[Device]:
    if facts.machine is None:
        return []
    visible = gpu_checks.seen_by_cuda(facts)
    if visible is None:
        visible = [gpu for gpu, _ in visible_gpus(facts.machine, environment.get("CUDA_VISIBLE_DEVICES"))]
    return [
        Device(gpu=gpu, cuda_devices=[place for place, seen in enumerate(visible) if seen == gpu])
        for gpu in facts.machine.gpus
    ]


def _software() -> list[Check]:
    python = Check(group="software", name="python", state="ok", value=f"{platform.python_version()} ({sys.executable})")
    requirements = _requirements()
    if requirements is None:
        value = f"{__version__}, from a folder: its dependencies are not checked"
        return [python, Check(group="software", name="meshscope", state="ok", value=value)]
    missing = [name for name in requirements if name != "torch" and not _installed(name)]
    if not missing:
        return [python, Check(group="software", name="meshscope", state="ok", value=__version__)]
    value = f"{__version__}, without {', '.join(missing)}"
    fix = "pip install " + " ".join(missing)
    return [python, Check(group="software", name="meshscope", state="missing", value=value, fix=fix)]


def _requirements() -> list[str] | None:
    """The distributions that the installed meshscope cannot do without; None if it runs from a folder.

    Not those of its extras: no command uses them.
    """
    try:
        lines = importlib.metadata.requires("meshscope") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    names = (re.match(r"[\w.-]+", line) for line in lines if not re.search(r"\bextra\s*==", line))
    return [name[0] for name in names if name]


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _recent(torch: TorchFacts) -> bool:
    return torch.release is not None and torch.release >= OLDEST_TORCH


def _torch(facts: Facts, nccl: Nccl | str, environment: Mapping[str, str]) -> list[Check]:
    torch = facts.torch
    if torch.version is None:
        if find_torch() is None:
            return [Check(group="torch", name="torch", state="missing", value="not installed", fix=INSTALL_TORCH)]
        value = f"import fails: {torch.error or 'it says nothing'}"
        return [Check(group="torch", name="torch", state="missing", value=value, fix=REINSTALL_TORCH)]
    recent = _recent(torch)
    build = f"CUDA {torch.cuda}" if torch.cuda else "CPU build"
    checks = [
        Check(
            group="torch",
            name="torch",
            state="ok" if recent else "missing",
            value=f"{torch.version}, {build}" + (f", cuDNN {torch.cudnn}" if torch.cudnn else ""),
            fix=None if recent else INSTALL_TORCH,
        )
    ]
    if torch.error:
        fix = "see the driver and the GPUs below"
        checks.append(Check(group="torch", name="CUDA in torch", state="missing", value=torch.error, fix=fix))
    backends = [name for name, there in (("gloo", torch.gloo), ("nccl", torch.nccl)) if there]
    checks.append(
        Check(
            group="torch",
            name="backends",
            state="ok" if torch.gloo else "missing",
            value=", ".join(backends) or "none",
            fix=None if torch.gloo else INSTALL_TORCH,
        )
    )
    if torch.nccl:
        checks += _nccl(torch, nccl, environment)
    elif facts.machine and facts.machine.gpus:
        value = "CPU build on a machine with GPUs" if not torch.cuda else "built without NCCL"
        checks.append(Check(group="torch", name="NCCL", state="missing", value=value, fix=CUDA_BUILD))
    checks += [
        Check(group="torch", name="on import", state="warning", value=text, fix="see the text")
        for text in torch.warnings
    ]
    return checks


def _nccl(torch: TorchFacts, found: Nccl | str, environment: Mapping[str, str]) -> list[Check]:
    loaded = torch.nccl_loaded
    where = torch.libraries.get("libnccl")
    value = f"{loaded} loaded ({where})" if loaded else "linked into torch"
    checks = [Check(group="torch", name="NCCL", state="ok", value=f"{value}, torch was built with {torch.nccl_built}")]
    needed = ".".join(map(str, shared_gpu.OLDEST_NCCL))
    major = (torch.cuda or "").partition(".")[0]
    fix: str | None = f"pip install 'nvidia-nccl-cu{major}>={needed}'"
    if isinstance(found, Nccl):
        preloaded = f", NCCL {found.version} of {found.preload} preloaded" if found.preload else ""
        value, fix = f"several, with NCCL_MULTI_RANK_GPU_ENABLE=1{preloaded}", None
    elif named := environment.get(shared_gpu.LIBRARY_VARIABLE):
        value, fix = f"one: {found}", f"name another library than {shared_gpu.LIBRARY_VARIABLE}={named}, or unset it"
    else:
        value = f"one: several need NCCL {needed}"
    checks.append(Check(group="torch", name="ranks per GPU", state="optional" if fix else "ok", value=value, fix=fix))
    return checks


def _host(*, has_gpus: bool) -> list[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = memory_bytes()
    checks = [
        Check(group="host", name="cores", state="ok", value=str(cores)),
        Check(group="host", name="memory", state="ok", value=f"{memory / 2**30:.1f} GiB"),
    ]
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        enough = size >= SHARED_MEMORY_BYTES or not has_gpus
        checks.append(
            Check(
                group="host",
                name="/dev/shm",
                state="ok" if enough else "missing",
                value=f"{size / 2**30:.2f} GiB",
                fix=None if enough else "NCCL needs more: start the container with --shm-size=1g or --ipc=host",
            )
        )
    return checks


def _variables(
    report: Report, facts: Facts, environment: Mapping[str, str], torch_folder: Path | None
) -> list[Variable]:
    variables, failures = examine_variables(libraries(facts, torch_folder), environment, facts.torch.release)
    report.errors += [{"file": str(path), "offset": None, "reason": reason} for path, reason in failures]
    return variables


def libraries(facts: Facts, torch_folder: Path | None) -> list[Library]:
    """The files that a run here loads: as torch's process had them mapped, else where the wheels put them."""
    torch = facts.torch
    on_disk = {}
    if torch_folder:
        folders = (torch_folder / "lib", torch_folder.parent / "nvidia" / "nccl" / "lib")
        on_disk = {path.name.partition(".so")[0]: path for folder in folders for path in folder.glob("*.so*")}

    def find(name: str) -> Library:
        mapped = torch.libraries.get(name)
        path = Path(mapped) if mapped else on_disk.get(name)
        if path is None and torch.version is None:
            return Library(name=name, path=None, reason="torch does not load")
        if path is None and torch.cuda is None:
            return Library(name=name, path=None, absent="not in this build", reason="torch is a CPU build")
        return Library(name=name, path=path, reason="not found where torch is installed")

    found = {name: find(name) for name in ("libtorch_cuda", "libtorch_cpu", "libc10_cuda", "libc10", "libnccl")}
    if found["libnccl"].path is None and found["libtorch_cuda"].path:  # a build that links NCCL statically
        found["libnccl"] = Library(name="libnccl", path=found["libtorch_cuda"].path)
    if torch.version is not None and torch.cuda is None:
        # The allocator's names are in libc10 whatever it was built for, and no CPU build allocates with them.
        found["libc10"] = found["libc10_cuda"]
        found["libcuda"] = Library(name="libcuda", path=None, absent="not in this build", reason="torch is a CPU build")
    else:
        path = Path(facts.cuda.library) if facts.cuda.library else None
        found["libcuda"] = Library(name="libcuda", path=path, reason=facts.cuda.error or "no driver")
    return list(found.values())


def _settings(variables: list[Variable], environment: Mapping[str, str]) -> list[Check]:
    checks = []
    for variable in variables:
        if variable.value is None or variable.state == "live":
            continue
        name = f"{variable.name}={variable.value}"
        if variable.state == "deprecated alias":
            fix = f"set {variable.alias_of} instead"
        elif variable.state in ("ignored", "not in this build"):
            fix = f"unset {variable.name}"
        elif "did you mean" in variable.evidence:
            fix = "check its spelling"
        else:
            continue
        value = f"{name}: {variable.state}, {variable.evidence}"
        checks.append(Check(group="environment", name="variables", state="warning", value=value, fix=fix))
    for path, names in configuration_files(environment, Path.home()).items():
        value = f"{path} sets {', '.join(names) or 'nothing'}"
        checks.append(Check(group="environment", name="NCCL settings", state="ok", value=value))
    return checks


def _calibrations(facts: Facts) -> list[Check]:
    """What times are predicted with for each kind of GPU here."""
    checks = []
    for device in sorted({gpu.name for gpu in facts.machine.gpus} if facts.machine else ()):
        shipped = hardware.fitting(device)
        value = f"{device}: {shipped}, shipped" if shipped else f"{device}: none shipped: its times are not predicted"
        state: Literal["ok", "optional"] = "ok" if shipped else "optional"
        fix = None if shipped else "meshscope calibrate --out FILE"
        checks.append(Check(group="optional", name="calibration", state=state, value=value, fix=fix))
    return checks


def _torchao(facts: Facts) -> Check:
    """Whether float8 layers can be had: the distribution alone does not say that its libraries go with this torch."""
    found, torch = facts.torchao, facts.torch
    fix: str | None = INSTALL
    if found is None:
        value = "none: a run with float8.recipe needs it"
    elif torch.version is None:
        value, fix = "not tried: torch does not load", "see torch above"
    elif found.version is None:
        value = f"import fails: {found.error or 'it says nothing'}"
        fix = REINSTALL_TORCHAO
    else:
        value, fix = found.version, None
    return Check(group="optional", name="torchao", state="optional" if fix else "ok", value=value, fix=fix)


def _compiler() -> Check:
    found = compiler()
    return Check(
        group="optional",
        name="C++ compiler",
        state="ok" if found else "optional",
        value=found or "none: torch.compile with inductor (compile.blocks, compile.loss) needs one on CPUs",
        fix=None if found else "apt-get install g++",
    )
