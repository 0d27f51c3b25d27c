"""What several ranks on one GPU need: an NCCL that allows it, MPS, and room for the kernels of all ranks at once."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.doctor.facts import CudaFacts, TorchFacts, ask_driver, ask_torch
from harness.errors import UnavailableError, UsageError
from harness.mps import CONTROL, NOT_INSTALLED
from harness.nvml import NvmlError, read_machine, visible_gpus

if TYPE_CHECKING:
    from harness.config import Trainer

# The first NCCL that lets several ranks share a GPU (NCCL_MULTI_RANK_GPU_ENABLE).
OLDEST_NCCL = (2, 30)
LIBRARY_VARIABLE = "MESHSCOPE_NCCL"
# NCCL runs one kernel of a communicator at a time. Each kernel waits for those of other ranks, so all have to be on the
# GPU together; a block of them takes a multiprocessor. Layouts of fewer communicators than four are given no more room
# than ran on an H200 with four: they hardly gain by it, and what is too much hangs.
FEWEST_KERNELS_AT_ONCE = 4
MOST_CTAS = 64  # nccl.h: maxCTAs of ncclConfig_t
# Under MPS the connections of all ranks are one pool of the GPU's: 32 each fail with 4 ranks on an H200.
TOO_MANY_CONNECTIONS, CONNECTIONS_RANKS = 32, 4


class Nccl(NamedTuple):
    """The version that the ranks get, and the library to preload for it; None for torch's own."""

    version: str
    preload: Path | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """How the ranks of a run share GPUs, and the environment that makes them."""

    gpus: int
    ranks_per_gpu: int
    multiprocessors: int
    max_ctas: str
    nccl: Nccl
    environment: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "gpus": self.gpus,
            "ranks_per_gpu": self.ranks_per_gpu,
            "multiprocessors": self.multiprocessors,
            "max_ctas": self.max_ctas,
            "nccl": self.nccl.version,
            "nccl_preloaded": None if self.nccl.preload is None else str(self.nccl.preload),
        }


