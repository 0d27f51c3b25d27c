"""The settings that a snapshot was recorded with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.allocator import Settings
from harness.allocator.conf import parse_conf
from harness.memory.snapshot import Snapshot


def recorded_settings(snapshot: Snapshot) -> Settings:
    """What `allocator_settings` of a snapshot say: the text, and in its stead the values that torch states itself
    (torch/csrc/cuda/Module.cpp). Raises ConfError where the text is none of torch's.
    """
    stated = snapshot.settings
    text = stated.get("PYTORCH_CUDA_ALLOC_CONF", "")
    found: dict[str, Any] = {}
    if isinstance(value := stated.get("expandable_segments"), bool):
        found["expandable_segments"] = value
    if type(value := stated.get("max_split_size")) is int:
        found["max_split_size_bytes"] = value if value > 0 else None  # -1: no bound
    if isinstance(value := stated.get("garbage_collection_threshold"), float) and 0 <= value < 1:
        found["garbage_collection_threshold"] = value
    if isinstance(value := stated.get("roundup_power2_divisions"), dict):
        divisions = tuple(value.get(f"{1 << interval}") for interval in range(len(Settings().roundup_power2_divisions)))
        if all(type(number) is int and 0 <= number < 1 << 20 for number in divisions):
            found["roundup_power2_divisions"] = divisions
    return replace(parse_conf(text if isinstance(text, str) else ""), **found)
