"""What a block is and when it was made, where its allocation carries no label: by holder, and by range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.errors import InputError
from harness.memory.device import DeviceAnalysis, analyse_device, summarise
from harness.memory.snapshot import parse_snapshot, read_snapshot

from .build import MIB, Allocator, frame, snapshot_of, write


def holder(address: int, category: str, size: int = MIB, device: int = 0, name: str = "layer.weight") -> dict[str, Any]:
    return {"device": device, "address": address, "size": size, "category": category, "name": name}


def analysed(*allocators: Allocator, **more: Any) -> list[DeviceAnalysis]:
    return [analyse_device(device) for device in parse_snapshot(snapshot_of(*allocators) | more).devices]


def categories(item: DeviceAnalysis) -> dict[str, int]:
    return {share.name: share.bytes for share in summarise(item).by_category}


def test_blocks_from_before_the_window_are_what_holds_them() -> None:
    allocator = Allocator()
    weight, moment, other = (allocator.alloc(size * MIB) for size in (4, 8, 16))
    allocator.events.clear()  # the history starts here
    gradient = allocator.alloc(2 * MIB, frame("forward"), metadata="category=activation;phase=forward;step=3")
    allocator.alloc(MIB, frame("forward"))
    labels = [
        holder(moment, "optimizer_state", 8 * MIB),
        holder(weight + 512, "parameter", MIB),  # a storage inside a block
        holder(gradient, "gradient", 2 * MIB),
        holder(other, "parameter", 16 * MIB, device=1),  # the same address of another device
    ]
    [item] = analysed(allocator, meshscope_labels=labels)
    assert categories(item) == {
        "pre_window": 16 * MIB,
        "optimizer_state": 8 * MIB,
        "parameter": 4 * MIB,
        "gradient": 2 * MIB,
        "activation": MIB,
    }


def test_a_holder_says_nothing_about_an_earlier_block_at_its_address() -> None:
    allocator = Allocator()
    early = allocator.alloc(4 * MIB, frame("forward"))
    allocator.free(early)
    allocator._next = early
    assert allocator.alloc(MIB, frame("helper")) == early
    [item] = analysed(allocator, meshscope_labels=[holder(early, "parameter")])
    assert [block.held_as for block in item.lives.blocks] == [None, "parameter"]
    assert categories(item) == {"activation": 4 * MIB}


def test_each_device_has_its_own_holders() -> None:
    first, second = Allocator(0), Allocator(1)
    labels = [
        holder(first.alloc(MIB), "parameter"),
        holder(second.alloc(MIB), "buffer", device=1),
    ]
    assert [categories(item) for item in analysed(first, second, meshscope_labels=labels)] == [
        {"parameter": MIB},
        {"buffer": MIB},
    ]


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("weight", "meshscope_labels[0] is not a dict"),
        ({"device": 0, "address": 1, "size": 1, "name": "x"}, "meshscope_labels[0] has no category or no name"),
        ({"device": 0, "size": 1, "category": "a", "name": "x"}, "meshscope_labels[0].address is missing"),
        ({"device": 0, "address": 1, "size": -1, "category": "a", "name": "x"}, "which is no size in bytes"),
    ],
)
def test_malformed_labels_are_named(tmp_path: Path, label: Any, reason: str) -> None:
    path = write(tmp_path / "0.pickle", snapshot_of(Allocator()) | {"meshscope_labels": [label]})
    with pytest.raises(InputError) as error:
        read_snapshot(path)
    assert reason in str(error.value)


class Ranges(list[dict[str, Any]]):
    """Edges of named ranges at an allocator's clock."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator

    def start(self, name: str) -> None:
        self.append({"name": name, "stage": "START", "device": 0, "time_us": self._allocator.clock_us + 1})

    def end(self, name: str) -> None:
        self.append({"name": name, "stage": "END", "device": 0, "time_us": self._allocator.clock_us + 1})


def test_the_backwards_own_threads_get_phase_and_step_from_ranges() -> None:
    allocator = Allocator()
    ranges = Ranges(allocator)
    label = "category=activation;phase=forward;step=3"
    allocator.alloc(1 * MIB, frame("helper"))  # before every range
    ranges.start("ProfilerStep#3")
    ranges.start("forward")
    allocator.alloc(2 * MIB, frame("helper"), metadata=label)
    ranges.end("forward")
    allocator.alloc(4 * MIB, frame("helper"))  # between phases
    ranges.start("backward")
    allocator.alloc(8 * MIB)  # autograd's thread: neither label nor Python frames
    allocator.alloc(16 * MIB, frame("helper"))  # a hook in that thread
    ranges.start("Optimizer.step#AdamW.step")  # an optimizer in the backward
    allocator.alloc(32 * MIB, frame("helper"))
    ranges.end("Optimizer.step#AdamW.step")
    ranges.end("backward")
    ranges.end("ProfilerStep#3")
    ranges.start("ProfilerStep#4")  # still open at the end
    allocator.alloc(64 * MIB, frame("helper"), metadata="category=lookup;step=7")
    [item] = analysed(allocator, external_annotations=list(ranges))
    assert [(block.size // MIB, block.phase, block.step) for block in item.lives.blocks] == [
        (1, None, None),
        (2, "forward", 3),
        (4, None, 3),
        (8, "backward", 3),
        (16, "backward", 3),
        (32, "optimizer", 3),
        (64, None, 7),
    ]
    assert categories(item) == {
        "unknown": 5 * MIB,
        "activation": 2 * MIB,
        "backward": 24 * MIB,
        "optimizer_state": 32 * MIB,
        "lookup": 64 * MIB,
    }


def test_a_stack_tells_more_than_a_range() -> None:
    allocator = Allocator()
    ranges = Ranges(allocator)
    ranges.start("backward")
    allocator.alloc(MIB, frame("unpack_hook", "torch/utils/checkpoint.py"))
    allocator.alloc(2 * MIB, frame("forward"))
    ranges.end("backward")
    [item] = analysed(allocator, external_annotations=list(ranges))
    assert categories(item) == {"recompute": MIB, "activation": 2 * MIB}


def test_without_times_nothing_is_placed() -> None:
    allocator = Allocator()
    ranges = Ranges(allocator)
    ranges.start("backward")
    allocator.alloc(MIB, frame("helper"))
    ranges.end("backward")
    for event in allocator.events:
        del event["time_us"]
    [item] = analysed(allocator, external_annotations=list(ranges))
    assert [(block.phase, block.step) for block in item.lives.blocks] == [(None, None)]
