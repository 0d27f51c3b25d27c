"""Where a finding is seen: the page that shows its figures, and what to choose there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# The first name of its evidence that begins so -> page.
PLACES = {
    "predicted_": "ledger",
    "comm_": "overlap",
    "on_compute_stream_": "overlap",
    "wait_": "overlap",
    "max_pending_": "memory",
    "not_reusable_": "memory",
    "alloc_retries": "memory",
    "ooms": "memory",
    "size_bytes": "memory",
    "peak_": "memory",
    "lowest_peak_": "memory",
    "largest_part": "memory",
}
WORDS = {"overlap": "Show in Overlap", "memory": "Show in Memory", "ledger": "Show in Ledger"}


def place_of(finding: Mapping[str, Any]) -> tuple[str, dict[str, str | int]] | None:
    """The page and its state, for instance `("overlap", {"rank": 3})`; None where no page shows more."""
    for name in finding["evidence"]:
        for beginning, page in PLACES.items():
            if name.startswith(beginning):
                return page, first_rank(finding["where"])
    return None


def first_rank(where: str) -> dict[str, str | int]:
    match = re.search(r"\branks? (\d+)", where)
    return {"rank": int(match[1])} if match else {}
