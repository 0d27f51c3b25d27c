"""Stacking by its definition, one clause at a time, and the site an allocation is attributed to."""

from __future__ import annotations

from typing import Any

import pytest

from harness.memory.device import analyse_device, stacking_json
from harness.memory.frames import BEFORE_HISTORY, NO_STACK, allocation_site
from harness.memory.snapshot import parse_snapshot
from harness.memory.stacking import SiteStacking, Stacking

from .build import Allocator, frame, snapshot_of

TORCH = "/env/lib/python3.12/site-packages/torch"


def stacking_of(allocator: Allocator, cut: int = 0) -> Stacking:
    content = snapshot_of(allocator)
    content["device_traces"][allocator.device] = content["device_traces"][allocator.device][cut:]
    [device] = parse_snapshot(content).devices
    return analyse_device(device).stacking


def test_what_was_pending_before_the_history_and_still_is_has_a_name() -> None:
    """Nothing completes: what is freed before the window and after it begins waits alike."""
    allocator = Allocator()
    before = allocator.alloc(1000, frame("gather"))
    allocator.request(before)
    cut = len(allocator.events)
    within = allocator.alloc(500, frame("multiply"))
    allocator.request(within)
    allocator.alloc(2000, frame("other"))
    content = snapshot_of(allocator)
    content["device_traces"][0] = content["device_traces"][0][cut:]
    content["segments"][0]["blocks"][0]["frames"] = []  # as a real one, whose history began after its allocation
    [device] = parse_snapshot(content).devices

    found = analyse_device(device)

    sites = [(share.name, share.blocks, share.bytes) for share in found.pending]
    assert sites == [(BEFORE_HISTORY, 1, 1000), ("/home/me/train.py:7:multiply", 1, 500)]
    assert found.stacking.max_pending_bytes == 1500


def test_an_allocation_between_request_and_completion_makes_it_stacked() -> None:
    allocator = Allocator()
    a = allocator.alloc(1000, frame("gather"))
    allocator.request(a)
    requested = allocator.clock_us
    allocator.alloc(2000, frame("other"))
    allocator.complete(a)
    found = stacking_of(allocator)
    assert (found.blocks, found.max_pending_bytes, found.pending_at_end_bytes) == (1, 1000, 0)
    assert found.byte_seconds == 1000 * (allocator.clock_us - requested) / 1e6
    assert found.sites == [SiteStacking("/home/me/train.py:7:gather", 0, 1, 1000)]


def test_other_events_between_do_not_count() -> None:
    allocator = Allocator()
    a, b = allocator.alloc(1000), allocator.alloc(2000)
    allocator.request(a)
    allocator.free(b)
    allocator.segment(4096)
    allocator.complete(a)
    found = stacking_of(allocator)
    assert (found.blocks, found.max_pending_bytes, found.byte_seconds, found.sites) == (0, 0, 0.0, [])


def test_a_block_never_completed_counts_only_at_the_end() -> None:
    allocator = Allocator()
    a = allocator.alloc(1000)
    allocator.request(a)
    allocator.alloc(2000)
    found = stacking_of(allocator)
    assert (found.blocks, found.max_pending_bytes, found.pending_at_end_bytes) == (0, 1000, 1000)
    assert found.byte_seconds == 0.0


def test_completion_on_another_stream_is_not_its_completion() -> None:
    allocator = Allocator()
    a = allocator.alloc(1000, stream=7)
    allocator.request(a)
    allocator.alloc(2000)
    allocator.complete(a)
    allocator.events[-1]["stream"] = 8
    assert stacking_of(allocator).blocks == 0


def test_sites_are_by_stream_and_joined_in_json() -> None:
    allocator = Allocator()
    for stream in (0, 7, 7):
        a = allocator.alloc(1000, frame("gather"), stream=stream)
        allocator.request(a)
        allocator.alloc(8, frame("other"))
        allocator.complete(a)
    found = stacking_of(allocator)
    site = "/home/me/train.py:7:gather"
    assert found.sites == [SiteStacking(site, 7, 2, 2000), SiteStacking(site, 0, 1, 1000)]
    assert stacking_json(found, [])["sites"] == [{"site": site, "blocks": 3, "bytes": 3000}]


def test_an_allocation_on_another_device_does_not_count() -> None:
    first, second = Allocator(device=0), Allocator(device=1)
    a = first.alloc(1000)
    first.request(a)
    second.alloc(2000)
    first.complete(a)
    devices = parse_snapshot(snapshot_of(first, second)).devices
    assert [analyse_device(device).stacking.blocks for device in devices] == [0, 0]


def test_blocks_from_before_the_history() -> None:
    allocator = Allocator()
    a, b = allocator.alloc(1000, frame("gather")), allocator.alloc(500, frame("gather"))
    allocator.request(b)
    allocator.request(a)
    allocator.alloc(2000)
    allocator.complete(a)
    allocator.complete(b)
    found = stacking_of(allocator, cut=3)  # b's request is cut off, a's is the first event
    assert found.blocks == 1
    assert found.max_pending_bytes == 1500
    assert found.sites == [SiteStacking("(allocated before the history)", 0, 1, 1000)]


@pytest.mark.parametrize(
    ("frames", "site"),
    [
        ([], NO_STACK),
        ([frame("empty", f"{TORCH}/nn/functional.py"), frame("step", "/me/train.py", 3)], "/me/train.py:3:step"),
        ([frame("empty", "torch/nn/functional.py", 1), frame("f", "torch/x.py", 2)], "torch/nn/functional.py:1:empty"),
        ([frame("fwd", "/home/me/torch/train.py", 5)], "/home/me/torch/train.py:5:fwd"),
        ([frame("call", "/src/pytorch/torch/nn/modules/module.py"), frame("m", "a.py", 1)], "a.py:1:m"),
        ([frame("forward", "<eval_with_key>.3", 9), frame("m", "a.py", 1)], "a.py:1:m"),
        (
            [
                frame("torch::unwind::unwind()", "??", 0),
                frame("c10::cuda::CUDACachingAllocator::x", "", 0),
                frame("at::native::mm", "", 0),
                frame("f", "a.py", 2),
            ],
            "a.py:2:f",
        ),
        ([frame("torch::unwind::unwind()", "??", 0), frame("at::native::mm", "??", 0)], "??:0:at::native::mm"),
        ([frame("torch::unwind::unwind()", "??", 0)], "??:0:torch::unwind::unwind()"),
        ([{"filename": None, "line": [], "name": "a\nb\x1b[2J\udc80"}, 7], "?:?:a?b?[2J?"),
    ],
)
def test_allocation_site(frames: list[Any], site: str) -> None:
    assert allocation_site(frames) == site
