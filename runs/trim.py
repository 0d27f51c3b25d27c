"""Makes a recording small enough to keep in a repository: `python runs/trim.py RECORDING OUT [--snapshots 0,1]`.

Left out of each trace are host operators (but for what c10d was asked for) and the arrows between events, which no
analysis of a trace with device events reads, and the shape of each kernel's launch; of the allocator snapshots those of
other ranks than the ones named, and these are compressed. `--replace OLD=NEW` takes another name for a folder in
everything that is written. The copy must give the overlap of the original to the last digit, or nothing is written.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, MeshscopeError
from harness.recording import read_json, write_json
from harness.sources import find_sources
from harness.trace import analyse
from harness.trace.classify import RECORDED_CALL

HOST_ONLY = {"cpu_op", "fwdbwd", "ac2g", "python_function"}
# fmt: off
LAUNCH = {
    "External id", "cbid", "context", "queued", "priority", "grid", "block", "registers per thread", "shared memory",
    "blocks per SM", "warps per SM", "est. achieved occupancy %",
}
# fmt: on
TRACES, SNAPSHOTS = "profiling/traces/*/*_trace.json.gz", "profiling/memory_snapshot/*/*.pickle*"


def trim(source: Path, target: Path, snapshots: set[int], names: Sequence[tuple[bytes, bytes]]) -> None:
    """Raises OSError for a folder that is not there, not writable or not new, `InputError` for a damaged manifest,
    ValueError, EOFError or zlib.error for a damaged trace."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*_trace.json.gz", "*.pickle*", "checkpoints"))
    manifest = read_json(target / "manifest.json")
    kept = f"traces without host operators, snapshots of ranks {', '.join(map(str, sorted(snapshots)))}"
    notes = manifest.get("notes")
    before = [note for note in notes if not str(note).startswith("trimmed: ")] if isinstance(notes, list) else []
    manifest["notes"] = [*before, f"trimmed: {kept}"]
    write_json(target / "manifest.json", manifest)
    for path in filter(Path.is_file, target.rglob("*")):
        path.write_bytes(_renamed(path.read_bytes(), names))
    for pickle in source.glob(SNAPSHOTS):
        rank = pickle.name.split("_")[0]
        if rank.isdecimal() and int(rank) in snapshots:
            content = pickle.read_bytes()
            plain = gzip.decompress(content) if pickle.suffix == ".gz" else content
            place = target / pickle.relative_to(source)
            small = gzip.compress(_renamed(plain, names), mtime=0)
            place.with_name(place.name.removesuffix(".gz") + ".gz").write_bytes(small)
    for trace in source.glob(TRACES):
        text = _renamed(_trimmed_trace(trace), names)
        (target / trace.relative_to(source)).write_bytes(gzip.compress(text, mtime=0))


def _trimmed_trace(path: Path) -> bytes:
    """The space after each colon stays: HTA finds the rank by it."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not (isinstance(events, list) and all(isinstance(event, dict) for event in events)):
        raise ValueError(f"{path} has no list of events")
    trace["traceEvents"] = kept = [
        event for event in events if event.get("cat") not in HOST_ONLY or event.get("name") == RECORDED_CALL
    ]
    for event in kept:
        if isinstance(about := event.get("args"), dict):
            event["args"] = {name: value for name, value in about.items() if name not in LAUNCH}
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


def ranks(text: str) -> set[int]:
    if not all(word.isdecimal() for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} are no ranks: give numbers such as 0,1")
    return {int(word) for word in text.split(",")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("out", type=Path, help="a folder that is not there yet")
    parser.add_argument(
        "--snapshots", type=ranks, default="0", metavar="R,…", help="ranks whose snapshots are kept (default: 0)"
    )
    parser.add_argument("--replace", type=replacement, action="append", default=[], metavar="OLD=NEW")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} is there already: name a new folder")
    if args.out.resolve().is_relative_to(args.recording.resolve()):
        parser.error(f"{args.out} is within {args.recording}, which would be copied into itself: name another folder")
    problem: str | None = None
    code = EXIT_FAILED
    try:
        trim(args.recording, args.out, args.snapshots, args.replace)
        problem = None if overlap(args.recording) == overlap(args.out) else "its overlap would not be the same"
    except (OSError, EOFError, ValueError, zlib.error, RecursionError, MeshscopeError) as error:
        problem = str(error)
    except KeyboardInterrupt:
        problem, code = "interrupted", EXIT_INTERRUPTED
    if problem is None:
        return EXIT_OK
    shutil.rmtree(args.out, ignore_errors=True)
    print(f"{args.recording}: {problem}; nothing is written", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
