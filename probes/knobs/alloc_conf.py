"""PYTORCH_ALLOC_CONF: how the CUDA caching allocator takes memory from the driver and gives it back."""

import re

from harness.config import Trainer
from harness.recording import Mode
from harness.variables import KNOWN
from probes.knobs.knob import Arm, Inaction, Knob

VARIABLE = "PYTORCH_ALLOC_CONF"
NAMES = (VARIABLE, *(known.name for known in KNOWN if known.alias_of == VARIABLE))
"""The current name, which wins, and older ones."""
DEFAULT = "expandable_segments:False"
"""What an unset variable means, as far as it can be written (c10/cuda/CUDAAllocatorConfig.h)."""
ACTS_ON = "torch's CUDA caching allocator, in every mode with a GPU; read once, at the first allocation of a process"


def options(value: str) -> list[str]:
    """The options of a value, sorted, without those that are the default. A list holds commas of its own."""
    found = (option.strip() for option in re.split(r",(?![^\[]*\])", value))
    return sorted(option for option in found if option and option != DEFAULT)


def _normal(value: str) -> str:
    """One way to write values that mean the same."""
    return ",".join(options(value))


def _inaction(config: Trainer.Config, mode: Mode, arm: Arm) -> Inaction | None:
    """The collector runs only if the process has a limit of its own (CUDACachingAllocator.cpp, `malloc`)."""
    value = next((value for name in NAMES if (value := arm.environment.get(name)) is not None), "")
    given = {option.partition(":")[0] for option in options(value)}
    if given == {"garbage_collection_threshold"}:
        return Inaction(
            "ignored by this build",
            f"{value}: the allocator collects only in a process with a memory limit (CUDACachingAllocator.cpp, "
            "malloc), which the trainer does not set: add per_process_memory_fraction:0.9 to every arm",
        )
    return None


EXPANDABLE_SEGMENTS = Knob(
    name="alloc_conf.expandable_segments",
    hypothesis="segments that can grow leave less unused between blocks: the same tensors need fewer reserved bytes",
    acts_on=ACTS_ON,
    metric="peak_reserved_bytes",
    variable=VARIABLE,
    default=DEFAULT,
    template="expandable_segments:{}",
    values=("unset", "True"),
    needs_cuda=True,
    normal=_normal,
    inaction=_inaction,
    known=(
        "2 H200s, torch 2.11: reserved 25.676 → 24.107 GiB (FSDP2 on 2), 16.41 → 15.816 GiB (TP2); allocated "
        "22.3726 → 22.3668 and 14.4543 → 14.4504 GiB",
        "H200, llama3 1B rehearsed: reserved 35.004 → 35.703 GiB, which is worse: it depends on the configuration",
    ),
)

MAX_SPLIT_SIZE = Knob(
    name="alloc_conf.max_split_size_mb",
    hypothesis="large cached blocks that are never split stay free for large tensors: fewer reserved bytes, if tensors "
    "of one size come back; more, if a small tensor may no longer use what is left of a large block",
    acts_on=ACTS_ON,
    metric="peak_reserved_bytes",
    variable=VARIABLE,
    default=DEFAULT,
    template="max_split_size_mb:{}",
    values=("unset", "64", "256"),
    needs_cuda=True,
    normal=_normal,
    inaction=_inaction,
    known=("unset splits blocks of any size; 20 is the smallest limit that torch takes",),
)

GARBAGE_COLLECTION_THRESHOLD = Knob(
    name="alloc_conf.garbage_collection_threshold",
    hypothesis="cached blocks that nobody used for long go back to the driver before the limit is reached: the "
    "reserved peak stays below it, at the price of cudaFree, which waits for the device",
    acts_on=f"{ACTS_ON}; only in a process with a memory limit, so every arm has one; not on expandable segments",
    metric="peak_reserved_bytes",
    variable=VARIABLE,
    default=DEFAULT,
    template="garbage_collection_threshold:{},per_process_memory_fraction:0.9",
    values=("per_process_memory_fraction:0.9", "0.6", "0.8"),
    needs_cuda=True,
    normal=_normal,
    inaction=_inaction,
    known=(
        "without a memory limit nobody looks at the threshold (torch 2.11 to 2.13, CUDACachingAllocator.cpp, malloc)",
        "expandable segments are left out (pytorch#134338)",
    ),
)

ROUNDUP_POWER2_DIVISIONS = Knob(
    name="alloc_conf.roundup_power2_divisions",
    hypothesis="sizes rounded up to so many steps between powers of two fit more freed blocks: fewer reserved bytes "
    "where sizes vary from step to step, more allocated and reserved bytes where they do not",
    acts_on=ACTS_ON,
    metric="peak_reserved_bytes",
    variable=VARIABLE,
    default=DEFAULT,
    template="roundup_power2_divisions:{}",
    values=("unset", "4", "16"),
    needs_cuda=True,
    normal=_normal,
    inaction=_inaction,
    known=(
        "this trainer's sizes repeat exactly, so that rounding can only add",
        "a power of two, or one per size as in --arm '[256:1,512:2,>:4]'",
    ),
)

KNOBS = (EXPANDABLE_SEGMENTS, MAX_SPLIT_SIZE, GARBAGE_COLLECTION_THRESHOLD, ROUNDUP_POWER2_DIVISIONS)
