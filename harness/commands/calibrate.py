"""`meshscope calibrate`: measures what this machine can do, for the ledger to predict times with."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

from harness.calibration import Measured, calibrate, calibration_config
from harness.commands import add_json_argument
from harness.doctor import choose_mode
from harness.doctor.modes import usable_devices
from harness.errors import EXIT_FAILED, EXIT_OK, EXIT_PARTIAL, UsageError
from harness.ledger.hardware_text import report
from harness.modes import prepare
from harness.recording import write_json
from harness.text import counted, one_line

DEFAULT_PARENT = Path("runs") / "out"
CPU_RANKS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=int, metavar="N", help="number of ranks (default: one per GPU; on a CPU 2)")
    parser.add_argument(
        "--mode",
        choices=("real", "cpu", "shared-gpu"),
        help="as of meshscope run; times of shared-gpu are not a cluster's, and the file says so (default: real where "
        "there are GPUs, else cpu)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where the calibration goes (default: runs/out/calibration-DEVICE.json)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument("--nccl", type=Path, metavar="PATH", help="mode shared-gpu: as of meshscope run")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Exits 4 if a section could not be measured, 3 if none could be."""
    if args.nccl is not None and args.mode != "shared-gpu":
        raise UsageError("--nccl is for --mode shared-gpu only")
    out: Path | None = args.out
    if out is not None and ((out.exists() and not out.is_file()) or not out.absolute().parent.is_dir()):
        raise UsageError(f"--out {args.out}: no file can be written there; name another one")
    gpus = 0 if args.mode == "cpu" else usable_devices()[0]
    ranks = args.nproc if args.nproc is not None else gpus if gpus and args.mode != "shared-gpu" else CPU_RANKS
    config = calibration_config(ranks)
    config.validate()
    choice = choose_mode(config, args.mode)
    start = prepare(config, choice, nccl=args.nccl)
    _require_writable(args.out.absolute().parent if args.out is not None else DEFAULT_PARENT)
    _say(f"calibrate: {counted(ranks, 'rank')}, mode {choice.mode} ({start.why})")
    directory = Path(tempfile.mkdtemp(prefix="meshscope-calibrate-"))
    keeps = False
    try:
        measured = calibrate(choice, start, ranks, directory, quick=args.quick, tell=_say)
        keeps = measured.has_failed
    finally:
        if not keeps:
            shutil.rmtree(directory)
    if keeps:
        _say(f"what its ranks wrote: {directory}")
    return _finish(measured, args)


def _finish(measured: Measured, args: argparse.Namespace) -> int:
    hardware = measured.hardware
    if hardware.peaks is None and not hardware.collectives:
        why = one_line(next(iter(measured.missing.values()), "no section has points"))
        _say(f"meshscope calibrate: error: nothing could be measured: {why}")
        return EXIT_FAILED
    path = args.out or _default_path(hardware.provenance.device)
    write_json(path, hardware.to_json())
    print(json.dumps(hardware.to_json()) if args.json else report(hardware))
    _say(f"wrote {path}")
    for section, reason in measured.missing.items():
        _say(f"meshscope calibrate: error: {section} not measured: {one_line(reason)}")
    return EXIT_PARTIAL if measured.missing else EXIT_OK


def _require_writable(folder: Path) -> None:
    """Before minutes of measuring, not after."""
    try:
        if folder == DEFAULT_PARENT:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to: {error.strerror}; name a file elsewhere with --out") from None


def _default_path(device: str) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return DEFAULT_PARENT / f"calibration-{name}.json"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
