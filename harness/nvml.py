"""NVIDIA's management library: the GPUs of a machine, and which of them CUDA_VISIBLE_DEVICES leaves to a process.

NVML ignores CUDA_VISIBLE_DEVICES and counts in PCI bus order: a CUDA device index is no NVML index, so go by UUID.
Imports neither torch nor the rest of harness. Run as a program it prints `read_machine()` as JSON, so that a driver
that hangs or crashes takes only that process with it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# NVML_COMPUTEMODE_* and nvmlClocksEventReason* of nvml.h, in words.
COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
CLOCK_REASONS = {
    0x001: "GPU idle",
    0x002: "application clocks setting",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clock setting",
}
# Of these, the ones that make the same work slower from one run to the next.
SLOWING_REASONS = frozenset(CLOCK_REASONS[bit] for bit in (0x004, 0x008, 0x020, 0x040, 0x080))


class NvmlError(Exception):
    """NVML is not there or does not answer; the text says why in one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process with a CUDA context, as the driver numbers it: in a container the pid can mean another process."""

    pid: int
    kind: str
    name: str | None
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MigDevice:
    uuid: str
    name: str
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU; None where the driver does not say. `index` is NVML's, in PCI bus order."""

    index: int
    name: str
    uuid: str
    pci_bus_id: str | None = None
    memory_bytes: int
    memory_used_bytes: int | None = None
    compute_capability: str | None = None
    compute_mode: str | None = None
    persistence: bool | None = None
    ecc: bool | None = None
    ecc_uncorrected_errors: int | None = None
    mig: bool | None = None
    mig_devices: list[MigDevice] = field(default_factory=list)
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    clock_reasons: list[str] | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    processes: list[Process] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """`cuda` is the newest CUDA the driver supports; `unreadable` says which GPUs did not answer, and why."""

    driver: str | None
    cuda: str | None
    gpus: list[Gpu]
    unreadable: list[str] = field(default_factory=list)


def visible_devices(
    variable: str | None, uuids: Sequence[str], mig: Sequence[tuple[int, str]] = ()
) -> list[tuple[int, str]]:
    """(physical index, UUID) of each CUDA device 0, 1, … under CUDA_VISIBLE_DEVICES=`variable` (None: unset).

    `uuids` are the GPUs', in the order that indices in the variable count: PCI bus order, as NVML has it, which is
    CUDA's own order where all GPUs are alike or CUDA_DEVICE_ORDER=PCI_BUS_ID. `mig` holds (physical index of its GPU,
    UUID) of every MIG device.

    The list ends before the first entry that names no device; a device named twice leaves none at all. The form of the
    first entry decides how all are read: `GPU-…` and `MIG-…` are unique prefixes of UUIDs and take no blanks, anything
    else is read as C's `strtoul` does ("1gpu" is 1). Source: torch/cuda/__init__.py: `_parse_visible_devices`,
    `_transform_uuid_to_ordinals`; CUDA C++ Programming Guide, environment variables.
    """
    gpus = list(enumerate(uuids))
    if variable is None:
        return gpus
    for prefix, devices in (("GPU-", gpus), ("MIG-", list(mig))):
        if variable.startswith(prefix):
            return _by_uuid(variable.split(","), prefix, devices)
    return _by_index(variable.split(","), gpus)


