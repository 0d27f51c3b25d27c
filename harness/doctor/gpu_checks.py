"""The driver, the GPUs, who else uses them, and which of them CUDA_VISIBLE_DEVICES leaves to a process here."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from harness.doctor.facts import Facts
from harness.doctor.findings import Check
from harness.mps import CONTROL as DAEMON
from harness.nvml import SLOWING_REASONS, Gpu, Machine, visible_gpus

ONLY_FOR_REAL = "only for mode real: a machine with NVIDIA GPUs and their driver (nvidia-smi must list them)"
# What the driver or the loader says (cuda.h: CUresult) -> what helps.
REPAIRS = {
    "SYSTEM_NOT_READY": "systemctl start nvidia-fabricmanager (GPUs joined by NVSwitch need it)",
    "SYSTEM_DRIVER_MISMATCH": "reboot: the driver was replaced while its old kernel module runs",
    "COMPAT_NOT_SUPPORTED": "remove CUDA's compat folder from LD_LIBRARY_PATH",
    "libcuda": "in a container: start it with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility",
}
# Where MPS listens unless CUDA_MPS_PIPE_DIRECTORY says otherwise (NVIDIA's MPS documentation).
DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"


def usable_devices(facts: Facts, environment: Mapping[str, str]) -> int:
    """How many CUDA devices a run here can use, as torch counts them; by NVML and the rules if torch cannot say."""
    if facts.torch.cuda_devices is not None:
        return facts.torch.cuda_devices
    if facts.machine is None:
        return 0
    return len(visible_gpus(facts.machine, environment.get("CUDA_VISIBLE_DEVICES")))


def seen_by_cuda(facts: Facts) -> list[Gpu] | None:
    """The GPU behind cuda:0, cuda:1, … by the driver's own answer; None if it or NVML has none."""
    if facts.cuda.identifiers is None or facts.machine is None:
        return None
    owners = {uuid.partition("-")[2]: gpu for gpu in facts.machine.gpus for uuid in _uuids(gpu)}
    if any(identifier not in owners for identifier in facts.cuda.identifiers):
        return None
    return [owners[identifier] for identifier in facts.cuda.identifiers]


def _uuids(gpu: Gpu) -> list[str]:
    return [gpu.uuid, *(device.uuid for device in gpu.mig_devices)]


def examine(facts: Facts, environment: Mapping[str, str]) -> list[Check]:
    machine = facts.machine
    if machine is None or not machine.gpus:
        return [_none(facts)]
    kinds = Counter(f"{gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB" for gpu in machine.gpus)
    value = "; ".join(f"{count} × {kind}" for kind, count in kinds.items())
    return [
        Check(group="GPUs", name="GPUs", state="ok", value=value),
        *(
            Check(group="GPUs", name="GPUs", state="warning", value=text, fix="nvidia-smi; perhaps a reboot")
            for text in machine.unreadable
        ),
        _driver(facts, machine, hidden=not visible_gpus(machine, environment.get("CUDA_VISIBLE_DEVICES"))),
        *(check for gpu in machine.gpus for check in _gpu(gpu, facts)),
        _visible(facts, machine, environment),
        _mps(environment),
    ]


def _none(facts: Facts) -> Check:
    reasons = [f"NVML: {facts.nvml_error}"] if facts.nvml_error else ["NVML reports none"]
    reasons += facts.machine.unreadable if facts.machine else []
    why = "; ".join(reasons)
    if facts.cuda.identifiers:
        value = f"CUDA sees {len(facts.cuda.identifiers)}, without clocks, processes and driver memory ({why})"
        fix = "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return Check(group="GPUs", name="GPUs", state="warning", value=value, fix=fix)
    fix = "reboot: the driver was replaced while its old kernel module runs" if "mismatch" in why else ONLY_FOR_REAL
    return Check(group="GPUs", name="GPUs", state="optional", value=f"none ({why})", fix=fix)


def _driver(facts: Facts, machine: Machine, *, hidden: bool) -> Check:
    """`hidden`: CUDA_VISIBLE_DEVICES leaves no GPU, so CUDA has no answer, and that is no fault of the driver."""
    value = f"{machine.driver}, CUDA up to {machine.cuda}"
    built = facts.torch.cuda
    if built and machine.cuda and int(machine.cuda.partition(".")[0]) < int(built.partition(".")[0]):
        # A driver runs any minor version of its major version of CUDA (CUDA compatibility guide).
        fix = f"a newer driver, or a torch for CUDA {machine.cuda}: https://pytorch.org/get-started/locally"
        return Check(group="GPUs", name="driver", state="missing", value=f"{value}; torch needs {built}", fix=fix)
    reason = facts.cuda.error or facts.torch.cuda_reason
    if hidden or not reason:
        return Check(group="GPUs", name="driver", state="ok", value=value)
    fix = next((step for sign, step in REPAIRS.items() if sign in reason), "nvidia-smi")
    return Check(group="GPUs", name="driver", state="missing", value=f"{value}; {reason}", fix=fix)


