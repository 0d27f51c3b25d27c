"""What the driver says about a device: bytes in use by this process and by all, which no allocator sees whole."""

from __future__ import annotations

import os
import threading
from collections import deque

import pynvml
import torch

PERIOD_S = 1.0

Sample = tuple[int | None, int | None]
"""(bytes of this process, bytes in use on the device), None for what NVML does not say."""


class DeviceMemory:
    """NVML's view of one CUDA device, found by UUID so that CUDA_VISIBLE_DEVICES cannot mislead.

    A query costs up to milliseconds, so a thread of its own asks once a second until `close`.
    Absent or failing NVML never raises: `reason` says why figures are missing.
    """

    def __init__(self, device: torch.device) -> None:
        self.reason: str | None = None
        self.driver_version: str | None = None
        self.uuid: str | None = None
        self._handle: object | None = None
        self._samples: deque[Sample] = deque()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
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
            return
        self._samples.append(self.sample())  # the first row has figures, too
        self._thread = threading.Thread(target=self._sample_on, name="meshscope-nvml", daemon=True)
        self._thread.start()

    def take(self) -> Sample:
        """The highest figures sampled since the last call; unknown if there was no sample between."""
        if not self._samples:
            return None, None
        samples = [self._samples.popleft() for _ in range(len(self._samples))]
        mine = [sample[0] for sample in samples if sample[0] is not None]
        device = [sample[1] for sample in samples if sample[1] is not None]
        return max(mine, default=None), max(device, default=None)

    def sample(self) -> Sample:
        """One query."""
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
        self.reason = None
        return int(mine[0]), device_bytes

    def close(self) -> None:
        """Ends the thread; a query that hangs in the driver is left to end with the process."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * PERIOD_S)

    def _sample_on(self) -> None:
        while not self._ends.wait(PERIOD_S):
            self._samples.append(self.sample())