def _by_index(entries: Sequence[str], gpus: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    numbers: list[int] = []
    for entry in entries:
        match = re.match(r"[+-]?[0-9]{1,18}", entry.strip())
        number = int(match[0]) if match else -1
        if number in numbers:
            return []
        if number < 0:
            break
        numbers.append(number)
    beyond = next((position for position, number in enumerate(numbers) if number >= len(gpus)), len(numbers))
    return [gpus[number] for number in numbers[:beyond]]


def _by_uuid(entries: Sequence[str], prefix: str, devices: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    named: list[str] = []
    for entry in entries:
        if entry in named:
            return []
        if not entry.startswith(prefix):
            break
        named.append(entry)
    found: list[tuple[int, str]] = []
    for entry in named:
        matches = [device for device in devices if device[1].startswith(entry)]
        if len(matches) != 1:
            break
        if matches[0] in found:
            return []
        found += matches
    return found


def visible_gpus(machine: Machine, variable: str | None) -> list[tuple[Gpu, str]]:
    """The GPU and the UUID (its own, or that of a MIG device on it) behind each CUDA device."""
    gpus = machine.gpus
    mig = [(place, device.uuid) for place, gpu in enumerate(gpus) for device in gpu.mig_devices]
    return [(gpus[place], uuid) for place, uuid in visible_devices(variable, [gpu.uuid for gpu in gpus], mig)]


@contextmanager
def connection() -> Iterator[Any]:
    """The NVML binding, initialised. Raises `NvmlError` where that, or a query inside, fails."""
    try:
        import pynvml  # here, so that the rules above and their users work without it
    except ImportError as error:
        raise NvmlError(f"{error}: pip install nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NvmlError(str(error)) from error


def read_machine() -> Machine:
    """Every GPU of the machine, whatever CUDA_VISIBLE_DEVICES says. Raises `NvmlError`."""
    with connection() as nvml:
        cuda = _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
        machine = Machine(
            driver=_ask(nvml, "nvmlSystemGetDriverVersion"),
            cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            gpus=[],
        )
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                machine.gpus.append(_read_gpu(nvml, index))
            except nvml.NVMLError as error:
                machine.unreadable.append(f"GPU {index}: {error}")
        return machine


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """The answer, or None where this driver, device or version of the binding has none."""
    query: Callable[..., Any] | None = getattr(nvml, function, None)
    if query is None:
        return None
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return None


def _read_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *arguments: Any) -> Any:
        return _ask(nvml, function, handle, *arguments)

    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    pci = ask("nvmlDeviceGetPciInfo")
    capability = ask("nvmlDeviceGetCudaComputeCapability")
    ecc = ask("nvmlDeviceGetEccMode")
    mig = ask("nvmlDeviceGetMigMode")
    persistence = ask("nvmlDeviceGetPersistenceMode")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # the name before driver 535
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    power, limit = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    return Gpu(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        pci_bus_id=None if pci is None else pci.busId,
        memory_bytes=int(memory.total),
        memory_used_bytes=int(memory.used),
        compute_capability=None if capability is None else "{}.{}".format(*capability),
        compute_mode=COMPUTE_MODES.get(ask("nvmlDeviceGetComputeMode")),
        persistence=None if persistence is None else bool(persistence),
        ecc=None if ecc is None else bool(ecc[0]),
        ecc_uncorrected_errors=ask(
            "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        mig=None if mig is None else bool(mig[0]),
        mig_devices=_read_mig(nvml, handle) if mig is not None and mig[0] else [],
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        sm_clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        memory_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        memory_clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
        clock_reasons=None if reasons is None else [name for bit, name in CLOCK_REASONS.items() if reasons & bit],
        temperature_c=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
        processes=_read_processes(ask),
    )


def _read_mig(nvml: Any, handle: Any) -> list[MigDevice]:
    devices = []
    for place in range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        device = _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
        if device is None:  # places are not filled in order
            continue
        memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", device)
        devices.append(
            MigDevice(
                uuid=nvml.nvmlDeviceGetUUID(device),
                name=nvml.nvmlDeviceGetName(device),
                memory_bytes=None if memory is None else int(memory.total),
            )
        )
    return devices


def _read_processes(ask: Callable[..., Any]) -> list[Process] | None:
    """None if the driver lists none because it may not, as in some containers."""
    kinds = {
        "compute": ask("nvmlDeviceGetComputeRunningProcesses"),
        "MPS": ask("nvmlDeviceGetMPSComputeRunningProcesses"),
    }
    if all(found is None for found in kinds.values()):
        return None
    return [
        Process(pid=process.pid, kind=kind, name=_process_name(process.pid), memory_bytes=process.usedGpuMemory)
        for kind, found in kinds.items()
        for process in found or ()
    ]


def _process_name(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None


def main() -> int:
    try:
        print(json.dumps(dataclasses.asdict(read_machine())))
    except NvmlError as error:
        print(json.dumps({"error": str(error)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
