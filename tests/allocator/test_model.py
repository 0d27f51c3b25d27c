"""The model of the caching allocator against a naive one, and rule by rule."""

from __future__ import annotations

import random
import time

import pytest

from harness.allocator import Allocator, Driver, OutOfMemoryError, Settings
from harness.allocator.conf import parse_conf
from harness.allocator.restore import Piece, restore_segment

from .naive import Naive, NaiveOutOfMemoryError

MIB = 1 << 20
CONFS = {
    "default": ("", None),
    "tight": ("", 500),
    "expandable": ("expandable_segments:True", None),
    "expandable, tight": ("expandable_segments:True", 500),
    "split": ("max_split_size_mb:40", None),
    "split, tight": ("max_split_size_mb:40,max_non_split_rounding_mb:25", 500),
    "rounding": ("roundup_power2_divisions:[1:0,2:0,16:8,>:2]", None),
    "large segments": ("large_segment_size_mb:30", None),
    "collecting": ("garbage_collection_threshold:0.5", 700),
    "collecting, split": ("garbage_collection_threshold:0.6,max_split_size_mb:40", 700),
}


@pytest.mark.parametrize("name", CONFS)
@pytest.mark.parametrize("seed", range(3))
def test_every_block_is_where_the_naive_model_has_it(name, seed):
    conf, limit_mib = CONFS[name]
    limit = None if limit_mib is None else limit_mib * MIB
    rng = random.Random(seed)
    model, naive = Allocator(parse_conf(conf), limit), Naive(parse_conf(conf), limit)
    live, pending = [], []
    refused = 0
    for _ in range(500):
        choice = rng.random()
        if choice < 0.55 or not live:
            size = rng.choice([rng.randrange(1, 3000), rng.randrange(1, 3 * MIB), rng.randrange(1, 80) * MIB + 7])
            stream = rng.choice([0, 0, 0, 9])
            try:
                chunk = naive.malloc(size, stream)
            except NaiveOutOfMemoryError:
                with pytest.raises(OutOfMemoryError, match="out of memory"):
                    model.malloc(size, stream)
                refused += 1
                continue
            block = model.malloc(size, stream)
            assert (block.address, block.size, block.requested_bytes) == (chunk.address, chunk.size, size)
            live.append((block, chunk))
        elif choice < 0.9:
            block, chunk = live.pop(rng.randrange(len(live)))
            model.free(block)
            naive.free(chunk)
        elif choice < 0.95:
            block, chunk = live.pop(rng.randrange(len(live)))
            model.request_free(block)
            chunk.state = "pending"
            pending.append((block, chunk))
        elif choice < 0.98 and pending:
            block, chunk = pending.pop(0)
            model.complete_free(block)
            if chunk.state == "pending":
                naive.free(chunk)
        elif choice > 0.995:
            model.empty_cache()
            naive.empty()
        assert model.reserved_bytes == naive.reserved

    assert model.allocated_bytes == sum(chunk.size for _, chunk in live)
    assert (refused > 0) == (limit is not None)


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:64"])
def test_segments_hold_everything_and_end_empty(conf):
    rng = random.Random(5)
    model = Allocator(parse_conf(conf))
    live = [model.malloc(rng.randrange(1, 50 * MIB), rng.choice([0, 3])) for _ in range(200)]
    for block in live[::2]:
        model.free(block)

    segments = list(model.segments())
    assert sum(segment.size for segment in segments) == model.reserved_bytes
    assert sum(block.size for s in segments for block in s.blocks if block.allocated) == model.allocated_bytes
    for segment in segments:
        ends = [block.address + block.size for block in segment.blocks]
        assert ends[:-1] == [block.address for block in segment.blocks[1:]]

    for block in live[1::2]:
        model.free(block)
    model.empty_cache()
    assert (model.reserved_bytes, model.allocated_bytes, list(model.segments())) == (0, 0, [])
    assert model.driver.allocations == model.driver.frees or conf.startswith("expandable")  # mapped parts grow together


@pytest.mark.parametrize(
    ("request_bytes", "block_bytes", "segment_mib"),
    [
        (1, 512, 2),
        (513, 1024, 2),
        (MIB, MIB, 2),
        (MIB + 1, MIB + 512, 20),
        (10 * MIB, 10 * MIB, 10),
        (11 * MIB, 11 * MIB, 12),
    ],
)
def test_sizes_of_blocks_and_segments(request_bytes, block_bytes, segment_mib):
    model = Allocator(Settings())
    block = model.malloc(request_bytes)
    # 1 MiB of the 12 is too little to be split off.
    assert (block.size, model.reserved_bytes) == (12 * MIB if segment_mib == 12 else block_bytes, segment_mib * MIB)


