"""Settings that ran and were not in effect, by what the recordings of their trials say."""

from __future__ import annotations

from collections.abc import Iterable

from harness.compilation import MOVED, captured_again
from harness.recording import Recording


def uncaptured(recordings: Iterable[Recording]) -> tuple[bool, str] | None:
    """Of trials with CUDA graphs (`compile.cuda_graphs` in ranks/rank{r}.json): whether none was captured, and in words
    what was left out and why, or captured again and again; None where all were captured once, or none asked for."""
    graphs = [
        document["compile"]["cuda_graphs"]
        for recording in recordings
        for document in recording.ranks.values()
        if document.get("compile") and document["compile"]["cuda_graphs"] is not None
    ]
    skips = sum(one["skips"] for one in graphs)
    captured = [one["captured"] for one in graphs]
    if not graphs:
        return None
    if min(captured) > 0 and not skips:
        again = [one for one in graphs if captured_again(one)]
        most = max(again, key=lambda one: one["captured"], default=None)
        return most and (False, f"{most['graphs']} CUDA graphs were captured {most['captured']} times: {MOVED}")
    reasons = list(dict.fromkeys(reason for one in graphs for reason in one["skip_reasons"]))
    why = reasons[0] if reasons else "inductor gives no reason"
    if max(captured) == 0:
        return True, f"no CUDA graph was captured: {why}"
    return False, f"CUDA graphs were left out {skips} times, {min(captured)} captured at least: {why}"
