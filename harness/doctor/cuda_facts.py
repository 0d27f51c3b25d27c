"""A program: asks CUDA's driver which devices this environment leaves, and prints one JSON object.

The driver's own answer, without torch and without making a context, is what the rules in `harness.nvml` are held
against. Stands alone: it runs in a process of its own, since a broken driver can hang it.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import uuid
from pathlib import Path
from typing import Any

MULTIPROCESSORS = 16  # cuda.h: CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


class CudaError(Exception):
    """The driver refused a call."""


class Driver:
    """The few calls of the CUDA driver API that need no context (cuda.h)."""

    def __init__(self) -> None:
        """Raises `OSError` if there is no driver."""
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, function: str, *arguments: object) -> None:
        """Raises `CudaError` with the driver's words."""
        code = getattr(self._library, function)(*arguments)
        if code == 0:
            return
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(name))
        self._library.cuGetErrorString(code, ctypes.byref(text))
        words = [word.value.decode() for word in (name, text) if word.value]
        raise CudaError(f"{function}: " + (": ".join(words) or f"error {code}"))

    def number(self, function: str, *arguments: object) -> int:
        value = ctypes.c_int()
        self.call(function, ctypes.byref(value), *arguments)
        return value.value

    def identifier(self, device: int) -> str:
        """The UUID without its prefix: of the MIG device where the GPU is split, which only the second version says."""
        raw = ctypes.create_string_buffer(16)
        function = "cuDeviceGetUuid_v2" if hasattr(self._library, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        self.call(function, raw, device)
        return str(uuid.UUID(bytes=raw.raw))


def main() -> int:
    try:
        driver = Driver()
    except OSError as error:
        print(json.dumps({"error": str(error)}))
        return 0
    maps = Path("/proc/self/maps")
    paths = re.findall(r"\s(/\S*/libcuda\.so\S*)$", maps.read_text(), re.MULTILINE) if maps.exists() else []
    facts: dict[str, Any] = {"library": paths[0] if paths else None}
    try:
        driver.call("cuInit", 0)
        version = driver.number("cuDriverGetVersion")
        devices = [driver.number("cuDeviceGet", place) for place in range(driver.number("cuDeviceGetCount"))]
        facts |= {
            "cuda": f"{version // 1000}.{version % 1000 // 10}",
            "identifiers": [driver.identifier(device) for device in devices],
            "multiprocessors": [driver.number("cuDeviceGetAttribute", MULTIPROCESSORS, device) for device in devices],
        }
        print(json.dumps(facts))
    except CudaError as error:
        print(json.dumps({**facts, "error": str(error)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
