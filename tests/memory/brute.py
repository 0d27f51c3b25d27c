"""An independent replay of a snapshot: plain loops over plain dicts, sharing no code with harness.memory.

Used to check it on every snapshot there is. Definitions: DESIGN.md; sizes of events are requested bytes.
"""

from __future__ import annotations

from typing import Any


def brute_device(snapshot: Any, device: int) -> dict[str, Any]:
    """Curves, peaks, stacking of one device of an unpickled snapshot."""
    if isinstance(snapshot, list):
        snapshot = {"segments": snapshot, "device_traces": []}
    live_end = pending_end = reserved_end = 0
    for segment in snapshot["segments"]:
        if segment["device"] != device:
            continue
        reserved_end += segment["total_size"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                live_end += block["requested_size"]
            elif block["state"] != "inactive":
                pending_end += block["requested_size"]
    traces = snapshot["device_traces"]
    events = traces[device] if device < len(traces) else []

    # Backwards from the end: undo one event at a time.
    allocated, active, reserved = live_end, live_end + pending_end, reserved_end
    curves: dict[str, list[int]] = {"allocated": [], "active": [], "reserved": []}
    for event in reversed(events):
        curves["allocated"].append(allocated)
        curves["active"].append(active)
        curves["reserved"].append(reserved)
        size = event["size"]
        match event["action"]:
            case "alloc":
                allocated -= size
                active -= size
            case "free_requested":
                allocated += size
            case "free_completed":
                active += size
            case "segment_alloc" | "segment_map":
                reserved -= size
            case "segment_free" | "segment_unmap":
                reserved += size
    for curve in curves.values():
        curve.reverse()
    base = {"allocated": allocated, "active": active, "reserved": reserved}

    stacked: list[tuple[int, int]] = []
    for i, event in enumerate(events):
        if event["action"] != "free_requested":
            continue
        allocs = 0
        for j in range(i + 1, len(events)):
            later = events[j]
            if later["action"] == "alloc":
                allocs += 1
            elif later["action"] == "free_completed" and (later["addr"], later["stream"]) == (
                event["addr"],
                event["stream"],
            ):
                if allocs:
                    stacked.append((i, j))
                break
    seconds = sum(events[i]["size"] * (events[j]["time_us"] - events[i]["time_us"]) for i, j in stacked) / 1e6
    pending = [
        curves["active"][k] - curves["allocated"][k] for k, event in enumerate(events) if event["action"] == "alloc"
    ]
    return {
        "base": base,
        "curves": curves,
        "peaks": {name: max([base[name], *curve]) for name, curve in curves.items()},
        "blocks": len(stacked),
        "stacked_bytes": sum(events[i]["size"] for i, _ in stacked),
        "byte_seconds": seconds,
        "max_pending": max(pending, default=0),
        "pending_at_end": pending_end,
    }


def live_at_peak(snapshot: Any, device: int, peak_index: int) -> int:
    """Bytes of the blocks that are allocated right after event `peak_index`, followed one by one."""
    live: dict[int, int] = {}
    events = snapshot["device_traces"][device]
    allocated_in_history: dict[int, int] = {}
    before: dict[int, int] = {}
    for event in events:
        if event["action"] == "alloc":
            allocated_in_history[event["addr"]] = event["size"]
        elif event["action"] == "free_requested":
            if event["addr"] not in allocated_in_history:
                before[event["addr"]] = event["size"]
            allocated_in_history.pop(event["addr"], None)
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if (
                segment["device"] == device
                and block["state"] == "active_allocated"
                and block["address"] not in allocated_in_history
            ):
                before[block["address"]] = block["requested_size"]
    live = dict(before)
    for event in events[: peak_index + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"]
        elif event["action"] == "free_requested":
            del live[event["addr"]]
    return sum(live.values())
