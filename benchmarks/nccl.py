"""What NCCL costs: memory of each process group outside the allocator, and bus bandwidth at a layout's message sizes.

    torchrun --nproc 2 benchmarks/nccl.py --out nccl.json --module llama3 --config llama3_1b --parallelism.tp 1

One GPU a rank. Memory is the device's own count of bytes in use (cudaMemGetInfo) less what torch's allocator has
reserved, around the creation and the first collective of each kind, in one group after the other over all ranks: bytes
that no snapshot shows. Bandwidth is of one collective at a time with nothing beside it, at the sizes that the ledger
says the configuration sends (bytes of a rank's whole buffer / time); the bus bandwidth is that of NCCL's own tests
(github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): all-reduce 2·(n-1)/n, all-gather, reduce-scatter (n-1)/n, send 1.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.cli import build_parser, split_overrides
from harness.errors import EXIT_OK, EXIT_UNAVAILABLE, MeshscopeError
from harness.ledger.communication import collectives
from harness.recipes.arguments import config_from
from harness.recording import write_json

GROUPS = 3
WARMUP, ITERATIONS = 5, 20
FACTOR: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
}


def outside_bytes(device: torch.device) -> int:
    """Bytes in use on the device that torch's allocator did not reserve; the whole device's, so one rank alone."""
    torch.cuda.synchronize()
    gc.collect()
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def call(kind: str, whole: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], Any]:
    """A collective of `kind` whose larger buffer is `whole`, 1-D; its other buffer is allocated here."""
    n, rank = group.size(), group.rank()
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "send":
        peer = dist.get_global_rank(group, (rank + 1) % n if rank % 2 == 0 else rank - 1)
        if rank % 2 == 0:
            return lambda: dist.send(whole, peer, group=group)
        return lambda: dist.recv(whole, peer, group=group)
    part = torch.empty(whole.numel() // n, dtype=whole.dtype, device=whole.device)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group)


def group_memory(device: torch.device) -> list[dict[str, Any]]:
    """For each of `GROUPS` new groups over all ranks, the growth in bytes with each kind's first collective."""
    whole = torch.ones(2**20 * dist.get_world_size(), device=device)
    found = []
    for index in range(GROUPS):
        before = start = outside_bytes(device)
        group = dist.new_group(list(range(dist.get_world_size())))
        grown = {}
        for kind in FACTOR:
            call(kind, whole, group)()
            now = outside_bytes(device)
            grown[kind], before = now - before, now
        found.append({"group": index, "bytes": before - start, "first_of_kind_bytes": grown})
    return found


def message_sizes(config: Any) -> list[tuple[str, int]]:
    """Kind and bytes of one rank's whole buffer of what a step sends, on the average of each purpose."""
    found = {
        (one.kind, round(one.bytes / one.count)) for one in collectives(config) if one.kind in FACTOR and one.count
    }
    return sorted(found)


def bandwidth(kind: str, size: int, device: torch.device) -> dict[str, Any]:
    """Median time of one collective, of the slowest rank."""
    group = dist.group.WORLD
    n = group.size()
    elements = max(n, size // 2 // n * n)
    again = call(kind, torch.zeros(elements, dtype=torch.bfloat16, device=device), group)
    for _ in range(WARMUP):
        again()
    times = []
    for _ in range(ITERATIONS):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        again()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds = slowest.item() / 1e3
    rate = 2 * elements / seconds / 1e9
    return {
        "kind": kind,
        "bytes": 2 * elements,
        "time_us": round(seconds * 1e6, 1),
        "gb_per_s": round(rate, 2),
        "bus_gb_per_s": round(rate * FACTOR[kind](n), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="gets the same as JSON")
    args, words = parser.parse_known_args()
    if not torch.cuda.is_available() or "RANK" not in os.environ:
        print("nccl: needs a GPU for each rank, and torchrun to start them", file=sys.stderr)
        return EXIT_UNAVAILABLE
    rest, fields = split_overrides(["run", *words, "--nproc", os.environ["WORLD_SIZE"]])
    try:
        config = config_from(build_parser("run").parse_args(rest, argparse.Namespace(overrides=fields)))
    except MeshscopeError as error:
        print(f"nccl: error: {error}", file=sys.stderr)
        return error.exit_code
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    memory = group_memory(device)
    rates = [bandwidth(kind, size, device) for kind, size in message_sizes(config)]
    if dist.get_rank() == 0:
        machine = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "ranks": config.world_size}
        machine["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        print(machine)
        for group in memory:
            kinds = ", ".join(f"{kind} {size / 2**20:.1f}" for kind, size in group["first_of_kind_bytes"].items())
            print(f"group {group['group']}: {group['bytes'] / 2**20:.1f} MiB outside the allocator ({kinds})")
        for one in rates:
            print(
                "{kind:>15} {bytes:>12} B {time_us:>9} us {gb_per_s:>8} GB/s, bus {bus_gb_per_s:>8} GB/s".format(**one)
            )
        if args.out:
            write_json(args.out, {"schema_version": 1, "machine": machine, "groups": memory, "bandwidth": rates})
    dist.destroy_process_group()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
