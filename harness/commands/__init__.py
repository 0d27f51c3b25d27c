"""One file per command of `meshscope`; each has `add_arguments(parser)` and `run(args) -> exit code`."""

from __future__ import annotations

import argparse


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object: bytes and ns as integers")


def add_cache_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-cache", action="store_true", help="changes nothing: no result is cached in this version")
