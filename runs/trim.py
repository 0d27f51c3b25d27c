"""Makes a recording small enough to keep in a repository: `python runs/trim.py RECORDING OUT [--snapshots 0,1]`.

Left out of each trace are host operators and the arrows between events, which no analysis of a trace with device
events reads; of the allocator snapshots those of other ranks than the ones named. `--replace OLD=NEW` takes another
name for a folder in everything that is written. The copy must give the overlap of the original to the last digit, or
nothing is written.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.recording import read_json, write_json
from harness.sources import find_sources
from harness.trace import analyse

HOST_ONLY = {"cpu_op", "fwdbwd", "ac2g", "python_function"}
TRACES, SNAPSHOTS = "profiling/traces/*/*_trace.json.gz", "profiling/memory_snapshot/*/*.pickle"


def trim(source: Path, target: Path, snapshots: set[int], names: Sequence[tuple[bytes, bytes]]) -> None:
    """Raises OSError for a folder that is not there, not writable or not new, ValueError for a damaged trace."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*_trace.json.gz", "*.pickle", "checkpoints"))
    manifest = read_json(target / "manifest.json")
    kept = f"traces without host operators, snapshots of ranks {', '.join(map(str, sorted(snapshots)))}"
    manifest["notes"] = [*manifest.get("notes", []), f"trimmed: {kept}"]
    write_json(target / "manifest.json", manifest)
    for pickle in source.glob(SNAPSHOTS):
        if int(pickle.name.split("_")[0]) in snapshots:
            shutil.copyfile(pickle, target / pickle.relative_to(source))
    for path in filter(Path.is_file, target.rglob("*")):
        path.write_bytes(_renamed(path.read_bytes(), names))
    for trace in source.glob(TRACES):
        text = _renamed(_trimmed_trace(gzip.decompress(trace.read_bytes())), names)
        (target / trace.relative_to(source)).write_bytes(gzip.compress(text, mtime=0))


def _trimmed_trace(text: bytes) -> bytes:
    """The space after each colon stays: HTA finds the rank by it."""
    trace = json.loads(text)
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("cat") not in HOST_ONLY]
    return json.dumps(trace).encode()


def _renamed(content: bytes, names: Sequence[tuple[bytes, bytes]]) -> bytes:
    for old, new in names:
        content = content.replace(old, new)
    return content


def overlap(path: Path) -> dict[str, Any]:
    """The object of `meshscope overlap --json`, without the paths in it."""
    result = analyse(find_sources(path))
    for entry in result["ranks"]:
        entry["file"] = Path(entry["file"]).name
    return result


def replacement(text: str) -> tuple[bytes, bytes]:
    old, found, new = text.encode().partition(b"=")
    if not found or len(old) != len(new):  # a pickle stores the length of each string
        raise argparse.ArgumentTypeError(f"{text!r} is not OLD=NEW with both of one length")
    return old, new


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("out", type=Path, help="a folder that is not there yet")
    parser.add_argument("--snapshots", default="0", metavar="R,…", help="ranks whose snapshots are kept (default: 0)")
    parser.add_argument("--replace", type=replacement, action="append", default=[], metavar="OLD=NEW")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} is there already: name a new folder")
    try:
        trim(args.recording, args.out, {int(rank) for rank in args.snapshots.split(",")}, args.replace)
        problem = None if overlap(args.recording) == overlap(args.out) else "its overlap would not be the same"
    except (OSError, EOFError, ValueError) as error:
        problem = str(error)
    if problem:
        shutil.rmtree(args.out, ignore_errors=True)
        print(f"{args.recording}: {problem}; nothing is written", file=sys.stderr)
    return 3 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
