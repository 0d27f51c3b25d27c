"""Asks torch, CUDA's driver and NVML in processes of their own, all at once: each may hang, crash or be missing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import harness.nvml
from harness.nvml import Machine

# A cold import of torch from a network disk takes a minute; a driver that needs that long has hung.
TORCH_TIMEOUT_S = 120.0
DRIVER_TIMEOUT_S = 30.0
MESSAGE_LENGTH = 300
HERE = Path(__file__).parent


@dataclass(kw_only=True, slots=True)
class TorchFacts:
    """What `torch_facts.py` printed; `error` says why the rest, or what comes after the import, is not known."""

    version: str | None = None
    cuda: str | None = None
    file: str | None = None
    gloo: bool = False
    nccl: bool = False
    nccl_built: str | None = None
    nccl_loaded: str | None = None
    libraries: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    cuda_devices: int | None = None
    architectures: list[str] = field(default_factory=list)
    cudnn: int | None = None
    cuda_reason: str | None = None
    error: str | None = None

    @property
    def release(self) -> tuple[int, int] | None:
        """(major, minor); None if torch did not say or says something else."""
        major, _, rest = (self.version or "").partition(".")
        minor = rest.partition(".")[0]
        return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


@dataclass(kw_only=True, slots=True)
class CudaFacts:
    """What `cuda_facts.py` printed: UUIDs without prefix and numbers of streaming multiprocessors, of cuda:0, cuda:1, …
    as the driver counts them here."""

    library: str | None = None
    cuda: str | None = None
    identifiers: list[str] | None = None
    multiprocessors: list[int] | None = None
    error: str | None = None


@dataclass(kw_only=True, slots=True)
class TorchaoFacts:
    """What `torchao_facts.py` printed; `error` says why its import fails."""

    version: str | None = None
    error: str | None = None


@dataclass(kw_only=True, slots=True)
class Facts:
    """`torchao` is None where it was not asked."""

    torch: TorchFacts
    cuda: CudaFacts
    machine: Machine | None
    nvml_error: str | None
    torchao: TorchaoFacts | None = None


def gather(*, with_torch: bool, with_torchao: bool = False) -> Facts:
    """`with_torch=False` where it is known not to be installed; torchao takes seconds more."""
    nvml = Question(Path(harness.nvml.__file__), DRIVER_TIMEOUT_S)
    cuda = Question(HERE / "cuda_facts.py", DRIVER_TIMEOUT_S)
    torch = Question(HERE / "torch_facts.py", TORCH_TIMEOUT_S) if with_torch else None
    torchao = Question(HERE / "torchao_facts.py", TORCH_TIMEOUT_S) if with_torchao else None
    machine = nvml.answer()
    nvml_error = machine.get("error")
    return Facts(
        cuda=msgspec.convert(cuda.answer(), CudaFacts),
        machine=None if nvml_error else msgspec.convert(machine, Machine),
        nvml_error=nvml_error,
        torch=msgspec.convert(torch.answer(), TorchFacts) if torch else TorchFacts(error="not installed"),
        torchao=msgspec.convert(torchao.answer(), TorchaoFacts) if torchao else None,
    )


def ask_driver() -> CudaFacts:
    """Which devices CUDA's driver sees from here."""
    return msgspec.convert(Question(HERE / "cuda_facts.py", DRIVER_TIMEOUT_S).answer(), CudaFacts)


def ask_torch(environment: Mapping[str, str] = os.environ) -> TorchFacts:
    """What torch is under `environment`, which decides the NCCL library it gets."""
    return msgspec.convert(Question(HERE / "torch_facts.py", TORCH_TIMEOUT_S, environment).answer(), TorchFacts)


class Question:
    """A program that prints JSON objects, one a line, started now and read later."""

    def __init__(
        self,
        program: Path,
        timeout_s: float,
        environment: Mapping[str, str] = os.environ,
        arguments: Sequence[str] = (),
    ) -> None:
        self._ends = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        # -P: the program's folder holds modules with names of the standard library's.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(program), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env=_environment(environment),
            text=True,
            errors="replace",
        )

    def answer(self) -> dict[str, Any]:
        """Its objects joined, with `error` if it did not end well: in time, with exit code 0."""
        process = self._process
        ended = True
        try:
            output, messages = process.communicate(timeout=max(self._ends - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            ended = False
            process.kill()
            try:
                output, messages = process.communicate(timeout=1)
            except subprocess.TimeoutExpired:  # stuck in the driver, where no signal reaches it
                output, messages = "", ""
        facts = _objects(output)
        if not ended:
            facts["error"] = f"no answer within {self._timeout_s:.0f} s"
        elif process.returncode != 0:
            facts["error"] = _ending(process.returncode, messages)
        return facts


def _objects(output: str) -> dict[str, Any]:
    """The JSON objects among the lines, joined: libraries print to stdout too, and the last line may be torn."""
    facts: dict[str, Any] = {}
    for line in output.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            facts |= found
    return facts


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """With the import path of this process, which need not be what its environment says."""
    return {**environment, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def _ending(code: int, messages: str) -> str:
    if code < 0:
        return f"ended by signal {-code} ({signal.strsignal(-code)})"
    lines = messages.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    named = [place for place, line in enumerate(lines) if re.match(r"[A-Za-z_][\w.]*(: |$)", line)]
    words = " ".join(lines[named[0] if named else -1 :]).split()
    return textwrap.shorten(" ".join(words), MESSAGE_LENGTH, placeholder=" …") or f"ended with exit code {code}"
