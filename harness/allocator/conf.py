"""Reading `PYTORCH_ALLOC_CONF`: `key:value` pairs as torch's `ConfigTokenizer` and its users take them.

Stricter than torch where torch takes what was hardly meant: text after a number, a missing comma, an unknown key in a
build without CUDA.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from harness.allocator.settings import MIB, MIN_LARGE_BYTES, POWER2_INTERVALS, Settings
from harness.errors import UsageError
from harness.text import printable

# Keys of torch 2.11 to 2.13 that change nothing in how device memory is reserved, whatever their value.
_WITHOUT_EFFECT = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "throw_on_cudamalloc_oom",
    }
)
_PAIR = re.compile(r"(?P<key>\w+):(?P<value>\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)")
_MAX_MB = 1 << 40


class ConfError(UsageError):
    """A `PYTORCH_ALLOC_CONF` that torch would not take, or that is not about this allocator."""


def parse_conf(text: str) -> Settings:
    """The settings that `PYTORCH_ALLOC_CONF=text` makes; an empty text is torch's defaults. Raises ConfError."""
    rest = re.sub(r"\s", "", text)
    pairs = []
    while rest:
        match = _PAIR.match(rest)
        if match is None:
            raise ConfError(f"{_shown(text)}: expected key:value at {_shown(rest)}")
        pairs.append((match["key"], match["value"]))
        rest = rest[match.end() :]
    values: dict[str, Any] = {}
    # Others are bounded by the size of a large segment, wherever it stands.
    for key, value in sorted(pairs, key=lambda pair: pair[0] != "large_segment_size_mb"):
        if key in _WITHOUT_EFFECT:
            continue
        if key not in _READERS:
            known = ", ".join(sorted({*_READERS, *_WITHOUT_EFFECT}))
            raise ConfError(f"{_shown(text)}: torch has no setting {printable(key[:60])} (known: {known})")
        name, read = _READERS[key]
        try:
            found = read(value, values)
        except ValueError as error:
            raise ConfError(f"{key}:{printable(value[:60])}: {error}") from error
        if name:
            values[name] = found
    return Settings(**values)


def describe(settings: Settings) -> str:
    """The settings that differ from torch's defaults, as `PYTORCH_ALLOC_CONF` writes them; "default" without any."""
    default = Settings()
    parts = []
    if settings.expandable_segments:
        parts.append("expandable_segments:True")
    if settings.large_segment_bytes != default.large_segment_bytes:
        parts.append(f"large_segment_size_mb:{settings.large_segment_bytes // MIB}")
    if settings.max_split_size_bytes is not None:
        parts.append(f"max_split_size_mb:{settings.max_split_size_bytes // MIB}")
    if settings.max_non_split_rounding_bytes != default.max_non_split_rounding_bytes:
        parts.append(f"max_non_split_rounding_mb:{settings.max_non_split_rounding_bytes // MIB}")
    divisions = settings.roundup_power2_divisions
    if len(set(divisions)) > 1:
        pairs = (f"{1 << interval}:{number}" for interval, number in enumerate(divisions))
        parts.append(f"roundup_power2_divisions:[{','.join(pairs)}]")
    elif divisions[0]:
        parts.append(f"roundup_power2_divisions:{divisions[0]}")
    if settings.garbage_collection_threshold:
        parts.append(f"garbage_collection_threshold:{settings.garbage_collection_threshold:g}")
    if settings.memory_fraction != 1:
        parts.append(f"per_process_memory_fraction:{settings.memory_fraction:g}")
    return ",".join(parts) or "default"


def _shown(text: str) -> str:
    return repr(printable(text if len(text) <= 80 else text[:77] + "..."))


def _whole(value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise ValueError("expected a whole number")
    return int(value)


def _megabytes(value: str, least: int) -> int:
    number = _whole(value)
    if number < least:
        raise ValueError(f"must be at least {least} (MiB)")
    return min(number, _MAX_MB) * MIB


def _large_segment(value: str, values: dict[str, Any]) -> int:
    return _megabytes(value, MIN_LARGE_BYTES // MIB + 1)


def _not_below_segment(value: str, values: dict[str, Any]) -> int:
    """torch refuses less than the size of a large segment."""
    return _megabytes(value, values.get("large_segment_bytes", Settings().large_segment_bytes) // MIB)


def _number(value: str) -> float:
    if not re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?|[0-9]+\.", value):
        raise ValueError("expected a number")
    return float(value)


def _threshold(value: str, values: dict[str, Any]) -> float:
    number = _number(value)
    if not 0 < number < 1:
        raise ValueError("must lie between 0 and 1, both excluded")
    return number


def _fraction(value: str, values: dict[str, Any]) -> float:
    number = _number(value)
    if not 0 <= number <= 1:
        raise ValueError("must lie between 0 and 1")
    return number


def _true_or_false(value: str, values: dict[str, Any]) -> bool:
    if value not in ("True", "False"):
        raise ValueError("expected True or False")
    return value == "True"


def _native(value: str, values: dict[str, Any]) -> None:
    if value != "native":
        raise ValueError("only torch's own allocator (native) is modelled")


def _divisions(value: str, values: dict[str, Any]) -> tuple[int, ...]:
    """One number for all sizes, or `[MiB:number,...,>:number]`: sizes below the first interval take its number, `>` is
    for those behind the last one named, and none in between."""
    if not value.startswith("["):
        return (_power_of_two(value),) * POWER2_INTERVALS
    found = [0] * POWER2_INTERVALS
    last = None
    for pair in filter(None, value[1:-1].split(",")):
        bound, colon, number_text = pair.partition(":")
        if not colon:
            raise ValueError("expected [MiB:number,...]")
        number = 0 if number_text == "0" else _power_of_two(number_text)
        if bound == ">":
            first = (last or 0) + 1
            found[first:] = [number] * (POWER2_INTERVALS - first)
            continue
        interval = min(_power_of_two(bound).bit_length() - 1, POWER2_INTERVALS - 1)
        if last is None:
            found[:interval] = [number] * interval
        found[interval] = number
        last = interval
    return tuple(found)


def _power_of_two(value: str) -> int:
    number = _whole(value)
    if number & (number - 1) or not number:
        raise ValueError(f"{printable(value[:20])} is not a power of two")
    return number


# Key -> the field it sets and what reads its value, given the fields set before it.
_READERS: dict[str, tuple[str, Callable[[str, dict[str, Any]], Any]]] = {
    "backend": ("", _native),
    "expandable_segments": ("expandable_segments", _true_or_false),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "large_segment_size_mb": ("large_segment_bytes", _large_segment),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _not_below_segment),
    "max_split_size_mb": ("max_split_size_bytes", _not_below_segment),
    "per_process_memory_fraction": ("memory_fraction", _fraction),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
}
