"""What the driver says about a device: bytes in use by this process and by all, which no allocator sees whole."""

from __future__ import annotations

import os
import time

import pynvml
import torch

PERIOD_NS = 1_000_000_000


class DeviceMemory:
    """NVML's view of one CUDA device, found by UUID so that CUDA_VISIBLE_DEVICES cannot mislead.

    A query costs up to milliseconds, so it runs at most once a second; between, the figures are unknown.
    Absent or failing NVML never raises: `reason` says why figures are missing.
    """

    def __init__(self, device: torch.device) -> None:
        self.reason: str | None = None
        self.driver_version: str | None = None
        self.uuid: str | None = None
        self._handle: object | None = None
        self._next_ns = 0
        if device.type != "cuda":
            self.reason = "no CUDA device"
            return
        self.uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
            self.driver_version = str(pynvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError as error:
            self.reason = f"NVML: {error}"

    def read(self) -> tuple[int | None, int | None]:
        """(bytes of this process, bytes in use on the device), None for what NVML does not say or was not asked."""
        now = time.monotonic_ns()
        if self._handle is None or now < self._next_ns:
            return None, None
        self._next_ns = now + PERIOD_NS
        try:
            device_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except pynvml.NVMLError as error:
            self.reason = f"NVML: {error}"
            return None, None
        mine = [p.usedGpuMemory for p in processes if p.pid == os.getpid()]
        if not mine or mine[0] is None:
            self.reason = "NVML does not list this process (another process namespace, or not permitted)"
            return None, device_bytes
        return int(mine[0]), device_bytes
