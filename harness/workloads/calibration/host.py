"""What the host needs to give the device its work: forward and backward of a model so small that the device waits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
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

WARM_UP, REPETITIONS = 3, 9
"""Forwards and backwards of a model; each is measured alone."""


class Operators(TorchDispatchMode):
    """Counts operators that are no views: about one kernel each."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 0 if func.is_view else 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Of a model: host nanoseconds of each forward and backward, and the kernels that one launches."""

    forward_ns: list[float]
    backward_ns: list[float]
    forward_kernels: int
    backward_kernels: int


def host(clock: Clock, sizes: Sizes) -> list[HostCost]:
    """Per kernel without FSDP2, per unit of FSDP2 what that adds, per kernel on DTensors what is left of theirs without
    the units; all ranks together."""
    with controlled_gc(1):
        return list(_costs(clock))


def _costs(clock: Clock) -> Iterator[HostCost]:
    world, device = dist.get_world_size(), clock.device.type
    alone = small_run(1, device)
    units = alone.model.n_layers + 2  # embedding, layers, norm with head
    plain = _passes(clock, _plain(alone, clock))
    yield _cost("forward_operator", [ns / plain.forward_kernels for ns in plain.forward_ns])
    yield _cost("backward_operator", [ns / plain.backward_kernels for ns in plain.backward_ns])
    kept = _passes(clock, _plain(_selective(alone), clock))
    names: tuple[HostKind, HostKind] = ("selective_forward_operator", "checkpointed_backward_operator")
    yield from _of_selective(kept, plain.backward_kernels, *names)

    cast = _passes(clock, _of_one_shard(alone, clock))
    forward_unit = _cost("cast_forward_unit", _added(cast.forward_ns, plain.forward_ns, units))
    backward_unit = _cost("cast_backward_unit", _added(cast.backward_ns, plain.backward_ns, units))
    yield forward_unit
    yield backward_unit
    if world == 1:
        return
    sharded = _passes(clock, _built(small_run(world, device), clock))
    yield _cost("fsdp_forward_unit", _added(sharded.forward_ns, plain.forward_ns, units))
    yield _cost("fsdp_backward_unit", _added(sharded.backward_ns, plain.backward_ns, units))
    yield _cost("collective", _collective(clock))

    split = small_run(world, device, tp=world)
    if split.model.n_heads % world:
        return

    def without_units(passes: Passes) -> Passes:
        return Passes(
            forward_ns=[max(1.0, ns - units * forward_unit.ns) for ns in passes.forward_ns],
            backward_ns=[max(1.0, ns - units * backward_unit.ns) for ns in passes.backward_ns],
            forward_kernels=passes.forward_kernels - (cast.forward_kernels - plain.forward_kernels),
            backward_kernels=passes.backward_kernels - (cast.backward_kernels - plain.backward_kernels),
        )

    tensors = without_units(_passes(clock, _built(split, clock)))
    yield _cost("dtensor_forward_operator", [ns / tensors.forward_kernels for ns in tensors.forward_ns])
    yield _cost("dtensor_backward_operator", [ns / tensors.backward_kernels for ns in tensors.backward_ns])
    kept = without_units(_passes(clock, _built(_selective(split), clock)))
    names = (
        "dtensor_selective_forward_operator",
        "dtensor_checkpointed_backward_operator",
    )
    yield from _of_selective(kept, tensors.backward_kernels, *names)


def _of_selective(passes: Passes, backward_kernels: int, forward: HostKind, backward: HostKind) -> Iterator[HostCost]:
    """Backward computes kernels again, at the price of a forward; what is left is that of the `backward_kernels`."""
    selective = _cost(forward, [ns / passes.forward_kernels for ns in passes.forward_ns])
    again_ns = (passes.backward_kernels - backward_kernels) * selective.ns
    yield selective
    yield _cost(backward, [max(1.0, ns - again_ns) / backward_kernels for ns in passes.backward_ns])


def _passes(clock: Clock, model: Decoder) -> Passes:
    """Every rank goes through the same calls."""
    tokens = torch.zeros(1, model.seq_len, dtype=torch.int64, device=clock.device)
    forward_ns, backward_ns, kernels = [], [], []
    for number in range(WARM_UP + REPETITIONS + 1):
        losses: list[torch.Tensor] = []

        def forward(losses: list[torch.Tensor] = losses) -> None:
            losses.append(model(tokens).float().sum())

        def backward(losses: list[torch.Tensor] = losses) -> None:
            losses.pop().backward()

        if number == WARM_UP + REPETITIONS:
            kernels = [kernels_of(clock, forward), kernels_of(clock, backward)]
        else:
            forward_ns.append(clock.host(forward))
            backward_ns.append(clock.host(backward))
        for parameter in model.parameters():
            parameter.grad = None
    return Passes(
        forward_ns=forward_ns[WARM_UP:],
        backward_ns=backward_ns[WARM_UP:],
        forward_kernels=kernels[0],
        backward_kernels=kernels[1],
    )


def kernels_of(clock: Clock, call: Callable[[], object]) -> int:
    """Of a GPU its kernels, as the profiler sees them, without copies and fills of memory; of a CPU operators that are
    no views."""
    if clock.device.type != "cuda":
        with Operators() as operators:
            call()
        return int(operators.count)
    clock.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        clock.synchronize()
    kernels = [
        event
        for event in profile.events()
        if event.device_type.name == "CUDA"
        and not event.is_user_annotation
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
    if not kernels:
        raise RuntimeError("torch.profiler saw no kernels of the device")
    return len(kernels)


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


def _collective(clock: Clock) -> list[float]:
    tensor = torch.zeros(1, device=clock.device)
    return [clock.host(lambda: dist.all_reduce(tensor)) for _ in range(REPETITIONS)]


def _added(these: list[float], others: list[float], units: int) -> list[float]:
    """What each of `units` takes of what these take more than the median of the others."""
    return [max(1.0, ns - statistics.median(others)) / units for ns in these]


def _cost(kind: HostKind, times_ns: list[float]) -> HostCost:
    time = summary(times_ns)
    return HostCost(kind=kind, ns=time.ns, spread_pct=time.spread_pct)
