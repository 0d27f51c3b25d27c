"""What a device event is: communication, compute or memory operation; and a collective's kind, size and dimension.

Nothing here looks at streams: NCCL kernels may run on the compute stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

KERNEL_CATEGORIES = frozenset({"kernel"})
MEMORY_CATEGORIES = frozenset({"gpu_memcpy", "gpu_memset", "memcpy", "memset"})
LAUNCH_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "hip_driver"})
OPERATOR_CATEGORIES = frozenset({"cpu_op", "operator"})

NCCL_KERNEL = re.compile(r"(?<![a-z])(nccl|rccl)", re.IGNORECASE)
# Communication that no NCCL kernel does: torch's symmetric memory, vLLM's, SGLang's and TensorRT-LLM's all-reduces,
# NVSHMEM and DeepEP. Reported as symmetric_comm_ns as well.
SYMMETRIC_KERNEL = re.compile(
    r"multimem_|symmetric_memory|symm_mem|(one|two)_?shot_?all_?reduce|cross_device_reduce|custom_?all_?reduce"
    r"|quick_?all_?reduce|all_?reduce_fusion|nvshmem|deep_ep::|msccl",
    re.IGNORECASE,
)
RECORDED_CALL = "record_param_comms"
HOST_COMMUNICATION_OP = re.compile(rf"c10d::|_?c10d_functional|{RECORDED_CALL}")
# Operators of the dispatcher (`aten::mm`) and compiled code. The rest (autograd's engine and nodes, dispatch modes)
# only calls operators, and Python hooks run in it: FSDP2's wait there for its collectives, on the CPU to their end.
HOST_COMPUTING_OP = re.compile(r"(?!autograd::engine::)\w+::|.*(compiled|cpp_fused)", re.IGNORECASE)

# In this order: "reduce" is in the names of several others.
KINDS = (
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("allreduce", "all_reduce"),
    ("crossdevicereduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("sendrecv", "send_recv"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("send", "send"),
    ("recv", "recv"),
    ("reduce", "reduce"),
)

# c10::ScalarType names as a trace spells them.
DTYPE_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "QInt8", "QUInt8"), 1),
    **dict.fromkeys(("Float8_e5m2", "Float8_e4m3fn", "Float8_e5m2fnuz", "Float8_e4m3fnuz", "Float8_e8m0fnu"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16", "UInt16"), 2),
    **dict.fromkeys(("Int", "Float", "UInt32", "ComplexHalf", "QInt32"), 4),
    **dict.fromkeys(("Long", "Double", "UInt64", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}

NO_GROUP = "no group data"
BOTH_WAYS = "coalesced send_recv"
"""Transfers in both directions by one kernel, where the host says what they were: in is what was sent, out received."""
DEFAULT_GROUPS = frozenset({"default_pg", "undefined", ""})
# A group that FSDP2 makes for its reduce-scatters alone, over the ranks of an axis that has another group already
# (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py _set_separate_reduce_scatter_group).
SECOND_GROUPS = frozenset({"fsdp_reduce_scatter"})


class Label(NamedTuple):
    """What one kind of kernel launch says about itself: its name and, for a collective, the metadata torch attaches.
    Sizes are in elements of `dtype`; all but `name` are None where the trace has no collective metadata."""

    name: str
    collective: str | None = None
    group: str | None = None
    description: str | None = None
    ranks: str | None = None
    dtype: str | None = None
    in_elements: int | None = None
    out_elements: int | None = None

    @property
    def has_metadata(self) -> bool:
        return bool(self.collective or self.group)


def is_nccl(label: Label) -> bool:
    return label.has_metadata or bool(NCCL_KERNEL.search(label.name))


def is_symmetric(label: Label) -> bool:
    """A communication kernel of the symmetric-memory class: not NCCL's, whether or not it carries metadata."""
    return not NCCL_KERNEL.search(label.name) and bool(SYMMETRIC_KERNEL.search(label.name))


