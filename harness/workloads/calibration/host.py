"""What the host needs to give the device its work: forward and backward of a model so small that the device waits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from harness.calibration import small_run
from harness.config import Trainer
from harness.ledger.hardware_points import HostCost, HostKind
from harness.trainer.model.decoder import Decoder
from harness.trainer.trainer import controlled_gc
from harness.workloads.calibration import models
from harness.workloads.calibration.clock import Clock, Operation, summary
from harness.workloads.calibration.sizes import Sizes

WARM_UP = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """Kernels of a call, and apart from them its collectives."""

    kernels: int
    collectives: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Of a model: host nanoseconds of each forward and backward, and what one launches."""

    forward_ns: list[float]
    backward_ns: list[float]
    forward: Launched
    backward: Launched

    def without(self, units: int, unit_ns: tuple[float, float], casts: tuple[int, int], collective_ns: float) -> Passes:
        """Without its units of FSDP2 and its collectives: time and kernels, each of forward and backward."""

        def rest(times_ns: list[float], launched: Launched, unit_ns: float) -> list[float]:
            return [ns - units * unit_ns - launched.collectives * collective_ns for ns in times_ns]

        return Passes(
            forward_ns=rest(self.forward_ns, self.forward, unit_ns[0]),
            backward_ns=rest(self.backward_ns, self.backward, unit_ns[1]),
            forward=Launched(kernels=self.forward.kernels - casts[0], collectives=0),
            backward=Launched(kernels=self.backward.kernels - casts[1], collectives=0),
        )


