"""The ledger against the allocator: rank 0 of each layout rehearsed on one GPU (`--mode rehearsal`).

    python benchmarks/ledger_accuracy.py LAYOUTS.json [NAME …] [--out FILE]

LAYOUTS.json holds `runs`, each a `name`, a `config` and, where it is not the environment's, the `alloc_conf` that
PYTORCH_ALLOC_CONF is set to (tests/ledger/h200_peaks.json is one). Every run gets a process of its own and takes four
steps; the lines printed of it are predicted and measured GiB and 100·(predicted − measured)/measured, allocated and
reserved. `--out` keeps the measured bytes. A rank's allocations do not depend on whether its collectives reach anybody,
so this is a cluster's rank on one GPU; times and NCCL's own memory are not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from harness.allocator.conf import parse_conf
from harness.config import Recorder
from harness.config_json import from_dict
from harness.errors import EXIT_FAILED, EXIT_OK, EXIT_UNAVAILABLE, EXIT_USAGE
from harness.ledger import predict
from harness.recording import MODE_VARIABLE

GIB = 2**30
STEPS = 4


class AllocatorPeaks:
    """A recorder of allocated bytes: the most in each phase of every step and in the step, and those left after it; and
    of what is reserved by then, which nothing gives back."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to write."""

    @contextmanager
    def category(self, name: str) -> Iterator[None]:
        yield

    @contextmanager
    def step(self, tags: Sequence[str] = ()) -> Iterator[None]:
        self.steps.append({"peak": 0, "phases": {}})
        torch.cuda.reset_peak_memory_stats()
        yield
        self._take()
        torch.cuda.synchronize()
        self.steps[-1]["resident"] = torch.cuda.memory_allocated()
        self.steps[-1]["reserved"] = torch.cuda.memory_reserved()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._take()
        yield
        phases = self.steps[-1]["phases"]
        phases[name] = max(phases.get(name, 0), self._take())

    def _take(self) -> int:
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.steps[-1]["peak"] = max(self.steps[-1]["peak"], peak)
        return peak

    def log(self, **values: object) -> None:
        """Losses are not looked at here."""

    def watch(self, model: object, optimizer: object) -> None:
        """The allocator needs no names."""


def measure(tree: dict[str, Any]) -> dict[str, Any]:
    """Bytes of rank 0 of the configuration `tree`: of the first step and of those after it."""
    config = from_dict(tree)
    recorder = AllocatorPeaks()

    class PeaksOnly(Recorder.Config):
        def build(self, directory: Path, **runtime: Any) -> Any:
            return recorder

    os.environ |= {MODE_VARIABLE: "rehearsal", "RANK": "0", "WORLD_SIZE": str(config.world_size)}
    training = replace(config.training, device="cuda", steps=STEPS)
    replace(config, training=training, recorder=PeaksOnly()).build(Path()).train()
    first, *_, last = recorder.steps
    return {
        "first_step_peak_allocated_bytes": first["peak"],
        "steady_peak_allocated_bytes": last["peak"],
        "steady_phase_peak_allocated_bytes": last["phases"],
        "resident_bytes": last["resident"],
        "first_step_reserved_bytes": first["reserved"],
        "reserved_bytes": last["reserved"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="The ledger against the CUDA allocator on one GPU.")
    parser.add_argument("layouts", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("ledger_accuracy: error: torch finds no CUDA device: run it where there is a GPU", file=sys.stderr)
        return EXIT_UNAVAILABLE
    runs = [run for run in json.loads(args.layouts.read_text())["runs"] if not args.names or run["name"] in args.names]
    if args.here:
        print(json.dumps(measure(runs[0]["config"])))
        return EXIT_OK
    unknown = set(args.names) - {run["name"] for run in runs}
    if unknown:
        print(f"ledger_accuracy: error: {args.layouts} has no run named {', '.join(sorted(unknown))}", file=sys.stderr)
        return EXIT_USAGE
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; steady peak of rank 0, GiB")
    print(f"{'layout':36} {'':9} {'predicted':>9} {'measured':>9} {'error':>10}")
    kept = []
    for run in runs:
        conf = run.get("alloc_conf")
        command = [sys.executable, __file__, str(args.layouts), run["name"], "--here"]
        environment = os.environ | ({} if conf is None else {"PYTORCH_ALLOC_CONF": conf})
        child = subprocess.run(command, capture_output=True, text=True, env=environment)
        if child.returncode:
            print(f"{run['name']:36} failed: {child.stderr.strip().splitlines()[-1]}")
            continue
        measured = json.loads(child.stdout.splitlines()[-1])
        settings = parse_conf(os.environ.get("PYTORCH_ALLOC_CONF", "") if conf is None else conf)
        memory = predict(from_dict(run["config"]), "cuda", settings=settings).ranks[0]
        for name, of, predicted in (
            ("steady_peak_allocated_bytes", "allocated", memory.peak_allocated_bytes),
            ("reserved_bytes", "reserved", memory.peak_reserved_bytes),
        ):
            found = measured[name]
            line = f"{run['name']:36} {of:9}"
            if predicted is None:
                print(f"{line} {'n/a':>9} {found / GIB:9.4f}")
            else:
                error = 100 * (predicted - found) / found
                print(f"{line} {predicted / GIB:9.4f} {found / GIB:9.4f} {error:+8.3f} %")
        kept.append({**run, **measured})
    if args.out:
        args.out.write_text(json.dumps({"runs": kept}, indent=1) + "\n")
    return EXIT_OK if len(kept) == len(runs) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
