"""What the host needs to give the device its work: forward and backward of a model so small that the device waits."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from harness.calibration import small_run
from harness.config import Trainer
from harness.ledger.hardware import HostCost, HostKind
from harness.trainer.build import build_on_meta
from harness.trainer.initialise import initialise
from harness.trainer.model.decoder import Decoder as DecoderImplementation
from harness.trainer.parallel_dims import ParallelDims
from harness.workloads.calibration.clock import Clock, summary
from harness.workloads.calibration.sizes import Sizes

WARM_UP, REPETITIONS = 3, 9
"""Of a forward and backward; a single one is measured, so the median is of more than the blocks of a kernel."""


class Operators(TorchDispatchMode):
    """Counts operators that are no views: about one kernel each."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 0 if func.is_view else 1
        return func(*args, **(kwargs or {}))


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


def host(clock: Clock, sizes: Sizes) -> list[HostCost]:
    """Per kernel without FSDP2; per unit of FSDP2 over all ranks, what they add; per kernel on DTensors over all ranks,
    where these divide the heads."""
    world = dist.get_world_size()
    plain_run = small_run(1, clock.device.type)
    plain = _Model(clock, _plain(plain_run, clock))
    forward, backward = plain.host_ns()
    forward_kernels, backward_kernels = plain.kernels()
    found = [
        _cost("forward_operator", [one / forward_kernels for one in forward]),
        _cost("backward_operator", [one / backward_kernels for one in backward]),
    ]
    del plain
    sharded = _Model(clock, _built(small_run(world, clock.device.type), clock))
    units = plain_run.model.n_layers + 2  # embedding, layers, norm with head
    with_units_forward, with_units_backward = sharded.host_ns()
    found += [
        _cost("fsdp_forward_unit", _more(with_units_forward, forward, units)),
        _cost("fsdp_backward_unit", _more(with_units_backward, backward, units)),
        _cost("collective", _collective(clock)),
    ]
    del sharded
    run = small_run(world, clock.device.type, tp=world)
    if world > 1 and run.model.n_heads % world == 0:
        distributed = _Model(clock, _built(run, clock))
        forward, backward = distributed.host_ns()
        forward_kernels, backward_kernels = distributed.kernels()
        found += [
            _cost("dtensor_forward_operator", [one / forward_kernels for one in forward]),
            _cost("dtensor_backward_operator", [one / backward_kernels for one in backward]),
        ]
    return found


class _Model:
    """A model and a batch; every rank goes through the same calls."""

    def __init__(self, clock: Clock, model: DecoderImplementation) -> None:
        self.clock, self.model = clock, model
        self.tokens = torch.zeros(1, model.seq_len, dtype=torch.int64, device=clock.device)
        for _ in range(WARM_UP):
            self.forward()
            self.backward()

    def forward(self) -> None:
        self.loss = self.model(self.tokens).float().sum()

    def backward(self) -> None:
        self.loss.backward()
        for parameter in self.model.parameters():
            parameter.grad = None

    def host_ns(self) -> tuple[list[float], list[float]]:
        forward, backward = [], []
        for _ in range(REPETITIONS):
            forward.append(self.clock.host(self.forward))
            backward.append(self.clock.host(self.backward))
        return forward, backward

    def kernels(self) -> tuple[int, int]:
        return kernels_of(self.clock, self.forward), kernels_of(self.clock, self.backward)


def _plain(run: Trainer.Config, clock: Clock) -> DecoderImplementation:
    with torch.device("meta"):
        model = run.model.build(seq_len=run.training.seq_len)
    model.to_empty(device=clock.device)
    initialise(model, run.training.seed, clock.device)
    for parameter in model.parameters():
        if run.training.mixed_precision_param == "bfloat16":
            parameter.data = parameter.data.bfloat16()
    return model


def _built(run: Trainer.Config, clock: Clock) -> DecoderImplementation:
    mesh = ParallelDims.from_config(run).build_mesh(clock.device.type)
    model = build_on_meta(run, mesh, clock.device).model
    model.to_empty(device=clock.device)
    initialise(model, run.training.seed, clock.device)
    return model


def _collective(clock: Clock) -> list[float]:
    tensor = torch.zeros(1, device=clock.device)
    return [clock.host(lambda: dist.all_reduce(tensor)) for _ in range(REPETITIONS)]


def _more(these: list[float], than: list[float], units: int) -> list[float]:
    """What each of `units` takes of what `these` take more than the median of the others."""
    return [max(1.0, one - statistics.median(than)) / units for one in these]


def _cost(kind: HostKind, times_ns: list[float]) -> HostCost:
    time = summary(times_ns)
    return HostCost(kind=kind, ns=time.ns, spread_pct=time.spread_pct)