def test_small_and_large_requests_and_streams_do_not_share():
    model = Allocator(Settings())
    for size, stream in [(4096, 0), (4096, 7), (5 * MIB, 0), (5 * MIB, 7)]:
        model.malloc(size, stream)
    assert model.reserved_bytes == (2 + 2 + 20 + 20) * MIB
    model.malloc(5 * MIB, 7)
    model.malloc(4096, 0)
    assert model.reserved_bytes == 44 * MIB
    model.malloc(4096, 0, pool=1)
    assert model.reserved_bytes == 46 * MIB


def test_a_pending_block_is_not_reused_before_it_is_complete():
    model = Allocator(Settings())
    first = model.malloc(64 * MIB)
    model.request_free(first)
    assert (model.allocated_bytes, model.active_bytes) == (0, 64 * MIB)
    with pytest.raises(ValueError, match="not allocated"):
        model.free(first)
    second = model.malloc(64 * MIB)
    assert model.reserved_bytes == 128 * MIB
    model.complete_free(first)
    assert model.malloc(64 * MIB).address == first.address != second.address


def test_emptying_the_cache_completes_what_is_pending_once_and_for_all():
    model = Allocator(Settings())
    first, _kept = model.malloc(5 * MIB), model.malloc(5 * MIB)
    model.request_free(first)
    model.empty_cache()
    again = model.malloc(5 * MIB)
    model.request_free(again)
    model.complete_free(first)
    assert (again.address, again.pending, model.active_bytes) == (first.address, True, 10 * MIB)


def test_running_short_gives_back_what_is_cached_then_says_what_there_was():
    model = Allocator(Settings(), 100 * MIB)
    model.free(model.malloc(60 * MIB))
    kept = model.malloc(30 * MIB, 7)
    assert (model.reserved_bytes, model.retries) == (90 * MIB, 0)
    model.malloc(62 * MIB, 7)
    assert (model.reserved_bytes, model.retries) == (92 * MIB, 1)
    with pytest.raises(OutOfMemoryError) as raised:
        model.malloc(12 * MIB)
    error = raised.value
    assert (error.requested_bytes, error.limit_bytes) == (12 * MIB, 100 * MIB)
    assert (error.reserved_bytes, error.allocated_bytes, error.largest_free_bytes) == (92 * MIB, 92 * MIB, 0)
    model.free(kept)
    model.malloc(12 * MIB)
    assert model.reserved_bytes == 74 * MIB


def test_peaks_are_reset_to_what_there_is():
    model = Allocator(Settings())
    model.free(model.malloc(64 * MIB))
    assert (model.peak_reserved_bytes, model.peak_allocated_bytes, model.peak_active_bytes) == (64 * MIB,) * 3
    model.reset_peaks()
    assert (model.peak_reserved_bytes, model.peak_allocated_bytes, model.peak_active_bytes) == (64 * MIB, 0, 0)


def test_requests_just_below_max_split_size_are_never_served_from_the_cache():
    """62.5 MiB get a segment of 64 MiB, which `max_split_size_mb:64` then keeps from requests below 64 MiB."""
    model = Allocator(parse_conf("max_split_size_mb:64"))
    for _ in range(5):
        model.free(model.malloc(int(62.5 * MIB)))
    assert model.reserved_bytes == 5 * 64 * MIB


def test_a_hundred_thousand_pairs_take_no_second():
    model = Allocator(Settings())
    held = [model.malloc(size * MIB) for size in range(1, 200)]
    start = time.process_time()
    for turn in range(100_000):
        at = turn * 37 % len(held)
        model.free(held[at])
        held[at] = model.malloc(held[at].requested_bytes)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("page_mib", [11, 20, 1 << 40])
def test_a_restored_segment_of_other_pages_is_counted_to_the_byte(page_mib):
    settings = Settings(expandable_segments=True, large_segment_bytes=page_mib * MIB)
    allocator = Allocator(settings, driver=Driver(1 << 47))
    used, hole = 20 * MIB, 7 * MIB
    pieces = [
        Piece(1 << 47, used, used),
        Piece((1 << 47) + used, hole, mapped=False),
        Piece((1 << 47) + used + hole, used, used),
    ]
    behind = (1 << 47) + 4 * used
    restore_segment(allocator, pieces, stream=0, small=False, private=0, expandable=True, upto=behind)
    assert allocator.malloc(5 * MIB).address == (1 << 47) + used
    assert allocator.reserved_bytes == 2 * used + hole
    for _ in range(4):
        block = allocator.malloc(20 * MIB)
        assert block.address + block.size <= behind
        assert sum(segment.size for segment in allocator.segments()) == allocator.reserved_bytes