def share(
    config: Trainer.Config, gpus: int, named: Path | None, environment: Mapping[str, str] = os.environ
) -> Sharing:
    """How the ranks of `config` run on `gpus` CUDA devices, with the NCCL library `named` if one is.

    Raises `UsageError` for settings that cannot be, `UnavailableError` for what is missing here.
    """
    world_size = config.world_size
    if gpus >= world_size:
        raise UsageError(
            f"mode shared-gpu: {gpus} usable CUDA devices for {world_size} ranks, none is shared: use --mode real, or "
            "name fewer GPUs in CUDA_VISIBLE_DEVICES"
        )
    ranks = -(-world_size // gpus)
    require_few_connections(ranks, environment)
    named = named_library(named, environment)
    try:
        if shutil.which(CONTROL) is None:
            raise UnavailableError(NOT_INSTALLED)
        nccl = choose_nccl(named, lambda preload: ask_torch(preloading(preload, environment)))
        multiprocessors = fewest_multiprocessors(ask_driver())
        fitting = max_ctas(multiprocessors, ranks, kernels_at_once(config))
        visible = visible_by_uuid(environment)
    except UnavailableError as error:
        raise UnavailableError(f"mode shared-gpu: {error}") from None
    cap = environment.get("NCCL_MAX_CTAS") or str(fitting)
    return Sharing(
        gpus=gpus,
        ranks_per_gpu=ranks,
        multiprocessors=multiprocessors,
        max_ctas=cap,
        nccl=nccl,
        environment={
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_MAX_CTAS": cap,
            # NVLink multicast joins GPUs, and several ranks of one cannot each be a member of a group.
            "NCCL_NVLS_ENABLE": environment.get("NCCL_NVLS_ENABLE") or "0",
            **({"LD_PRELOAD": preloading(nccl.preload, environment)["LD_PRELOAD"]} if nccl.preload else {}),
            **visible,
        },
    )


def kernels_at_once(config: Trainer.Config) -> int:
    """How many NCCL kernels a rank of `config` may have on its GPU at once, one for each of its communicators
    (harness.trainer.parallel_dims, fully_sharded): that of the world, which an axis as large as the world shares, and
    one for every other axis of several ranks; with context parallelism FSDP2 has its own, and may have one more for
    reduce-scatters. Single sends and receives have a communicator for each peer."""
    layout, world_size = config.parallelism, config.world_size
    if config.workload == "point_to_point":
        return max(FEWEST_KERNELS_AT_ONCE, 1 if config.point_to_point.batched else 3)
    degrees = [layout.pp, layout.dp_replicate, layout.tp, *([config.dp_shard] if layout.cp == 1 else [])]
    axes = sum(1 < degree < world_size for degree in degrees) + (2 if layout.cp > 1 else 0)
    separate = layout.fsdp_reduce_scatter_group == "separate"
    return max(FEWEST_KERNELS_AT_ONCE, 1 + axes + separate)


def max_ctas(multiprocessors: int, ranks: int, kernels: int = FEWEST_KERNELS_AT_ONCE) -> int:
    """The most blocks an NCCL kernel may have so that those of all `ranks` of a GPU, `kernels` of each, are on it at
    once, else they wait for each other for ever: 4 for 8 ranks on 132 multiprocessors. Raises `UnavailableError` for
    less than one."""
    most = multiprocessors // kernels
    if ranks > most:
        raise UnavailableError(
            f"{ranks} ranks on a GPU of {multiprocessors} multiprocessors, on which the collectives of at most {most} "
            "fit together: lower --nproc, or use --mode rehearsal for memory alone"
        )
    return min(MOST_CTAS, multiprocessors // (ranks * kernels))


def require_few_connections(ranks: int, environment: Mapping[str, str]) -> None:
    """Raises `UsageError` for a CUDA_DEVICE_MAX_CONNECTIONS that ranks under MPS are known to fail with."""
    text = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip()
    if text.isdecimal() and int(text) >= TOO_MANY_CONNECTIONS and ranks >= CONNECTIONS_RANKS:
        raise UsageError(
            f"CUDA_DEVICE_MAX_CONNECTIONS={text}: in mode shared-gpu the ranks of a GPU share its connections, and "
            f"{ranks} ranks with {TOO_MANY_CONNECTIONS} or more each fail: lower it or unset it"
        )


def named_library(named: Path | None, environment: Mapping[str, str]) -> Path | None:
    """The NCCL library `named`, or else the one that $MESHSCOPE_NCCL names. Raises `UsageError` if it is no file."""
    if named is None and environment.get(LIBRARY_VARIABLE):
        named = Path(environment[LIBRARY_VARIABLE])
    if named is not None and not named.is_file():
        raise UsageError(f"mode shared-gpu: the NCCL library {named} is not a file")
    return named


def choose_nccl(named: Path | None, ask: Callable[[Path | None], TorchFacts]) -> Nccl:
    """The library `named`, else torch's own if it is recent, else the installed wheel's.

    `ask` says what torch is with a library preloaded. Raises `UnavailableError` with what is missing and the command.
    """
    own = ask(named)
    needed = ".".join(map(str, OLDEST_NCCL))
    if own.version is None:
        raise UnavailableError(f"torch does not load: {own.error or 'it says nothing'}")
    if not own.nccl:
        raise UnavailableError("torch is a CPU build, or one without NCCL")
    if own.nccl_loaded is None:
        raise UnavailableError(f"NCCL {own.nccl_built} is linked into torch, so none can replace it")
    if is_recent(own.nccl_loaded):
        return Nccl(own.nccl_loaded, named)
    if named is not None:
        raise UnavailableError(f"it needs NCCL {needed} or later; with {named} preloaded torch has {own.nccl_loaded}")
    wheel = wheel_library()
    if wheel is not None and str(wheel) != own.libraries.get("libnccl"):
        found = ask(wheel).nccl_loaded
        if found is not None and is_recent(found):
            return Nccl(found, wheel)
    major = (own.cuda or "").partition(".")[0]
    raise UnavailableError(
        f"it needs NCCL {needed} or later, torch has {own.nccl_loaded}: pip install "
        f"'nvidia-nccl-cu{major}>={needed}', or name a library with --nccl PATH or {LIBRARY_VARIABLE}"
    )


def is_recent(version: str) -> bool:
    return tuple(int(part) for part in version.split(".")[:2]) >= OLDEST_NCCL


def wheel_library() -> Path | None:
    """Where NVIDIA's wheel puts the library, if it is installed."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # none of NVIDIA's wheels is
        return None
    folders = (spec.submodule_search_locations or []) if spec else []
    paths = [Path(folder) / "lib" / "libnccl.so.2" for folder in folders]
    return next((path.resolve() for path in paths if path.is_file()), None)


def preloading(library: Path | None, environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with a library in front of those preloaded already."""
    if library is None:
        return dict(environment)
    before = environment.get("LD_PRELOAD")
    return {**environment, "LD_PRELOAD": ":".join(filter(None, [str(library.resolve()), before]))}


def fewest_multiprocessors(cuda: CudaFacts) -> int:
    if not cuda.multiprocessors:
        raise UnavailableError(f"CUDA's driver does not answer: {cuda.error or 'it has no device'}")
    return min(cuda.multiprocessors)


def visible_by_uuid(environment: Mapping[str, str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES, if it is set, as UUIDs: MPS renumbers the devices it is given, so that an index would mean
    another one to its clients (NVIDIA's Multi-Process Service documentation)."""
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return {}
    try:
        return {"CUDA_VISIBLE_DEVICES": ",".join(uuid for _, uuid in visible_gpus(read_machine(), variable))}
    except NvmlError as error:
        raise UnavailableError(
            f"CUDA_VISIBLE_DEVICES={variable} cannot be told by UUID (NVML: {error}): unset it"
        ) from None


def find_nccl(torch: TorchFacts, environment: Mapping[str, str]) -> Nccl | str:
    """The library that a run here gets without --nccl, or why there is none; `torch` is what is known of it already."""

    def ask(preload: Path | None) -> TorchFacts:
        return torch if preload is None else ask_torch(preloading(preload, environment))

    try:
        return choose_nccl(named_library(None, environment), ask)
    except (UnavailableError, UsageError) as error:
        return str(error).removeprefix("mode shared-gpu: ")


def missing(nccl: Nccl | str, cuda: CudaFacts, usable: int) -> str | None:
    """Why no run of this mode can start here, None if one can; `meshscope doctor` says it."""
    if usable == 0:
        return "no usable CUDA device"
    if isinstance(nccl, str):
        return nccl
    try:
        fewest_multiprocessors(cuda)
    except UnavailableError as error:
        return str(error)
    return None if shutil.which(CONTROL) else NOT_INSTALLED
