"""What the host needs to give the device its work: forward and backward of a model so small that the device waits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from harness.calibration import small_run
from harness.config import Trainer
from harness.ledger.hardware import HostCost, HostKind
from harness.trainer.activation_checkpoint import checkpoint_layers
from harness.trainer.build import DTYPES, build_on_meta
from harness.trainer.fully_sharded import fully_shard_decoder
from harness.trainer.initialise import initialise
from harness.trainer.model.decoder import Decoder
from harness.trainer.parallel_dims import ParallelDims
from harness.trainer.trainer import controlled_gc
from harness.workloads.calibration.clock import Clock, summary
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
    return [
        HostCost(kind=kind, ns=time.ns, spread_pct=time.spread_pct)
        for kind, ns in times.items()
        if statistics.median(ns) >= 1 and (time := summary(ns))
    ]


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
    alone = small_run(1, device)
    units = alone.model.n_layers + 2  # embedding, layers, norm with head
    found: dict[HostKind, list[float]] = {}

    plain = _passes(clock, _plain(alone, clock))
    found["forward_operator"] = _each(plain.forward_ns, plain.forward.kernels)
    found["backward_operator"] = _each(plain.backward_ns, plain.backward.kernels)
    kept = _passes(clock, _plain(_selective(alone), clock))
    found["selective_forward_operator"], found["checkpointed_backward_operator"] = _of_selective(kept, plain)

    cast = _passes(clock, _of_one_shard(alone, clock))
    found["cast_forward_unit"] = _each(_more(cast.forward_ns, plain.forward_ns), units)
    found["cast_backward_unit"] = _each(_more(cast.backward_ns, plain.backward_ns), units)
    if world == 1:
        return found
    sharded = _passes(clock, _built(small_run(world, device), clock))
    found["fsdp_forward_unit"] = _each(_more(sharded.forward_ns, plain.forward_ns), units)
    found["fsdp_backward_unit"] = _each(_more(sharded.backward_ns, plain.backward_ns), units)
    scalar = torch.zeros(1, device=clock.device)
    calls = range(WARM_UP + _repetitions(clock))
    found["collective"] = [clock.host(lambda: dist.all_reduce(scalar)) for _ in calls][WARM_UP:]

    split = small_run(world, device, tp=world)
    if split.model.n_heads % world:
        return found
    parts = (
        units,
        (statistics.median(found["cast_forward_unit"]), statistics.median(found["cast_backward_unit"])),
        (cast.forward.kernels - plain.forward.kernels, cast.backward.kernels - plain.backward.kernels),
        statistics.median(found["collective"]),
    )
    tensors = _passes(clock, _built(split, clock)).without(*parts)
    found["dtensor_forward_operator"] = _each(tensors.forward_ns, tensors.forward.kernels)
    found["dtensor_backward_operator"] = _each(tensors.backward_ns, tensors.backward.kernels)
    kept = _passes(clock, _built(_selective(split), clock)).without(*parts)
    of_selective = _of_selective(kept, tensors)
    found["dtensor_selective_forward_operator"], found["dtensor_checkpointed_backward_operator"] = of_selective
    return found


def _of_selective(kept: Passes, all_saved: Passes) -> tuple[list[float], list[float]]:
    """Backward computes kernels again, at the price of a forward; what is left is that of the others."""
    forward = _each(kept.forward_ns, kept.forward.kernels)
    again_ns = (kept.backward.kernels - all_saved.backward.kernels) * statistics.median(forward)
    return forward, _each([ns - again_ns for ns in kept.backward_ns], all_saved.backward.kernels)


def _repetitions(clock: Clock) -> int:
    """More than of a kernel, since each is a single call."""
    return 2 * clock.blocks - 1


def _each(times_ns: list[float], count: int) -> list[float]:
    return [ns / count for ns in times_ns]


def _more(these: list[float], others: list[float]) -> list[float]:
    return [ns - statistics.median(others) for ns in these]


def _passes(clock: Clock, model: Decoder) -> Passes:
    """Each forward and backward is measured alone. Every rank goes through the same calls."""
    repetitions = _repetitions(clock)
    tokens = torch.zeros(1, model.seq_len, dtype=torch.int64, device=clock.device)
    forward_ns, backward_ns, launched = [], [], []
    for number in range(WARM_UP + repetitions + 1):
        losses: list[torch.Tensor] = []

        def forward(losses: list[torch.Tensor] = losses) -> None:
            losses.append(model(tokens).float().sum())

        def backward(losses: list[torch.Tensor] = losses) -> None:
            losses.pop().backward()

        if number == WARM_UP + repetitions:
            launched = [launched_by(clock, forward), launched_by(clock, backward)]
        else:
            forward_ns.append(clock.host(forward))
            backward_ns.append(clock.host(backward))
        for parameter in model.parameters():
            parameter.grad = None
    return Passes(
        forward_ns=forward_ns[WARM_UP:],
        backward_ns=backward_ns[WARM_UP:],
        forward=launched[0],
        backward=launched[1],
    )


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
    run.activation_checkpoint.mode = "selective"
    return run


def _plain(run: Trainer.Config, clock: Clock) -> Decoder:
    """Without FSDP2, in the dtype of compute."""
    model = _materialised(_on_meta(run), run, clock)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[run.training.mixed_precision_param])
    return model


def _of_one_shard(run: Trainer.Config, clock: Clock) -> Decoder:
    """Each rank's FSDP2 over itself: units cast their parameters and send nothing."""
    mesh = init_device_mesh(
        clock.device.type,
        (dist.get_world_size(), 1),
        mesh_dim_names=("rank", "dp_shard"),
        backend_override={"dp_shard": "fake"},
    )
    model = _on_meta(run)
    param, reduce = DTYPES[run.training.mixed_precision_param], DTYPES[run.training.mixed_precision_reduce]
    fully_shard_decoder(model, mesh["dp_shard"], param_dtype=param, reduce_dtype=reduce, policy="default")
    return _materialised(model, run, clock)


def _on_meta(run: Trainer.Config) -> Decoder:
    with torch.device("meta"):
        model = run.model.build(seq_len=run.training.seq_len)
    checkpoint_layers(model, run.activation_checkpoint, keeps_attention=True, compiled=False)
    return model


def _built(run: Trainer.Config, clock: Clock) -> Decoder:
    """As the trainer builds it."""
    mesh = ParallelDims.from_config(run).build_mesh(clock.device.type)
    return _materialised(build_on_meta(run, mesh, clock.device).model, run, clock)


def _materialised(model: Decoder, run: Trainer.Config, clock: Clock) -> Decoder:
    model.to_empty(device=clock.device)
    initialise(model, run.training.seed, clock.device)
    return model
