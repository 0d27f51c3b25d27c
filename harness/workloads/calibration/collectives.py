"""Collectives alone, and beside matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from harness.ledger.hardware_points import COLLECTIVE_KINDS, Collective, CollectiveKind, Overlap
from harness.trainer.collectives import all_gather_single, reduce_scatter_single
from harness.workloads.calibration.clock import Clock, Operation, Time, summary
from harness.workloads.calibration.sizes import MIB, Sizes

WARM_UP = 3
MANY, FEW = 20, 5
"""Repetitions of messages up to `SMALL` bytes on GPUs, and of all others; the same on every rank."""
SMALL = 16 * MIB
SLEEP_CYCLES = 2**20
"""For each repetition: half a millisecond of an H200, in which the host issues it."""
OVERLAPPED: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce")
OVERLAPPED_BYTES = 128 * MIB
PRODUCT = (16384, 2048, 8192)
"""m, k and n of the products beside a collective: the longest of a layer of Llama 3.2 1B. Where one takes fewer turns
on the multiprocessors, those that a collective takes away cost more."""


def call(kind: CollectiveKind, whole: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], Any]:
    """A collective of `kind` whose larger buffer is `whole`, 1-D, its length a multiple of the group's; its other
    buffer is allocated here. Sends go from even ranks to the next; an all-to-all goes to the next rank alone, as the
    ring of context parallelism does."""
    n, rank = group.size(), group.rank()
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "send":
        return _send(whole, group)
    if kind == "all_to_all":
        received = torch.empty_like(whole)
        to, of = [0] * n, [0] * n
        to[(rank + 1) % n] = of[(rank - 1) % n] = whole.numel()
        return lambda: dist.all_to_all_single(received, whole, of, to, group)
    part = torch.empty(whole.numel() // n, dtype=whole.dtype, device=whole.device)
    if kind == "all_gather":
        return lambda: all_gather_single(whole, part, group=group)
    return lambda: reduce_scatter_single(part, whole, group=group)


def _send(whole: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], Any]:
    n, rank = group.size(), group.rank()
    if rank == n - 1 and rank % 2 == 0:
        return lambda: None  # the last of an odd number has no partner
    peer = dist.get_global_rank(group, rank + 1 if rank % 2 == 0 else rank - 1)
    if rank % 2 == 0:
        return lambda: dist.send(whole, peer, group=group)
    return lambda: dist.recv(whole, peer, group=group)


def measure(clock: Clock, kind: CollectiveKind, size: int, group: dist.ProcessGroup) -> tuple[int, Time]:
    """The bytes really sent, and the time of the slowest rank of `group`, all of whose ranks have to call it."""
    # Gradients are reduced in float32; all else travels as bfloat16.
    dtype = torch.float32 if kind in ("reduce_scatter", "all_reduce") else torch.bfloat16
    n = group.size()
    whole = torch.zeros(max(1, size // dtype.itemsize // n) * n, dtype=dtype, device=clock.device)
    moved = whole.numel() * dtype.itemsize
    operation = call(kind, whole, group)
    repetitions = MANY if moved <= SMALL and clock.device.type == "cuda" else FEW
    for _ in range(WARM_UP):
        operation()
    taken = summary([_block(clock, operation, repetitions, group) for _ in range(clock.blocks)])
    ns, spread = _slowest(clock, taken.ns, group), _slowest(clock, taken.spread_pct, group)
    return moved, Time(ns=int(ns), spread_pct=spread)


def _block(clock: Clock, operation: Operation, repetitions: int, group: dist.ProcessGroup) -> float:
    """Nanoseconds a repetition, one after the other."""
    _meet(clock, group)
    if clock.device.type != "cuda":
        begin_ns = time.perf_counter_ns()
        for _ in range(repetitions):
            operation()
        return (time.perf_counter_ns() - begin_ns) / repetitions
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP_CYCLES * (repetitions + 1))
    operation()  # ends on all ranks at once, whoever came late
    begin.record()
    for _ in range(repetitions):
        operation()
    end.record()
    torch.cuda.synchronize(clock.device)
    return float(begin.elapsed_time(end)) * 1e6 / repetitions


def _meet(clock: Clock, group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.zeros(1, device=clock.device), group=group)
    clock.synchronize()


def _groups() -> Iterator[dist.ProcessGroup | None]:
    """The first 2, 4, 8, … ranks, and all; None on a rank that is not among them, which calls nothing then. Every rank
    goes through all of them."""
    world = dist.get_world_size()
    counts = {world} | {2**power for power in range(1, world.bit_length()) if 2**power < world}
    for count in sorted(counts):
        if count == world:
            yield dist.group.WORLD
            continue
        group = dist.new_group(list(range(count)))
        yield group if dist.get_rank() < count else None


def collectives(clock: Clock, sizes: Sizes) -> list[Collective]:
    found: dict[tuple[str, int, int], Collective] = {}
    for group in _groups():
        for kind in COLLECTIVE_KINDS if group is not None else ():
            for size in sizes.collective_bytes:
                moved, taken = measure(clock, kind, size, group)  # type: ignore[arg-type]
                ranks = group.size()  # type: ignore[union-attr]
                point = Collective(kind=kind, ranks=ranks, bytes=moved, ns=taken.ns, spread_pct=taken.spread_pct)
                found[kind, ranks, moved] = point
        _meet(clock, dist.group.WORLD)  # type: ignore[arg-type]
    return list(found.values())


def overlaps(clock: Clock, sizes: Sizes) -> list[Overlap]:
    """On GPUs only. What is long enough to last runs beside what is measured, on a stream of its own."""
    group = dist.group.WORLD
    assert group is not None
    m, k, n = PRODUCT
    a, b = (torch.randn(*shape, device=clock.device, dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
    side = torch.cuda.Stream(clock.device)

    def product() -> torch.Tensor:
        return torch.mm(a, b)

    # The same on all ranks, since it decides how many collectives each calls.
    alone_ns = _slowest(clock, clock.measure(product).ns, group)
    found = []
    for kind in OVERLAPPED:
        dtype = torch.bfloat16 if kind == "all_gather" else torch.float32
        whole = torch.zeros(
            OVERLAPPED_BYTES // dtype.itemsize // group.size() * group.size(), dtype=dtype, device=clock.device
        )
        collective = call(kind, whole, group)
        _, message = measure(clock, kind, OVERLAPPED_BYTES, group)
        ratio = message.ns / alone_ns
        products = max(4, round(4 * ratio))
        beside = _beside(clock, side, product, products, collective, round(3 * products / ratio) + 2, group)
        hidden = _beside(clock, side, collective, 4, product, round(3 * 4 * ratio) + 2, group, measured_on_side=True)
        found.append(
            Overlap(
                kind=kind,
                ranks=group.size(),
                compute_factor=round(beside / alone_ns, 3),
                collective_factor=round(hidden / message.ns, 3),
            )
        )
    found.append(
        Overlap(
            kind="send",
            ranks=group.size(),
            compute_factor=round(_beside_a_wait(clock, side, product, group) / alone_ns, 3),
            collective_factor=1.0,
        )
    )
    return found


def _beside_a_wait(clock: Clock, side: torch.cuda.Stream, product: Operation, group: dist.ProcessGroup) -> float:
    """Nanoseconds of a product on the rank that waits in a receive, whose sender sleeps; the median of the blocks, of
    the slowest rank."""
    whole = torch.zeros(MIB, dtype=torch.bfloat16, device=clock.device)
    transfer = call("send", whole, group)
    sends = group.rank() % 2 == 0
    transfer()  # connects the ranks
    times = []
    for _ in range(clock.blocks):
        _meet(clock, group)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(side):
            if sends:
                torch.cuda._sleep(SLEEP_CYCLES * 32)
            transfer()
        torch.cuda._sleep(SLEEP_CYCLES * 2)
        begin.record()
        for _ in range(FEW):
            product()
        end.record()
        torch.cuda.synchronize(clock.device)
        times.append(0.0 if sends else begin.elapsed_time(end) * 1e6 / FEW)
    return _slowest(clock, summary(times).ns, group)


def _slowest(clock: Clock, ns: float, group: dist.ProcessGroup) -> float:
    found = torch.tensor(ns, dtype=torch.float64, device=clock.device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return float(found)


def _beside(
    clock: Clock,
    side: torch.cuda.Stream,
    measured: Operation,
    repetitions: int,
    other: Operation,
    other_repetitions: int,
    group: dist.ProcessGroup,
    *,
    measured_on_side: bool = False,
) -> float:
    """Nanoseconds of one `measured` while `other` runs; the collective of the two is on the `side` stream. The median
    of the blocks, of the slowest rank."""
    current = torch.cuda.current_stream(clock.device)
    own, its = (side, current) if measured_on_side else (current, side)
    times = []
    for _ in range(clock.blocks):
        _meet(clock, group)
        started, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        with torch.cuda.stream(its):
            torch.cuda._sleep(SLEEP_CYCLES * (repetitions + other_repetitions))
            other()
            started.record()
            for _ in range(other_repetitions - 1):
                other()
        with torch.cuda.stream(own):
            own.wait_event(started)
            measured()  # after a collective all ranks are at the same place
            begin.record()
            for _ in range(repetitions):
                measured()
            end.record()
        torch.cuda.synchronize(clock.device)
        times.append(begin.elapsed_time(end) * 1e6 / repetitions)
    return _slowest(clock, summary(times).ns, group)
