"""Kernels of point-to-point transfers that were started together, which carry no metadata of their own.

`batch_isend_irecv` (what torch.distributed.pipelining sends with) launches one kernel for all of its transfers when
the last has been asked for (ProcessGroupNCCL::endCoalescing), inside a range `nccl:coalesced` that says nothing. The
host says what it was: each transfer left a `record_param_comms` operator on the launching thread since the launch
before, and a pipeline's runtime opens a range named by the action.
"""

from __future__ import annotations

import numpy as np

from harness.pipeline.actions import parse_action
from harness.trace import classify
from harness.trace.classify import Label
from harness.trace.events import MISSING, Interned, Trace
from harness.trace.intervals import Ns

ACTION = "PP:"
PIPELINE_GROUP = "mesh_pp"
"""As init_device_mesh describes the group of a dimension `pp`."""
SENDS: dict[str, str] = {"SEND_F": "send", "SEND_B": "send", "RECV_F": "recv", "RECV_B": "recv"}


def attributed(trace: Trace, launch: Ns, thread: Ns) -> tuple[list[Label], Ns]:
    """The labels of `trace.device`, each with an index per event as in `trace.device.label`, in which these kernels
    carry what the host says of them. `launch` and `thread` are of each event's host call, MISSING without one."""
    labels: Interned[Label] = Interned({label: number for number, label in enumerate(trace.labels)})
    column = trace.device.label.copy()
    bare = np.array([_is_bare(label) for label in trace.labels] + [False], np.bool_)[column] & (launch != MISSING)
    if not bare.any():
        return trace.labels, column
    before = _Launches(trace, launch, thread)
    for index in np.flatnonzero(bare).tolist():
        name = trace.labels[column[index]].name
        at, on = int(launch[index]), int(thread[index])
        said = before.calls_of(at, on) or before.action_at(at, on)
        if said:
            column[index] = labels[_together(name, said)]
    return list(labels), column


def _is_bare(label: Label) -> bool:
    return not label.has_metadata and classify.is_nccl(label) and classify.kind_of(label) == "send_recv"


class _Launches:
    """What happened on each host thread before a kernel was launched there."""

    def __init__(self, trace: Trace, launch: Ns, thread: Ns) -> None:
        calls = trace.calls
        order = np.argsort(calls.start, kind="stable")
        self._labels = trace.call_labels
        self._calls = {
            int(one): [column[order][calls.thread[order] == one] for column in (calls.start, calls.label)]
            for one in np.unique(calls.thread)
        }
        known = launch != MISSING
        self._launched = {int(one): np.unique(launch[known & (thread == one)]) for one in np.unique(thread)}
        self._actions = [
            (start, start + dur, on, kind)
            for start, dur, on, name in zip(*(column.tolist() for column in trace.annotations), strict=True)
            if (kind := _transfer(trace.names[name])) is not None
        ]

    def calls_of(self, at: int, on: int) -> list[Label]:
        """Transfers asked for on a thread since the kernel that was launched there before."""
        if on not in self._calls:
            return []
        starts, labels = self._calls[on]
        launched = self._launched[on]
        place = int(np.searchsorted(launched, at))
        since = int(launched[place - 1]) if place else int(MISSING)
        mine = labels[np.searchsorted(starts, since, "right") : np.searchsorted(starts, at, "right")]
        found = [self._labels[number] for number in mine.tolist()]
        return [label for label in found if classify.kind_of(label) in ("send", "recv")]

    def action_at(self, at: int, on: int) -> list[Label]:
        """The transfer of a pipeline action whose range a launch is in."""
        kinds = [kind for start, end, thread, kind in self._actions if thread == on and start <= at < end]
        return [Label("", collective=kind, description=PIPELINE_GROUP) for kind in kinds]


def _transfer(name: str) -> str | None:
    if not name.startswith(ACTION):
        return None
    try:
        return SENDS.get(parse_action(name.removeprefix(ACTION)).kind)
    except ValueError:
        return None


def _together(name: str, said: list[Label]) -> Label:
    """One label for transfers that share a kernel: sizes of each direction add up; what differs is not said."""
    fields = {field: {getattr(label, field) for label in said} for field in Label._fields}
    alike = {field: values.pop() for field, values in fields.items() if len(values) == 1}
    sent, received = ([label for label in said if classify.kind_of(label) == kind] for kind in ("send", "recv"))
    if sent and received:
        elements = {"in_elements": _sum(sent), "out_elements": _sum(received)}
        return Label(**(alike | elements | {"name": name, "collective": classify.BOTH_WAYS}))
    total = _sum(said)
    kind = classify.kind_of(said[0])
    return Label(**(alike | {"name": name, "collective": kind, "in_elements": total, "out_elements": total}))


def _sum(labels: list[Label]) -> int | None:
    known = [label.in_elements for label in labels if label.in_elements is not None]
    return sum(known) if len(known) == len(labels) else None
