"""Which environment variables the installed libraries read: an experiment with one that nothing reads measures noise.

A name that is stored whole in the library that would read it makes a variable `live`, unless a sentence in that
library, or the version of torch, says that it has no effect. That is evidence, not proof: a probe shows the effect.
"""

from __future__ import annotations

import difflib
import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.masking import masked

State = Literal["live", "ignored", "deprecated alias", "not in this build", "unknown"]
# What the variables of somebody else's library start with is nothing to look for here.
PREFIXES = ("CUDA_", "GLOO_", "NCCL_", "PYTORCH_", "TORCH_")


@dataclass(frozen=True, slots=True)
class Known:
    """A variable, the libraries that may read it (any one that does suffices) and what bytes cannot tell.

    `alias_of`: the name that replaced it and wins where both are set. `ignored_since`: the torch that stopped using it
    though its name is still stored, and why. `driver`: CUDA documents it, so the driver reads it however it is stored.
    """

    name: str
    libraries: tuple[str, ...]
    note: str = ""
    alias_of: str | None = None
    ignored_since: tuple[tuple[int, int], str] | None = None
    driver: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """A shared library by the start of its file name; without a path, `absent` says whether that is settled, and
    `reason` why."""

    name: str
    path: Path | None
    absent: Literal["not in this build", "unknown"] = "unknown"
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """`value` is what is set here (secrets masked), None if unset."""

    name: str
    state: State
    value: str | None
    alias_of: str | None
    library: str | None
    evidence: str
    note: str


TORCH = ("libtorch_cuda",)
ALLOCATOR = ("libc10_cuda", "libc10")
NCCL = ("libnccl",)
DRIVER = ("libcuda",)
BEFORE_CONTEXT = "read when a process makes its CUDA context: set it in the environment that starts it"