def _gpu(gpu: Gpu, facts: Facts) -> list[Check]:
    def check(name: str, value: str, fix: str, state: Literal["missing", "warning"] = "warning") -> Check:
        return Check(group="GPUs", name=name, state=state, value=f"GPU {gpu.index}: {value}", fix=fix)

    slowing = [reason for reason in gpu.clock_reasons or () if reason in SLOWING_REASONS]
    checks = [
        Check(group="GPUs", name=f"GPU {gpu.index}", state="ok", value=_identity(gpu)),
        Check(group="GPUs", name="settings", state="ok", value=f"GPU {gpu.index}: {_settings(gpu)}"),
        Check(
            group="GPUs",
            name="clocks",
            state="warning" if slowing else "ok",
            value=f"GPU {gpu.index}: {_clocks(gpu)}" + (f"; held down by {', '.join(slowing)}" if slowing else ""),
            fix=f"nvidia-smi -i {gpu.index} -q -d PERFORMANCE,TEMPERATURE,POWER" if slowing else None,
        ),
    ]
    if not _supported(gpu, facts.torch.architectures):
        built = ", ".join(facts.torch.architectures)
        value = f"compute capability {gpu.compute_capability}, torch was built for {built}"
        checks.append(check("architecture", value, "a build of torch for this GPU", "missing"))
    if gpu.compute_mode == "prohibited":
        fix = f"nvidia-smi -i {gpu.index} -c DEFAULT (as root)"
        checks.append(check("compute mode", "prohibited: no process may use it", fix, "missing"))
    if gpu.persistence is False:
        fix = f"nvidia-smi -i {gpu.index} -pm 1 (as root)"
        checks.append(check("persistence", "off: the first CUDA call after each run takes seconds", fix))
    if gpu.ecc_uncorrected_errors:
        value = f"{gpu.ecc_uncorrected_errors} uncorrected memory errors since the driver was loaded"
        checks.append(check("ECC", value, f"nvidia-smi -i {gpu.index} -q -d ECC,ROW_REMAPPER"))
    if gpu.mig:
        value = f"MIG on, {len(gpu.mig_devices)} devices: a process sees one of them, so one rank"
        fix = f"nvidia-smi -i {gpu.index} -mig 0 (as root), or name one in CUDA_VISIBLE_DEVICES for each process"
        checks.append(check("MIG", value, fix))
    for process in gpu.processes or ():
        memory = "" if process.memory_bytes is None else f", {process.memory_bytes / 2**30:.2f} GiB"
        value = f"in use by process {process.pid} ({process.name or 'not in this namespace'}, {process.kind}{memory})"
        checks.append(check("other process", value, "end it, or leave this GPU out of CUDA_VISIBLE_DEVICES"))
    return checks


def _identity(gpu: Gpu) -> str:
    used = "" if gpu.memory_used_bytes is None else f" ({gpu.memory_used_bytes / 2**30:.2f} used)"
    capability = gpu.compute_capability and f"sm_{gpu.compute_capability.replace('.', '')}"
    parts = [f"{gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB{used}", gpu.uuid, gpu.pci_bus_id, capability]
    return ", ".join(part for part in parts if part)


def _settings(gpu: Gpu) -> str:
    switches = {"persistence": gpu.persistence, "ECC": gpu.ecc, "MIG": gpu.mig}
    words = {None: "unknown", True: "on", False: "off"}
    parts = [f"compute mode {gpu.compute_mode or 'unknown'}", *(f"{key} {words[on]}" for key, on in switches.items())]
    if gpu.processes is None:
        parts.append("processes unknown")
    return ", ".join(parts)


def _clocks(gpu: Gpu) -> str:
    clocks = (
        ("SM", gpu.sm_clock_mhz, gpu.sm_clock_max_mhz),
        ("memory", gpu.memory_clock_mhz, gpu.memory_clock_max_mhz),
    )
    parts = [f"{name} {now} of {greatest} MHz" for name, now, greatest in clocks if now is not None]
    if gpu.temperature_c is not None:
        parts.append(f"{gpu.temperature_c} °C")
    if gpu.power_w is not None and gpu.power_limit_w is not None:
        parts.append(f"{gpu.power_w:.0f} of {gpu.power_limit_w:.0f} W")
    if gpu.clock_reasons is not None:
        parts.append(f"limits: {', '.join(gpu.clock_reasons) or 'none'}")
    return ", ".join(parts) or "unknown"


