"""What two runs differ in besides their figures: configuration, environment, versions, devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.compare.measured import Measured

# Different in every run, whatever is compared.
OF_EACH_RUN = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "MESHSCOPE_LAUNCH_ID",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "CUDA_MPS_LOG_DIRECTORY",  # in mode shared-gpu each run has a daemon of its own
        "CUDA_MPS_PIPE_DIRECTORY",
    }
)

# Where these differ, a difference of the figures is not that of a setting.
SAME_MACHINE = ("mode", "world_size", "devices", "versions.torch", "versions.cuda", "versions.nccl", "versions.driver")
SAME_WORK = (
    "config.model.",
    "config.training.seq_len",
    "config.training.micro_batch_size",
    "config.training.gradient_accumulation_steps",
    "config.workload",
    "config.collectives.iterations",
    "config.collectives.rows",
    "config.collectives.dim",
    "config.point_to_point.sends",
    "config.point_to_point.activation_mib",
    "tokens_per_step",
)


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing the runs do not share; None where a run does not state it."""

    what: str
    a: Any
    b: Any


def differences(a: Measured, b: Measured) -> list[Difference]:
    """What both runs or one of them state, and not alike; in the order of the facts."""
    of_a, of_b = facts(a), facts(b)
    names = dict.fromkeys([*of_a, *of_b])
    return [Difference(name, of_a.get(name), of_b.get(name)) for name in names if of_a.get(name) != of_b.get(name)]


def incomparable(found: list[Difference]) -> list[str]:
    """Why the figures of the two runs do not stand for one setting; empty where nothing speaks against it."""
    both = [difference for difference in found if difference.a is not None and difference.b is not None]
    reasons = [f"{d.what} differs: A {d.a}, B {d.b}" for d in both if d.what in SAME_MACHINE]
    work = [f"{d.what} {d.a} in A, {d.b} in B" for d in both if d.what.startswith(SAME_WORK)]
    return reasons + ([f"the runs do different work: {'; '.join(work)}"] if work else [])


def facts(measured: Measured) -> dict[str, Any]:
    """What a run says of itself, flat; a folder of traces says how many ranks it has and little else."""
    recording = measured.recording
    if recording is None:
        ranks = {entry["rank"] for entry in (measured.overlap or {"ranks": []})["ranks"]}
        return {"mode": measured.mode} | ({"ranks with a trace": len(ranks)} if ranks else {})
    manifest = recording.manifest
    found: dict[str, Any] = {"mode": measured.mode, "world_size": manifest.get("world_size")}
    status = recording.status
    found["status"] = status.state if status else None
    found["devices"] = devices(recording.ranks.values())
    found |= dict(flat("versions", manifest.get("versions")))
    found |= dict(flat("config", manifest.get("config")))
    found["tokens_per_step"] = manifest.get("tokens_per_step")
    git = manifest.get("git")
    found |= dict(flat("git", {k: git.get(k) for k in ("sha", "dirty")} if isinstance(git, Mapping) else None))
    first = recording.ranks[min(recording.ranks)] if recording.ranks else {}
    return found | environment(first.get("environment_before"), first.get("environment_after"))


def devices(ranks: Any) -> str | None:
    """The devices' names with their number: `8 × NVIDIA H200`."""
    names: dict[str, int] = {}
    for rank in ranks:
        device = rank.get("device")
        if isinstance(device, Mapping) and device.get("name"):
            name = str(device["name"])
            names[name] = names.get(name, 0) + 1
    return ", ".join(f"{count} × {name}" for name, count in sorted(names.items())) or None


def environment(before: Any, after: Any) -> dict[str, Any]:
    """Variables of the lowest rank; those that changed while torch was initialised once before and once after."""
    before, after = (one if isinstance(one, Mapping) else {} for one in (before, after))
    found = {}
    for name in [name for name in dict.fromkeys([*before, *after]) if name not in OF_EACH_RUN]:
        if before.get(name) == after.get(name):
            found[f"environment: {name}"] = before[name]
        else:
            found[f"environment before init: {name}"] = before.get(name)
            found[f"environment after init: {name}"] = after.get(name)
    return found


def flat(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings under dotted names."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from flat(f"{name}.{key}", value)
    elif tree is not None:
        yield name, tree