# Sources: torch/csrc/distributed/c10d/{ProcessGroupNCCL,FlightRecorder,Utils}.hpp, c10/core/AllocatorConfig.h; NCCL's
# and CUDA's lists of environment variables.
KNOWN = (
    Known(
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        TORCH,
        ignored_since=((2, 8), "since torch 2.8 collectives never call record_stream (pytorch#150398)"),
    ),
    Known("TORCH_NCCL_ASYNC_ERROR_HANDLING", TORCH),
    Known("NCCL_ASYNC_ERROR_HANDLING", TORCH, alias_of="TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    Known("TORCH_NCCL_BLOCKING_WAIT", TORCH),
    Known("NCCL_BLOCKING_WAIT", TORCH, alias_of="TORCH_NCCL_BLOCKING_WAIT"),
    Known("TORCH_NCCL_CUDA_EVENT_CACHE", TORCH),
    Known("TORCH_NCCL_DESYNC_DEBUG", TORCH),
    Known("NCCL_DESYNC_DEBUG", TORCH, alias_of="TORCH_NCCL_DESYNC_DEBUG"),
    Known("TORCH_NCCL_DUMP_ON_TIMEOUT", TORCH),
    Known("TORCH_NCCL_ENABLE_MONITORING", TORCH),
    Known("TORCH_NCCL_ENABLE_TIMING", TORCH, "adds a start event to every collective"),
    Known("NCCL_ENABLE_TIMING", TORCH, alias_of="TORCH_NCCL_ENABLE_TIMING"),
    Known("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", TORCH),
    Known(
        "TORCH_NCCL_HIGH_PRIORITY",
        TORCH,
        "the priority of NCCL's own streams: since torch 2.8 only async_op=True and point-to-point run there",
    ),
    Known("TORCH_NCCL_NAN_CHECK", TORCH),
    Known("TORCH_NCCL_USE_COMM_NONBLOCKING", TORCH),
    Known("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", TORCH),
    Known("TORCH_FR_BUFFER_SIZE", TORCH, "entries of the flight recorder"),
    Known("TORCH_NCCL_TRACE_BUFFER_SIZE", TORCH, alias_of="TORCH_FR_BUFFER_SIZE"),
    Known("TORCH_SYMM_MEM_DISABLE_MULTICAST", TORCH),
    Known("TORCH_DISTRIBUTED_DEBUG", ("libtorch_cpu",)),
    Known("GLOO_SOCKET_IFNAME", ("libtorch_cpu",)),
    Known("PYTORCH_ALLOC_CONF", ALLOCATOR, "read once, at the first CUDA allocation"),
    Known("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR, alias_of="PYTORCH_ALLOC_CONF"),
    Known("PYTORCH_NO_CUDA_MEMORY_CACHING", ("libc10_cuda",)),
    Known("CUBLAS_WORKSPACE_CONFIG", TORCH),
    Known("CUBLASLT_WORKSPACE_SIZE", TORCH),
    Known("CUDA_DEVICE_MAX_CONNECTIONS", DRIVER, BEFORE_CONTEXT, driver=True),
    Known("CUDA_DEVICE_ORDER", DRIVER, BEFORE_CONTEXT, driver=True),
    Known("CUDA_LAUNCH_BLOCKING", DRIVER, BEFORE_CONTEXT, driver=True),
    Known("CUDA_MODULE_LOADING", DRIVER, BEFORE_CONTEXT, driver=True),
    Known("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", DRIVER, BEFORE_CONTEXT, driver=True),
    Known("CUDA_MPS_PIPE_DIRECTORY", DRIVER, BEFORE_CONTEXT, driver=True),
    Known("CUDA_VISIBLE_DEVICES", DRIVER, BEFORE_CONTEXT, driver=True),
    *(
        Known(f"NCCL_{name}", NCCL)
        for name in (
            *("ALGO", "BUFFSIZE", "CGA_CLUSTER_SIZE", "COLLNET_ENABLE", "CTA_POLICY", "CUMEM_ENABLE", "DEBUG"),
            *("DEBUG_FILE", "DEBUG_SUBSYS", "GRAPH_MIXING_SUPPORT", "GRAPH_REGISTER", "IB_DISABLE", "IB_HCA"),
            *("LAUNCH_MODE", "LAUNCH_ORDER_IMPLICIT", "LOCAL_REGISTER", "MAX_CTAS", "MAX_NCHANNELS"),
            *("MAX_P2P_NCHANNELS", "MIN_CTAS", "MIN_NCHANNELS", "MULTI_RANK_GPU_ENABLE", "NCHANNELS_PER_NET_PEER"),
            *("NET", "NET_GDR_LEVEL", "NTHREADS", "NVLS_ENABLE", "P2P_DISABLE", "P2P_LEVEL", "PROTO", "PXN_DISABLE"),
            *("SHM_DISABLE", "SOCKET_IFNAME", "WIN_ENABLE", "WORK_FIFO_BYTES"),
        )
    ),
    Known("NCCL_MAX_NRINGS", NCCL, alias_of="NCCL_MAX_NCHANNELS"),
    Known("NCCL_MIN_NRINGS", NCCL, alias_of="NCCL_MIN_NCHANNELS"),
    Known("NCCL_TREE_THRESHOLD", NCCL, "removed in NCCL 2.5: NCCL_ALGO"),
)


class Strings:
    """The constant strings of a shared library.

    Only its read-only data is looked at (2 % of libtorch_cuda.so); the whole file where it is no 64-bit
    little-endian ELF. Raises `OSError` and `ValueError` (an empty file).
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._ranges = list(_read_only_data(self._bytes)) or [(0, len(self._bytes))]

    def close(self) -> None:
        self._bytes.close()

    def find(self, name: str) -> Literal["whole", "end of a longer name", "in pieces"] | None:
        """How the library stores `name`: linkers keep a string that ends another only once, and compilers may keep
        the text of a `std::string` in pieces of 16 bytes."""
        text = name.encode()
        best: Literal["end of a longer name"] | None = None
        for at in self._places(text + b"\0"):
            if at == 0 or not _is_word(self._bytes[at - 1]):
                return "whole"
            best = "end of a longer name"
        if best is None and len(text) > 16 and any(True for _ in self._places(text[:16])):
            return "in pieces"
        return best

    def sentence(self, start: str) -> str | None:
        """The whole string that begins with `start`."""
        for at in self._places(start.encode()):
            end = self._bytes.find(b"\0", at, at + 1000)
            if end > at and (at == 0 or not _is_word(self._bytes[at - 1])):
                return self._bytes[at:end].decode(errors="replace")
        return None

    def _places(self, text: bytes) -> Iterator[int]:
        for start, end in self._ranges:
            at = self._bytes.find(text, start, end)
            while at >= 0:
                yield at
                at = self._bytes.find(text, at + 1, end)


def _is_word(byte: int) -> bool:
    return byte in b"_0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def _read_only_data(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Start and end of each .rodata section in the file (ELF-64 object file format, little-endian)."""
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64:
        return
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    if entry_size != 64 or names_index >= count or table + count * entry_size > len(data):
        return
    # sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size
    sections = [struct.unpack_from("<IIQQQQ", data, table + place * entry_size) for place in range(count)]
    names_at = sections[names_index][4]
    for name, _type, _flags, _address, offset, size in sections:
        if data[names_at + name : names_at + name + 7] == b".rodata" and offset + size <= len(data):
            yield offset, offset + size


def examine(
    libraries: Sequence[Library],
    environment: Mapping[str, str],
    torch_version: tuple[int, int] | None = None,
) -> tuple[list[Variable], list[tuple[Path, str]]]:
    """The state of every known variable, then of those set in `environment` that look like one of theirs.

    Also returns (path, reason) for each library that could not be read.
    """
    opened: dict[str, Strings] = {}
    unreadable: dict[str, Library] = {}
    failures = []
    for library in libraries:
        if library.path is None:
            continue
        try:
            opened[library.name] = Strings(library.path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            failures.append((library.path, reason))
            unreadable[library.name] = Library(name=library.name, path=None, reason=f"cannot be read: {reason}")
    absent = {library.name: library for library in libraries if library.path is None} | unreadable
    try:
        states = [_state(known, opened, absent, environment, torch_version) for known in KNOWN]
        listed = {known.name for known in KNOWN}
        states += [
            _unlisted(name, opened, environment)
            for name in sorted(environment)
            if name not in listed and name.startswith(PREFIXES)
        ]
    finally:
        for strings in opened.values():
            strings.close()
    return states, failures


def _state(
    known: Known,
    opened: Mapping[str, Strings],
    absent: Mapping[str, Library],
    environment: Mapping[str, str],
    torch_version: tuple[int, int] | None,
) -> Variable:
    def result(state: State, evidence: str, library: str | None = None, alias_of: str | None = None) -> Variable:
        value = environment.get(known.name)
        return Variable(
            name=known.name,
            state=state,
            value=None if value is None else masked(known.name, value),
            alias_of=alias_of,
            library=library,
            evidence=evidence,
            note=known.note,
        )

    read = [library for library in known.libraries if library in opened]
    if not read:
        missing = next((absent[library] for library in known.libraries if library in absent), None)
        if missing is None:
            return result("unknown", f"no {known.libraries[0]} was looked at")
        return result(missing.absent, f"{missing.name}: {missing.reason}")

    found = {library: opened[library].find(known.name) for library in read}
    where = next((library for library in read if found[library] == "whole"), None)
    anywhere = where or next((library for library in read if found[library]), None)

    if known.alias_of and anywhere and opened[anywhere].find(known.alias_of):
        return result("deprecated alias", f"{known.alias_of} replaced it and wins", anywhere, known.alias_of)
    if known.ignored_since and anywhere:
        sentence = opened[anywhere].sentence(f"{known.name} is the default now")
        since, reason = known.ignored_since
        if sentence:
            return result("ignored", sentence, anywhere)
        if torch_version is not None and torch_version >= since:
            return result("ignored", reason, anywhere)
    if where:
        return result("live", "its name is in the library", where)
    if known.driver:
        return result("live", "documented by CUDA; the driver does not store its name as plain text", read[0])
    if anywhere:
        return result("unknown", f"its name is there only {_only(found[anywhere])}", anywhere)
    return result("not in this build", f"its name is not in {' or '.join(read)}")


def _only(how: str | None) -> str:
    return f"as the {how}" if how == "end of a longer name" else f"{how}"


def _unlisted(name: str, opened: Mapping[str, Strings], environment: Mapping[str, str]) -> Variable:
    where = next((library for library, strings in opened.items() if strings.find(name) == "whole"), None)
    near = difflib.get_close_matches(name, [known.name for known in KNOWN], n=1, cutoff=0.9)
    guess = f": did you mean {near[0]}?" if near else " (Python code or a plugin may read it)"
    return Variable(
        name=name,
        state="live" if where else "unknown",
        value=masked(name, environment[name]),
        alias_of=None,
        library=where,
        evidence="its name is in the library" if where else f"none of the libraries has its name{guess}",
        note="",
    )


def configuration_files(environment: Mapping[str, str], home: Path) -> dict[Path, list[str]]:
    """NCCL's configuration files, which set variables that no environment shows, and the names each one sets.

    Files that cannot be read are left out: NCCL skips them too. Source: NCCL's user guide, environment variables.
    """
    own = environment.get("NCCL_CONF_FILE")
    found = {}
    for path in (Path(own).expanduser() if own else home / ".nccl.conf", Path("/etc/nccl.conf")):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        found[path] = re.findall(r"^\s*(NCCL_\w+)\s*=", text, re.MULTILINE)
    return found