def _supported(gpu: Gpu, architectures: list[str]) -> bool:
    """Whether torch has code for it: of its major version and no later minor one, or PTX of no later version."""
    if gpu.compute_capability is None or not architectures:
        return True
    major, minor = (int(part) for part in gpu.compute_capability.split("."))
    for architecture in architectures:
        kind, _, digits = architecture.rstrip("af").partition("_")
        if not digits.isdecimal():
            return True
        built = divmod(int(digits), 10)
        if (kind == "compute" and built <= (major, minor)) or (built[0] == major and built[1] <= minor):
            return True
    return False


def _visible(facts: Facts, machine: Machine, environment: Mapping[str, str]) -> Check:
    """The rules over NVML's list held against the driver's own answer, which also knows CUDA_DEVICE_ORDER and MIG."""
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    setting = "CUDA_VISIBLE_DEVICES is not set" if variable is None else f"CUDA_VISIBLE_DEVICES={variable}"
    expected = visible_gpus(machine, variable)
    by_rules = f"{setting}: {_listed([gpu for gpu, _ in expected])}"

    def warning(value: str, fix: str) -> Check:
        return Check(group="GPUs", name="visible", state="warning", value=value, fix=fix)

    if not expected:
        return warning(by_rules, "unset CUDA_VISIBLE_DEVICES, or name GPUs that are here")
    if facts.cuda.identifiers is None:
        return Check(group="GPUs", name="visible", state="ok", value=f"{by_rules} (by NVML, CUDA did not answer)")
    if facts.cuda.identifiers == [uuid.partition("-")[2] for _, uuid in expected]:
        return Check(group="GPUs", name="visible", state="ok", value=by_rules)
    seen = seen_by_cuda(facts)
    if seen is None:
        return warning(f"{setting}: CUDA sees a device that NVML does not list", "nvidia-smi -L")
    by_driver = f"{setting}: {_listed(seen)}"
    if any(gpu.mig for gpu in machine.gpus):
        return Check(group="GPUs", name="visible", state="ok", value=by_driver)
    if len(seen) != len(expected):
        return warning(f"{by_driver}, which is not what NVML lists", "nvidia-smi -L")
    order = environment.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    return warning(
        f"{by_driver} (CUDA_DEVICE_ORDER={order}; nvidia-smi counts otherwise)", "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    )


def _listed(gpus: list[Gpu]) -> str:
    return ", ".join(f"cuda:{place} = GPU {gpu.index}" for place, gpu in enumerate(gpus)) or "none is left"


def _mps(environment: Mapping[str, str]) -> Check:
    """Whether the control daemon of CUDA's multi-process service runs, which lets ranks compute on one GPU at once."""
    pipe = Path(environment.get("CUDA_MPS_PIPE_DIRECTORY") or DEFAULT_PIPE_DIRECTORY)
    if not (pipe / "control").exists():
        if shutil.which(DAEMON) is None:
            return Check(
                group="GPUs", name="MPS", state="optional", value="not installed", fix="it comes with the driver"
            )
        value = f"not running (nothing in {pipe})"
        fix = "meshscope run --mode shared-gpu starts one of its own"
        return Check(group="GPUs", name="MPS", state="optional", value=value, fix=fix)
    pid = _daemon(pipe)
    if pid is None:
        value = f"{pipe} is there, its daemon is not: it was killed, or runs outside this container"
        return Check(group="GPUs", name="MPS", state="warning", value=value, fix=f"rm -r {pipe}, if none runs outside")
    return Check(group="GPUs", name="MPS", state="ok", value=f"running (process {pid}, {pipe})")


def _daemon(pipe: Path) -> int | None:
    """The daemon writes its number beside its pipe; a killed one leaves both. Without one, its name tells."""
    try:
        pid = int((pipe / f"{DAEMON}.pid").read_text())
    except FileNotFoundError:
        return next(_processes(DAEMON), None)
    except (OSError, ValueError):
        return None
    try:
        os.kill(pid, 0)
    except PermissionError:  # of another user, so it lives
        return pid
    except (ProcessLookupError, OverflowError):
        return None
    return pid if pid > 0 else None


def _processes(name: str) -> Iterator[int]:
    """Of that program name, of which Linux keeps 15 characters."""
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text().strip() == name[:15]:
                yield int(path.parent.name)
        except OSError:  # ended meanwhile
            continue
