"""Llama 3.1 405B built on the meta device: every kind of rank of 64, each in a process of its own.

    python benchmarks/meta_build.py [LAYOUT …] [--json] [--limit-s 20] [--limit-mib 1536]

A kind is what the ledger tells apart by memory. Built is what trains: the stages of the rank, tensor and context
parallelism, FSDP2 units, on the fake process group and before anything is materialised. `process_s` is the wall time of
the process, with Python's start and the import of torch; `build_s` that of the mesh and the model alone;
`peak_rss_bytes` the most resident memory. `ledger_s`: predicting all 64 ranks. Exit code 1 if a limit is broken, by
`process_s` or `peak_rss_bytes`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

from harness import recipes
from harness.config import Parallelism, Pipeline, Trainer
from harness.config_json import from_dict, to_dict
from harness.errors import EXIT_GATE_FAILED, EXIT_OK, InputError
from harness.ledger import predict
from harness.record.memory import ProcessMemory
from harness.text import size, table

WORLD_SIZE = 64
LAYOUTS: dict[str, tuple[Parallelism.Config, Pipeline.Config]] = {
    "pp4_dp2_tp8": (Parallelism.Config(pp=4, tp=8), Pipeline.Config(schedule="Interleaved1F1B", micro_batches=8)),
    "dp8_tp8": (Parallelism.Config(tp=8), Pipeline.Config()),
    "pp2_dp2_cp2_tp8": (Parallelism.Config(pp=2, cp=2, tp=8), Pipeline.Config()),
    "hsdp2_dp4_tp8": (Parallelism.Config(dp_replicate=2, tp=8), Pipeline.Config()),
}


def configuration(layout: str) -> Trainer.Config:
    config = recipes.load_config("llama3", "llama3_405b")
    config.world_size = WORLD_SIZE
    config.parallelism, config.pipeline = LAYOUTS[layout]
    config.training.device = "cpu"
    config.validate()
    return config


def build(config: Trainer.Config, rank: int) -> dict[str, Any]:
    """This process as `rank` of `config`'s world."""
    memory = ProcessMemory()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(config.world_size)}
    import torch

    from harness.pipeline.plan import plan
    from harness.trainer.build import build_on_meta
    from harness.trainer.context_parallel import ContextParallel
    from harness.trainer.parallel_dims import ParallelDims
    from harness.trainer.trainer import rehearsed_group

    with rehearsed_group():
        start = time.perf_counter()
        dims = ParallelDims.from_config(config)
        mesh = dims.build_mesh("cpu")
        group = dims.context_group(mesh)
        built = build_on_meta(
            config,
            mesh,
            torch.device("cpu"),
            plan=plan(config) if dims.pp > 1 else None,
            context=None if group is None else ContextParallel.of(config, group),
        )
        build_s = time.perf_counter() - start
        parameters = sum(parameter.to_local().numel() for parameter in built.model.parameters())
    return {"build_s": build_s, "peak_rss_bytes": memory.read()[1], "parameters": parameters}


def measure(layout: str) -> dict[str, Any]:
    """Every kind of rank, one process after the other."""
    config = configuration(layout)
    start = time.perf_counter()
    ranks = predict(config, "cuda").ranks
    ledger_s = time.perf_counter() - start
    rows = []
    for first in (rank for rank in ranks if rank.rank == rank.alike_rank):
        alike = sum(rank.alike_rank == first.rank for rank in ranks)
        command = [sys.executable, __file__, "--rank", str(first.rank)]
        start = time.perf_counter()
        done = subprocess.run(command, input=json.dumps(to_dict(config)), capture_output=True, text=True)
        process_s = time.perf_counter() - start
        if done.returncode:
            raise InputError(layout, f"rank {first.rank}: {done.stderr.strip().splitlines()[-1]}")
        found = json.loads(done.stdout)
        assert found["parameters"] == first.quantities["P"], "the ledger's parameters of a rank are those of its model"
        rows.append({"rank": first.rank, "ranks": alike, "process_s": process_s, **found})
    return {"layout": layout, "ledger_s": ledger_s, "kinds": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"of {', '.join(LAYOUTS)} (default: all)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--limit-s", type=float, default=20.0)
    parser.add_argument("--limit-mib", type=float, default=1536.0)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        print(json.dumps(build(from_dict(json.load(sys.stdin)), args.rank)))
        return EXIT_OK
    if unknown := set(args.layouts) - LAYOUTS.keys():
        parser.error(f"there is no layout {min(unknown)}: use {', '.join(LAYOUTS)}")
    try:
        found = [measure(layout) for layout in args.layouts or LAYOUTS]
    except InputError as error:
        print(f"meta_build: error: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_table(found)))
    kinds = [kind for one in found for kind in one["kinds"]]
    keeps = all(k["process_s"] <= args.limit_s and k["peak_rss_bytes"] <= args.limit_mib * 2**20 for k in kinds)
    return EXIT_OK if keeps else EXIT_GATE_FAILED


def _table(found: list[dict[str, Any]]) -> list[str]:
    rows = [
        [
            one["layout"],
            f"{kind['rank']} ({kind['ranks']} alike)",
            f"{kind['parameters']:,}",
            f"{kind['process_s']:.1f}",
            f"{kind['build_s']:.2f}",
            size(kind["peak_rss_bytes"]),
            f"{one['ledger_s']:.2f}",
        ]
        for one in found
        for kind in one["kinds"]
    ]
    return table(["layout", "rank", "parameters", "process s", "build s", "peak resident", "ledger s"], rows)


if __name__ == "__main__":
    sys.exit(main())
