"""Where a finding is seen: the page that shows its figures, and what to choose there."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

# The first name of its evidence that begins so -> page.
PLACES = {
    "predicted_": "ledger",
    "comm_": "overlap",
    "exposed_": "overlap",
    "on_compute_stream_": "overlap",
    "wait_": "overlap",
    "idle_host_": "overlap",
    "max_pending_": "memory",
    "not_reusable_": "memory",
    "alloc_retries": "memory",
    "ooms": "memory",
    "size_bytes": "memory",
    "peak_": "memory",
    "lowest_peak_": "memory",
    "largest_part": "memory",
}
KEYS = {("ledger", "rank"): "of_rank"}  # one rank there, several in the timelines
WORDS = {"overlap": "Show in Overlap", "memory": "Show in Memory", "ledger": "Show in Ledger"}


def place_of(finding: Mapping[str, Any], dimensions: Collection[str]) -> tuple[str, dict[str, str | int]] | None:
    """The page and its state, for instance `("overlap", {"dimension": "mesh_tp", "rank": 3})`; None where no page shows
    more. `dimensions` are those that the run has."""
    for name in finding["evidence"]:
        for beginning, page in PLACES.items():
            if name.startswith(beginning):
                found = state_of(finding["where"], dimensions if page == "overlap" else ())
                return page, {KEYS.get((page, key), key): value for key, value in found.items()}
    return None


def state_of(where: str, dimensions: Collection[str]) -> dict[str, str | int]:
    """The dimension that `where` begins with, and the one rank that it names."""
    first = where.partition(",")[0]
    rank = re.search(r"\brank (\d+)", where)
    found: dict[str, str | int] = {"dimension": first} if first in dimensions else {}
    return found | ({"rank": int(rank[1])} if rank else {})
