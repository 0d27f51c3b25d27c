"""Where a recording comes from: environment, versions, code, clocks, and the warnings that decide verdicts."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from harness import __version__
from harness.doctor.torch_facts import loaded_libraries, nccl_version
from harness.masking import masked, masked_arguments
from harness.recording import RECORDED_VARIABLES

# The whole environment is never kept: it holds tokens.
ENVIRONMENT_PREFIXES = (
    "CUDA_",
    "CUBLAS_",
    "CUBLASLT_",
    "CUDNN_",
    "GLOO_",
    "KMP_",
    "MESHSCOPE_",
    "MKL_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "PYTORCH_",
    "TORCHDYNAMO_",
    "TORCHELASTIC_",
    "TORCHINDUCTOR_",
    "TORCH_",
)
ENVIRONMENT_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
MAX_WARNINGS = 200


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The allow-listed part of the environment, and what a launcher asks for besides, secrets masked."""
    source = os.environ if variables is None else variables
    asked_for = source.get(RECORDED_VARIABLES, "").split(",")
    return {
        name: masked(name, value)
        for name, value in sorted(source.items())
        if name in ENVIRONMENT_NAMES or name.startswith(ENVIRONMENT_PREFIXES) or name in asked_for
    }


def versions(driver: str | None) -> dict[str, Any]:
    """Of what runs: meshscope, Python, torch, CUDA, NCCL and the driver; None where there is none."""
    cuda = torch.cuda.is_available()
    return {
        "meshscope": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": loaded_nccl() if cuda else None,
        "driver": driver,
    }


def loaded_nccl() -> str | None:
    """Of the library in this process, which may be preloaded; of the one torch was built with where it is linked in."""
    library = loaded_libraries().get("libnccl")
    return nccl_version(library) if library else ".".join(map(str, torch.cuda.nccl.version()))


def git_state(directory: Path) -> dict[str, Any]:
    """{sha, dirty, reason} of the working tree; sha and dirty None with a reason where there is none."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(directory), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"sha": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain")), "reason": None}
    except FileNotFoundError:
        reason = "git is not installed"
    except subprocess.TimeoutExpired:
        reason = "git did not answer in 10 s"
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["git failed"])[0]
    return {"sha": None, "dirty": None, "reason": reason}


def clock() -> dict[str, int | float]:
    """One instant on both clocks, so that step times (monotonic) and traces (unix) can be joined."""
    return {
        "unix_ns": time.time_ns(),
        "perf_counter_ns": time.perf_counter_ns(),
        "perf_counter_resolution_s": time.get_clock_info("perf_counter").resolution,
    }


def process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "argv": masked_arguments(sys.argv)}


def device_facts(device: torch.device, uuid: str | None) -> dict[str, Any]:
    if device.type != "cuda":
        return {"type": device.type, "name": platform.processor() or platform.machine(), "uuid": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "index": device.index,
        "name": properties.name,
        "uuid": uuid,
        "total_memory_bytes": properties.total_memory,
        "multi_processors": properties.multi_processor_count,
    }


class WarningLog:
    """Python's warnings as they are shown, each text once with its count; they are still shown.

    What C++ prints (TORCH_WARN outside Python calls, NCCL) goes to stderr, which a launcher keeps in logs/.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str, int], int] = {}
        self._before = warnings.showwarning
        # Held, since each access to the attribute makes another bound method.
        self._mine = self._show
        warnings.showwarning = self._mine

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        key = (category.__name__, str(message), filename, lineno)
        if key in self._found or len(self._found) < MAX_WARNINGS:
            self._found[key] = self._found.get(key, 0) + 1
        self._before(message, category, filename, lineno, file, line)

    def __len__(self) -> int:
        return len(self._found)

    def items(self) -> list[dict[str, Any]]:
        """[{category, message, file, line, count}], at most `MAX_WARNINGS`, in the order of their first time."""
        return [
            {"category": category, "message": message, "file": file, "line": line, "count": count}
            for (category, message, file, line), count in self._found.items()
        ]

    def close(self) -> None:
        if warnings.showwarning is self._mine:  # else another wrapper sits on top and still calls this one
            warnings.showwarning = self._before