def collective_kind(raw: str) -> str:
    """The kind of a collective by the name torch, gloo or the kernel gives it, "other" when none fits."""
    letters = re.sub(r"[^a-z]", "", raw.split("(")[0].lower())
    if re.search(r"deepep.*(dispatch|combine)", letters):
        return "all_to_all"
    return next((kind for part, kind in KINDS if part in letters), "other")


def raw_kind(label: Label) -> str:
    """The collective's name from its metadata, else the kernel's name without its arguments."""
    return label.collective or label.name.split("(")[0]


def kind_of(label: Label) -> str:
    kind = collective_kind(raw_kind(label))
    return collective_kind(label.name) if kind == "other" else kind


def full_bytes(kind: str, in_bytes: int | None, out_bytes: int | None) -> int | None:
    """The size of a collective's full (unsharded) side in bytes: an all-gather's output, a reduce-scatter's input,
    the tensor of every other kind; None where the trace does not say."""
    first, second = (out_bytes, in_bytes) if kind in ("all_gather", "recv") else (in_bytes, out_bytes)
    return second if first is None else first


def size_bytes(elements: int | None, dtype: str | None) -> int | None:
    width = DTYPE_BYTES.get(dtype or "")
    return None if elements is None or width is None else elements * width


def rank_list(text: str | None) -> tuple[int, ...] | None:
    """Ranks of a process group from the trace's text; None when there is none or it was cut (after 30 ranks)."""
    if not text or "..." in text:
        return None
    try:
        ranks = json.loads(text)
    except ValueError:
        return None
    return rank_tuple(ranks)


def rank_tuple(ranks: object) -> tuple[int, ...] | None:
    if isinstance(ranks, str):
        return rank_list(ranks)
    if isinstance(ranks, list) and ranks and all(type(rank) is int for rank in ranks):
        return tuple(ranks)
    return None


class Groups:
    """The process groups a trace's `distributedInfo` lists, and the parallel dimension each one is.

    `mesh` adds axes that have no group of their own: name → the rank lists of that axis.
    """

    def __init__(self, info: object, mesh: Mapping[str, Sequence[Sequence[int]]] | None = None) -> None:
        self._description: dict[str, str] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._axis: dict[tuple[int, ...], str] = {}
        config = info.get("pg_config") if isinstance(info, dict) else None
        entries: list[Any] = config if isinstance(config, list) else []
        for group in entries:
            if not isinstance(group, dict):
                continue
            name, description = str(group.get("pg_name", "")), str(group.get("pg_desc") or "")
            ranks = rank_tuple(group.get("ranks"))
            self._description[name] = description
            if ranks is not None:
                self._ranks[name] = ranks
                if description not in DEFAULT_GROUPS | SECOND_GROUPS:
                    self._axis.setdefault(ranks, description)
        for axis, groups in (mesh or {}).items():
            for members in groups:
                self._axis.setdefault(tuple(members), axis)

    def dimension(self, group: str | None, description: str | None, ranks: str | None) -> str:
        """The dimension's name: the group's description; for the default group and the second group of an axis the mesh
        axis with the same ranks, else "world" and its description; "no group data" where the trace does not tell."""
        described = description or self._description.get(group or "", "")
        if described not in DEFAULT_GROUPS | SECOND_GROUPS:
            return described
        members = self.members(group, ranks, described)
        axis = self._axis.get(members) if members else None
        if axis is not None:
            return axis
        if described in SECOND_GROUPS:
            return described
        is_default = described == "default_pg" or (members is not None and members == self._ranks_of("default_pg"))
        return "world" if is_default else NO_GROUP

    def knows(self, group: str | None) -> bool:
        """Whether the file lists a group of this name."""
        return group in self._description

    def members(
        self, group: str | None, ranks: str | None = None, description: str | None = None
    ) -> tuple[int, ...] | None:
        """The global ranks of a group, None where neither the event nor the file lists them all."""
        return rank_list(ranks) or self._ranks.get(group or "") or self._ranks_of(description or "")

    def _ranks_of(self, description: str) -> tuple[int, ...] | None:
        names = (name for name, text in self._description.items() if text == description and description)
        return next((self._ranks[name] for name in names if name in self._ranks), None)
