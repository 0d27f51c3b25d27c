"""Recorded histories on the model: the recording itself reproduced from wherever it begins, and other settings."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from harness.allocator.conf import parse_conf
from harness.memory.replay import replay
from harness.memory.snapshot import Device, parse_snapshot, read_snapshot
from harness.whatif.fidelity import Fidelity, measure_fidelity
from harness.whatif.measure import Outcome, measure
from harness.whatif.recorded import recorded_settings
from harness.whatif.replay import Case, releases
from harness.whatif.start import ContradictionError, find_start

from .program import MIB, Program, random_program

GIB = 1 << 30
CONFS = ["", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:4"]
RECORDED = sorted((Path(__file__).parents[2] / "runs" / "recorded").rglob("*.pickle.gz"))
COMPLETE = [
    "h200_fsdp2_tp2",
    "h200_fsdp4_ac",
    "h200_fsdp4_tp2",
    "h200_llama1b_untied_fsdp4_tp2",
    "h200x2_fsdp2_connections_unset",
    "h200x2_tp2",
]


def device_of(program: Program, skip: int = 0) -> Device:
    [device] = parse_snapshot(program.snapshot(skip)).devices
    return device


def fidelity_of(device: Device, conf: str = "", limit_bytes: int | None = None) -> Fidelity:
    timeline = replay(device)
    assert timeline is not None
    case = Case(settings=parse_conf(conf), limit_bytes=limit_bytes)
    return measure_fidelity(device, timeline, find_start(device), case)


def outcome(device: Device, conf: str = "", recorded: str = "", **case: object) -> Outcome:
    case = Case(settings=parse_conf(conf), **case)
    return measure(device, find_start(device), parse_conf(recorded), case)


@pytest.mark.parametrize("conf", CONFS)
@pytest.mark.parametrize("seed", range(4))
def test_a_recording_is_reproduced_from_wherever_it_begins(conf, seed):
    program = random_program(seed, conf)
    # Not between a request and the memory that came for it: see the next test.
    actions = [event["action"] for event in program.events]
    requests = [at for at, action in enumerate(actions) if not (action + actions[at - 1]).count("segment")]
    for skip in [0, *requests[:: len(requests) // 12]]:
        found = fidelity_of(device_of(program, skip), conf)
        assert found.exact, (skip, found)
        assert found.allocations > 0 or skip > len(program.events) - 30


def test_a_request_cut_off_after_its_memory_came_is_served_from_it():
    program = Program()
    program.alloc(30 * MIB)
    assert fidelity_of(device_of(program, skip=1)).exact


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.relative_to(path.parents[4]).parts[0])
def test_real_recordings_are_reproduced_to_the_byte(path):
    snapshot = read_snapshot(path)
    for device in snapshot.devices:
        found = fidelity_of(device)
        assert found.allocations >= 240
        assert found.exact, found


@pytest.mark.shared_data
@pytest.mark.parametrize("name", COMPLETE)
def test_real_recordings_from_the_start_are_reproduced_call_by_call(recordings, name):
    snapshot = read_snapshot(recordings / name / "rank0_snapshot.pickle")
    [device] = snapshot.devices
    found = fidelity_of(device)
    assert found.calls >= 50
    assert found.exact, found
    timeline = replay(device)
    assert timeline is not None
    # With addresses that fall instead of the recorded ones.
    assert outcome(device).peak_reserved_bytes == timeline.peak("reserved").bytes


@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("name", "reserved_gib", "allocated_gib"),
    [("h200x2_fsdp2_connections_unset", 24.107, 22.3668), ("h200x2_tp2", 15.816, 14.4504)],
)
def test_expandable_segments_are_predicted_as_h200s_had_them(recordings, name, reserved_gib, allocated_gib):
    """Measured on two H200s (torch 2.11) with expandable_segments:True; predicted from the runs without."""
    [device] = read_snapshot(recordings / name / "rank0_snapshot.pickle").devices
    found = outcome(device, "expandable_segments:True")
    assert round(found.peak_reserved_bytes / GIB, 3) == pytest.approx(reserved_gib, abs=0.0011)
    assert round(found.peak_allocated_bytes / GIB, 4) == allocated_gib


def test_expandable_segments_join_what_segments_keep_apart():
    program = Program()
    for _ in range(3):
        blocks = [program.alloc(40 * MIB) for _ in range(4)]
        for block in blocks:
            program.free(block)
        program.free(program.alloc(120 * MIB))
    device = device_of(program)
    assert outcome(device).peak_reserved_bytes == (4 * 40 + 120) * MIB
    found = outcome(device, "expandable_segments:True")
    assert found.peak_reserved_bytes == 4 * 40 * MIB
    assert (found.device_allocations, found.peak_allocated_bytes) == (4, 160 * MIB)


def test_what_is_unused_at_the_peak_is_told_by_pool_and_stream():
    program = Program()
    kept = [program.alloc(12 * MIB), program.alloc(4096, 5)]
    waiting = program.alloc(30 * MIB, 5)
    program.free(waiting, pending=True)
    program.alloc(64 * MIB)
    found = outcome(device_of(program))
    assert kept[0].size == 12 * MIB
    assert found.index == len(program.events) - 1
    assert (found.peak_reserved_bytes, found.allocated_bytes) == (108 * MIB, 76 * MIB + 4096)
    assert [(p.pool, p.stream, p.unused_bytes, p.pending_bytes) for p in found.pools] == [
        ("large", 5, 30 * MIB, 30 * MIB),
        ("small", 5, 2 * MIB - 4096, 0),
        ("large", 0, 0, 0),
    ]


def test_of_equal_peaks_the_fullest_counts():
    """Reserved stays where it was; what is unused when most is allocated is what cannot be used."""
    program = Program()
    program.free(program.alloc(64 * MIB))
    program.alloc(30 * MIB)
    program.alloc(30 * MIB)
    found = outcome(device_of(program, skip=4))
    assert (found.peak_reserved_bytes, found.allocated_bytes, found.unused_bytes) == (64 * MIB, 60 * MIB, 4 * MIB)


def test_without_pending_blocks_are_reused_at_once():
    program = Program()
    for _ in range(10):
        program.free(program.alloc(64 * MIB, 5), pending=True)
    for block in program.pending:
        program.complete(block)
    device = device_of(program)
    assert outcome(device).peak_reserved_bytes == 640 * MIB
    assert outcome(device, without_pending=True).peak_reserved_bytes == 64 * MIB

    cut = device_of(program, skip=len(program.events) - 10)  # all of it pending from before
    assert outcome(cut).peak_reserved_bytes == 640 * MIB
    assert outcome(cut, without_pending=True, afresh=True).peak_reserved_bytes == 64 * MIB


def test_under_a_limit_the_cache_is_given_back_then_memory_runs_out():
    program = Program()
    program.free(program.alloc(60 * MIB, line=1))
    kept = program.alloc(30 * MIB, 5, line=2)
    program.free(program.alloc(40 * MIB, 5, line=3))
    program.free(kept)
    device = device_of(program)
    assert outcome(device, limit_bytes=130 * MIB).retries == 0
    tight = outcome(device, limit_bytes=90 * MIB)
    assert (tight.retries, tight.device_frees, tight.out_of_memory) == (1, 1, None)
    assert tight.peak_reserved_bytes == 90 * MIB

    failed = outcome(device, limit_bytes=69 * MIB).out_of_memory
    assert failed is not None
    assert failed.site == "/home/me/train.py:3:forward"
    assert program.events[failed.index or 0]["size"] == failed.requested_bytes == 40 * MIB
    assert (failed.reserved_bytes, failed.allocated_bytes, failed.largest_free_bytes) == (30 * MIB, 30 * MIB, 0)


def test_what_a_limited_run_gave_back_is_reproduced_under_its_limit():
    limit = 100 * MIB
    program = Program("", limit)
    program.free(program.alloc(60 * MIB))
    kept = program.alloc(30 * MIB, 5)
    program.alloc(50 * MIB, 5)
    with pytest.raises(Exception, match="out of memory"):
        program.alloc(40 * MIB)
    program.free(kept)
    device = device_of(program)
    assert [release.by_user for release in releases(device.history)] == [False]
    assert fidelity_of(device, "", limit).exact
    assert outcome(device, limit_bytes=limit).out_of_memory is not None
    assert fidelity_of(device_of(program)).exact  # without the limit: emptied where it was


def test_an_emptied_cache_is_told_from_one_given_back_for_a_request():
    program = Program()
    program.free(program.alloc(60 * MIB))
    program.empty_cache()
    program.alloc(30 * MIB)  # at once new memory, as after giving back for a request
    assert [release.by_user for release in releases(device_of(program).history)] == [True]
    for event in program.events:
        event["frames"] = []
    assert [release.by_user for release in releases(device_of(program).history)] == [False]


def test_blocks_from_before_are_kept_where_they_are_or_allocated_afresh():
    program = Program()
    holes = [program.alloc(30 * MIB) for _ in range(6)]
    for block in holes[::2]:
        program.free(block)
    skip = len(program.events)
    for _ in range(3):
        program.free(program.alloc(50 * MIB))
    device = device_of(program, skip)
    assert find_start(device).reserved_bytes == 180 * MIB
    assert outcome(device).peak_reserved_bytes == 230 * MIB
    afresh = outcome(device, afresh=True)
    assert afresh.peak_reserved_bytes == (3 * 30 + 50) * MIB
    assert afresh.device_allocations == 1


def test_many_blocks_from_before_whose_addresses_are_used_often_take_no_longer():
    """Not the number of blocks times that of allocations near them."""
    events = []
    for turn in range(15):
        for address in range(0, 4000 * 512, 512):
            block = {"addr": address, "size": 512}
            free = [{"action": "free_requested", **block}, {"action": "free_completed", **block}]
            events += [{"action": "alloc", **block}, *free] if turn else free
    segment = {"address": 0, "total_size": 2 * MIB, "segment_type": "small", "blocks": []}
    [device] = parse_snapshot({"segments": [segment], "device_traces": [events]}).devices
    begun = time.process_time()
    start = find_start(device)
    assert time.process_time() - begun < 2
    assert len(start.blocks) == 4000


def test_a_history_of_completed_frees_only_is_replayed():
    program = random_program(1, "")
    for block in program.pending:
        program.complete(block)
    program.events[:] = [event for event in program.events if event["action"] != "free_requested"]
    [device] = parse_snapshot(program.snapshot()).devices
    assert outcome(device).peak_reserved_bytes > 100 * MIB


def test_private_pools_share_nothing_with_the_default_one():
    program = Program()
    program.free(program.alloc(30 * MIB))
    snapshot = program.snapshot()
    graph = Program()
    graph.allocator.driver.reserve(1 << 40)
    graph.free(graph.alloc(30 * MIB))
    for segment in (more := graph.snapshot())["segments"]:
        segment["segment_pool_id"] = (0, 1)
    snapshot["segments"] += more["segments"]
    snapshot["device_traces"][0] += more["device_traces"][0]
    [device] = parse_snapshot(snapshot).devices
    found = outcome(device)
    assert [(pool.pool, pool.reserved_bytes) for pool in found.pools] == [
        ("large", 30 * MIB),
        ("private large", 30 * MIB),
    ]


def free_of(snapshot):
    [event] = [event for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
    return {**event, "action": "free_requested"}


def freed_segment_of(snapshot):
    """As if a segment that is there at the end had been given back."""
    [segment] = snapshot["segments"]
    return [{"action": "segment_free", "addr": segment["address"], "size": segment["total_size"]}]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda s: s["segments"].pop(), "which nothing holds later"),
        (lambda s: s["segments"].append({**s["segments"][0], "address": s["segments"][0]["address"] + MIB}), "overlap"),
        (lambda s: s["segments"].append(s["segments"][0]), "overlap"),
        (lambda s: s["device_traces"][0].extend(freed_segment_of(s)), "overlap"),
        (lambda s: s["device_traces"][0].append({"action": "free_requested", "addr": 5, "size": 7}), "in no segment"),
        (lambda s: s["segments"][0]["blocks"][0].update(size=1 << 40), "behind its segment"),
        (lambda s: s["device_traces"][0].extend([free_of(s)] * 2), "in no segment"),
    ],
)
def test_what_cannot_be_true_is_said(damage, reason):
    program = Program()
    program.alloc(30 * MIB)
    snapshot = program.snapshot()
    if reason in ("overlap", "behind its segment"):
        snapshot["device_traces"] = [[{"action": "snapshot", "size": 0}]]
    damage(snapshot)
    [device] = parse_snapshot(snapshot).devices
    with pytest.raises(ContradictionError, match=reason):
        outcome(device)


def test_a_segment_between_the_pages_of_an_expandable_one_cannot_be():
    program = Program(conf="expandable_segments:True")
    for _ in range(3):
        program.alloc(20 * MIB)
    snapshot = program.snapshot()
    [segment] = snapshot["segments"]
    snapshot["segments"] = [
        {**segment, "total_size": block["size"], "address": block["address"], "blocks": [block], "is_expandable": grows}
        for block, grows in zip(segment["blocks"], (True, False, True), strict=True)
    ]
    snapshot["device_traces"][0][:] = [{"action": "snapshot", "size": 0}]
    [device] = parse_snapshot(snapshot).devices
    with pytest.raises(ContradictionError, match="lies within the expandable one"):
        outcome(device, program.conf)


def test_settings_are_those_torch_states():
    stated = {
        "PYTORCH_CUDA_ALLOC_CONF": "large_segment_size_mb:30,expandable_segments:True",
        "expandable_segments": False,
        "max_split_size": 64 * MIB,
        "garbage_collection_threshold": 0.5,
        "roundup_power2_divisions": {f"{1 << n}": 4 for n in range(16)},
    }
    found = recorded_settings(parse_snapshot({"segments": [], "allocator_settings": stated}))
    assert found == parse_conf(
        "large_segment_size_mb:30,max_split_size_mb:64,garbage_collection_threshold:0.5,roundup_power2_divisions:4"
    )
    assert recorded_settings(parse_snapshot([])) == parse_conf("")
    odd = {"max_split_size": -1, "roundup_power2_divisions": {"1": "x"}, "garbage_collection_threshold": "?"}
    assert recorded_settings(parse_snapshot({"segments": [], "allocator_settings": odd})) == parse_conf("")
