"""What NCCL costs: memory of each process group outside the allocator, and bus bandwidth at a layout's message sizes.

    torchrun --nproc 2 benchmarks/nccl.py --out nccl.json --module llama3 --config llama3_1b --parallelism.tp 1

One GPU a rank. The measuring is that of `meshscope calibrate` (docs/calibration.md), at the sizes that the ledger says
the configuration sends instead of at its own. The bus bandwidth is that of NCCL's own tests
(github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): all-reduce 2·(n-1)/n, all-gather, reduce-scatter (n-1)/n, send 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.cli import build_parser, split_overrides
from harness.errors import EXIT_OK, EXIT_UNAVAILABLE, MeshscopeError
from harness.ledger.communication import collectives
from harness.ledger.hardware_points import COLLECTIVE_KINDS
from harness.ledger.hardware_rules import sent_share
from harness.recipes.arguments import config_from
from harness.recording import write_json
from harness.workloads.calibration.clock import Clock
from harness.workloads.calibration.collectives import measure
from harness.workloads.calibration.memory import group_memory


def message_sizes(config: Any) -> list[tuple[Any, int]]:
    """Kind and bytes of one rank's whole buffer of what a step sends, on the average of each purpose."""
    found = {
        (one.kind, round(one.bytes / one.count))
        for one in collectives(config)
        if one.kind in COLLECTIVE_KINDS and one.count
    }
    return sorted(found)


def bandwidth(clock: Clock, kind: Any, size: int) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    moved, time = measure(clock, kind, size, group)
    return {
        "kind": kind,
        "bytes": moved,
        "time_us": round(time.ns / 1e3, 1),
        "gb_per_s": round(moved / time.ns, 2),
        "bus_gb_per_s": round(moved / time.ns * sent_share(kind, group.size()), 2),
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
    clock = Clock(device, blocks=5, block_ns=0)
    rates = [bandwidth(clock, kind, size) for kind, size in message_sizes(config)]
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