class Operators(TorchDispatchMode):
    """The names of operators that are no views: about one kernel each."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def host(clock: Clock, sizes: Sizes) -> list[HostCost]:
    """Per kernel without FSDP2, per unit of FSDP2 what that adds, per kernel on DTensors what is left of theirs without
    the units and collectives; all ranks together. What is lost in the noise of the machine is left out."""
    with controlled_gc(1), _one_thread(clock):
        times = _times(clock)
    found = {kind: summary(ns) for kind, ns in times.items() if statistics.median(ns) >= 1}
    return [HostCost(kind=kind, ns=taken.ns, spread_pct=taken.spread_pct) for kind, taken in found.items()]


@contextmanager
def _one_thread(clock: Clock) -> Iterator[None]:
    """On a CPU: the threads of an operator that computes next to nothing wait for one another."""
    threads = torch.get_num_threads()
    if clock.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _times(clock: Clock) -> dict[HostKind, list[float]]:
    """Nanoseconds, repeated."""
    world, device = dist.get_world_size(), clock.device.type
    alone, split = small_run(1, device), small_run(world, device, tp=world)
    built = {
        "plain": models.plain(alone, clock.device),
        "selective": models.plain(_selective(alone), clock.device),
        "cast": models.of_one_shard(alone, clock.device),
    }
    if world > 1:
        built["sharded"] = models.built(small_run(world, device), clock.device)
    if world > 1 and split.model.n_heads % world == 0:
        built["tensors"] = models.built(split, clock.device)
        built["selective tensors"] = models.built(_selective(split), clock.device)
    passes = _passes(clock, built)

    units = alone.model.n_layers + 2  # embedding, layers, norm with head
    plain, cast = passes["plain"], passes["cast"]
    found: dict[HostKind, list[float]] = {
        "forward_operator": _each(plain.forward_ns, plain.forward.kernels),
        "backward_operator": _each(plain.backward_ns, plain.backward.kernels),
        "cast_forward_unit": _each(_more(cast.forward_ns, plain.forward_ns), units),
        "cast_backward_unit": _each(_more(cast.backward_ns, plain.backward_ns), units),
    }
    of_selective = _of_selective(passes["selective"], plain)
    found["selective_forward_operator"], found["checkpointed_backward_operator"] = of_selective
    if "sharded" not in passes:
        return found
    sharded = passes["sharded"]
    found["fsdp_forward_unit"] = _each(_more(sharded.forward_ns, plain.forward_ns), units)
    found["fsdp_backward_unit"] = _each(_more(sharded.backward_ns, plain.backward_ns), units)
    scalar = torch.zeros(1, device=clock.device)
    calls = range(WARM_UP + _repetitions(clock))
    found["collective"] = [clock.host(lambda: dist.all_reduce(scalar)) for _ in calls][WARM_UP:]
    if "tensors" not in passes:
        return found
    parts = (
        units,
        (statistics.median(found["cast_forward_unit"]), statistics.median(found["cast_backward_unit"])),
        (cast.forward.kernels - plain.forward.kernels, cast.backward.kernels - plain.backward.kernels),
        statistics.median(found["collective"]),
    )
    tensors, kept = passes["tensors"].without(*parts), passes["selective tensors"].without(*parts)
    found["dtensor_forward_operator"] = _each(tensors.forward_ns, tensors.forward.kernels)
    found["dtensor_backward_operator"] = _each(tensors.backward_ns, tensors.backward.kernels)
    of_selective = _of_selective(kept, tensors)
    found["dtensor_selective_forward_operator"], found["dtensor_checkpointed_backward_operator"] = of_selective
    return found


def _of_selective(kept: Passes, all_saved: Passes) -> tuple[list[float], list[float]]:
    """Backward computes kernels again, at the price of a forward; what is left is that of the others."""
    forward = _each(kept.forward_ns, kept.forward.kernels)
    again_ns = (kept.backward.kernels - all_saved.backward.kernels) * statistics.median(forward)
    return forward, _each([ns - again_ns for ns in kept.backward_ns], all_saved.backward.kernels)


def _repetitions(clock: Clock) -> int:
    """On GPUs more than of a kernel, since each is a single call and differences of them are what is wanted."""
    return 3 * clock.blocks if clock.device.type == "cuda" else 2 * clock.blocks - 1


def _each(times_ns: list[float], count: int) -> list[float]:
    return [ns / count for ns in times_ns]


def _more(these: list[float], others: list[float]) -> list[float]:
    return [ns - statistics.median(others) for ns in these]


def _passes(clock: Clock, built: Mapping[str, Decoder]) -> dict[str, Passes]:
    """Each forward and backward is measured alone; what they launch is counted once all are, since the profiler slows
    every later launch of the process. Every rank goes through the same calls."""
    times = {name: _host_ns(clock, model) for name, model in built.items()}
    found = {}
    for name, model in built.items():
        forward, backward = _calls(clock, model)
        counts = launched_by(clock, forward), launched_by(clock, backward)
        found[name] = Passes(
            forward_ns=times[name][0], backward_ns=times[name][1], forward=counts[0], backward=counts[1]
        )
    return found


def _host_ns(clock: Clock, model: Decoder) -> tuple[list[float], list[float]]:
    forward_ns, backward_ns = [], []
    for _ in range(WARM_UP + _repetitions(clock)):
        forward, backward = _calls(clock, model)
        forward_ns.append(clock.host(forward))
        backward_ns.append(clock.host(backward))
        for parameter in model.parameters():
            parameter.grad = None
    return forward_ns[WARM_UP:], backward_ns[WARM_UP:]


def _calls(clock: Clock, model: Decoder) -> tuple[Operation, Operation]:
    """A forward, and its backward."""
    tokens = torch.zeros(1, model.seq_len, dtype=torch.int64, device=clock.device)
    losses: list[torch.Tensor] = []
    return lambda: losses.append(model(tokens).float().sum()), lambda: losses.pop().backward()


def launched_by(clock: Clock, call: Callable[[], object]) -> Launched:
    """Of a GPU kernels as the profiler sees them, without copies and fills of memory; of a CPU operators that are no
    views."""
    if clock.device.type != "cuda":
        with Operators() as operators:
            call()
        names = [name for name in operators.names if "wait_tensor" not in name]
    else:
        clock.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            clock.synchronize()
        names = [
            event.name
            for event in profile.events()
            if event.device_type.name == "CUDA"
            and not event.is_user_annotation
            and not event.name.startswith(("Memcpy", "Memset"))
        ]
        if not names:
            raise RuntimeError("torch.profiler saw no kernels of the device")
    collectives = sum(name.startswith(("nccl", "c10d::", "_c10d_functional::")) for name in names)
    return Launched(kernels=len(names) - collectives, collectives=collectives)


def _selective(run: Trainer.Config) -> Trainer.Config:
    found = deepcopy(run)
    found.activation_checkpoint.mode = "selective"
    return found
