"""`meshscope whatif`: what a recorded run would have reserved under other settings of the caching allocator."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from harness.allocator.conf import parse_conf
from harness.commands import add_json_argument
from harness.errors import UsageError
from harness.sources import find_sources, report_errors
from harness.text import GIB
from harness.whatif.analyse import Question, analyse_sources
from harness.whatif.text import report

MOST_GIB = 1 << 20
"""More than any device has."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", type=Path, help="an allocator snapshot with a history, a recording, or a folder of them"
    )
    parser.add_argument(
        "--alloc-conf",
        action="append",
        default=[],
        metavar="CONF",
        help="settings as PYTORCH_ALLOC_CONF has them, e.g. expandable_segments:True; repeatable",
    )
    parser.add_argument(
        "--limit-gib",
        type=float,
        metavar="X",
        help="memory of the GPU for this process: short of it, cached memory is given back, then the run ends",
    )
    parser.add_argument(
        "--without-pending",
        action="store_true",
        help="as if blocks could be reused when freed: what record_stream costs in reserved bytes",
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the replays of `args.path`; the exit code says whether all, a part or nothing could be read."""
    question = Question(
        confs=[(text, parse_conf(text)) for text in args.alloc_conf],
        limit_bytes=_limit(args.limit_gib),
        without_pending=args.without_pending,
    )
    analysis = analyse_sources(find_sources(args.path), question)
    if args.json:
        print(json.dumps(analysis.to_json(), allow_nan=False))
    elif analysis.files:
        print(report(analysis))
    return report_errors("whatif", analysis.errors, read=len(analysis.files))


def _limit(gib: float | None) -> int | None:
    if gib is None:
        return None
    if not (math.isfinite(gib) and gib * GIB >= 1 and gib < MOST_GIB):
        raise UsageError(
            f"--limit-gib {gib:g}: expected the GiB that the process may reserve, more than 0 and below {MOST_GIB:,}"
        )
    return int(gib * GIB)
