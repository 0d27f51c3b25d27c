"""`PYTORCH_ALLOC_CONF` as torch reads it, with torch's own parser beside ours."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from harness.allocator import Settings
from harness.allocator.conf import ConfError, describe, parse_conf

MIB = 1 << 20
TAKEN = {
    "": Settings(),
    "  ": Settings(),
    "expandable_segments:True": Settings(expandable_segments=True),
    "expandable_segments:True,expandable_segments:False": Settings(),
    "expandable_segments: True, max_split_size_mb : 64,": Settings(
        expandable_segments=True, max_split_size_bytes=64 * MIB
    ),
    "max_split_size_mb:20": Settings(max_split_size_bytes=20 * MIB),
    "max_split_size_mb:9999999999999999": Settings(max_split_size_bytes=(1 << 40) * MIB),
    "large_segment_size_mb:11,max_split_size_mb:11": Settings(
        large_segment_bytes=11 * MIB, max_split_size_bytes=11 * MIB
    ),
    "large_segment_size_mb:30,max_non_split_rounding_mb:40": Settings(
        large_segment_bytes=30 * MIB, max_non_split_rounding_bytes=40 * MIB
    ),
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.5": Settings(
        garbage_collection_threshold=0.8, memory_fraction=0.5
    ),
    "roundup_power2_divisions:1": Settings(roundup_power2_divisions=(1,) * 16),
    "roundup_power2_divisions:8": Settings(roundup_power2_divisions=(8,) * 16),
    "roundup_power2_divisions:[]": Settings(),
    "roundup_power2_divisions:[>:4]": Settings(roundup_power2_divisions=(0,) + (4,) * 15),
    "roundup_power2_divisions:[64:8,256:4,>:1]": Settings(roundup_power2_divisions=(8,) * 7 + (0, 4) + (1,) * 7),
    # Of torch's own test (c10/test/core/AllocatorConfig_test.cpp).
    "roundup_power2_divisions:[128:8,256:16,512:1,2048:8,>:2]": Settings(
        roundup_power2_divisions=(8,) * 8 + (16, 1, 0, 8) + (2,) * 4
    ),
    "roundup_power2_divisions:[64:0,1024:2]": Settings(roundup_power2_divisions=(0,) * 10 + (2,) + (0,) * 5),
    "pinned_use_background_threads:True": Settings(),
    "backend:native": Settings(),
}
REFUSED = {
    "max_split_size_mb:19": "at least 20",
    "max_split_size_mb:x": "whole number",
    "max_split_size_mb:1e3": "whole number",
    "max_split_size_mb:99999999999999999999": "whole number",
    "large_segment_size_mb:10": "at least 11",
    "large_segment_size_mb:33,max_split_size_mb:32": "at least 33",
    "max_split_size_mb:20,large_segment_size_mb:25": "at least 25",
    "large_segment_size_mb:33,max_non_split_rounding_mb:32": "at least 33",
    "garbage_collection_threshold:0": "between 0 and 1",
    "garbage_collection_threshold:1": "between 0 and 1",
    "garbage_collection_threshold:abc": "a number",
    "roundup_power2_divisions:3": "power of two",
    "roundup_power2_divisions:0": "power of two",
    "roundup_power2_divisions:[64:3]": "power of two",
    "roundup_power2_divisions:[65:4]": "power of two",
    "roundup_power2_divisions:[64:8": "expected key:value",
    "expandable_segments:true": "True or False",
    "expandable_segments": "expected key:value",
    "expandable_segments:": "expected key:value",
    ",": "expected key:value",
}
# What torch takes although it was hardly meant (an unknown key only in a build without CUDA).
REFUSED_BY_US = {
    "max_split_size_mb:21x": "whole number",
    "max_split_size_mb,64": "expected key:value",
    "expandable_segments:True,,max_split_size_mb:64": "expected key:value",
    "roundup_power2_divisions:[64]": "expected",
    "bogus:1": "no setting bogus",
    "backend:cudaMallocAsync": "own allocator",
    "per_process_memory_fraction:1.5": "between 0 and 1",
}


@pytest.mark.parametrize("text", TAKEN)
def test_what_torch_takes_becomes_settings(text):
    assert parse_conf(text) == TAKEN[text]


@pytest.mark.parametrize("text", TAKEN)
def test_settings_can_be_written_as_they_are_read(text):
    written = describe(TAKEN[text])
    assert parse_conf("" if written == "default" else written) == TAKEN[text]


@pytest.mark.parametrize("text", [*REFUSED, *REFUSED_BY_US])
def test_what_it_refuses_is_one_line_that_says_why(text):
    with pytest.raises(ConfError, match={**REFUSED, **REFUSED_BY_US}[text]) as raised:
        parse_conf(text)
    assert "\n" not in str(raised.value)


def test_torch_itself_agrees():
    """In a process of its own: torch keeps what it was told."""
    program = """
import json, sys, torch
taken = []
for text in json.load(sys.stdin):
    try:
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
        torch._C._accelerator_setAllocatorSettings(text)
        taken.append(text)
    except (ValueError, RuntimeError, IndexError):
        pass
print(json.dumps(taken))
"""
    asked = json.dumps([*TAKEN, *REFUSED])
    done = subprocess.run([sys.executable, "-c", program], input=asked, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == list(TAKEN)


@pytest.mark.parametrize(
    ("text", "size", "rounded"),
    [
        ("roundup_power2_divisions:4", 1200, 1536),  # four divisions are for more than 4 · 512 bytes
        ("roundup_power2_divisions:4", 2100, 2560),
        ("roundup_power2_divisions:4", 2048, 2048),
        ("roundup_power2_divisions:4", 5 * MIB + 1, 6 * MIB),
        ("roundup_power2_divisions:1", 5 * MIB + 1, 5 * MIB + 512),
        ("roundup_power2_divisions:[64:0,>:2]", 63 * MIB + 1, 63 * MIB + 512),
        ("roundup_power2_divisions:[64:0,>:2]", 127 * MIB, 127 * MIB),
        ("roundup_power2_divisions:[64:0,>:2]", 129 * MIB, 192 * MIB),
    ],
)
def test_rounding(text, size, rounded):
    assert parse_conf(text).round_bytes(size) == rounded
