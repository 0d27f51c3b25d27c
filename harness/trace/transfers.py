"""When the host waited for sends and receives.

gloo opens the annotation of a send or receive in the call and closes it when somebody has waited for the work, however
early the bytes went (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp SendWork, RecvWork). So the annotation of an
asynchronous one spans whatever its thread ran in between, and says nothing of when it was transferred. What is known is
the call, and the wait at the end: since the last thing that the thread began or ended within the annotation.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from harness.trace.activity import Mask
from harness.trace.events import MISSING, Trace
from harness.trace.intervals import Ns


def waits(trace: Trace, works: Mask) -> tuple[Ns, Mask]:
    """When the wait for each of the works began, in ns, and whether its thread ran something else before that.

    `works` is over the trace's annotations, and so is what is returned; for other annotations it is their start. With
    nothing in between the work was waited for at once, and its wait begins with it. What the thread does without an
    operator or annotation (Python alone) counts as waiting.
    """
    rows, operators = trace.annotations, trace.operators
    since = rows.start.copy()
    for thread in np.unique(rows.thread[works]):
        mine, others = works & (rows.thread == thread), ~works & (rows.thread == thread)
        ran = operators.thread == thread
        begun = np.concatenate((operators.start[ran], rows.start[others]))
        ended = begun + np.concatenate((operators.dur[ran], rows.dur[others]))
        start, end = rows.start[mine], (rows.start + rows.dur)[mine]
        order, ends_of_works = np.argsort(ended, kind="stable"), np.sort(end)
        ended_in_order, begun_in_order = np.append(ended[order], MISSING), np.append(begun[order], MISSING)
        last = _latest(ended_in_order[:-1], end, side="right")
        # What encloses the start, such as the call, is no sign that the thread went on.
        while (encloses := (begun_in_order[last] <= start) & (ended_in_order[last] > start)).any():
            last = last - encloses
        begun = np.append(np.sort(begun), MISSING)
        since[mine] = np.maximum.reduce(
            (
                start,
                ended_in_order[last],
                begun[_latest(begun[:-1], end, side="left")],
                np.append(ends_of_works, MISSING)[_latest(ends_of_works, end, side="left")],
            )
        )
    return since, since > rows.start


def _latest(moments: Ns, until: Ns, *, side: Literal["left", "right"]) -> Ns:
    """The place of the last of the sorted moments before each of `until` (with "right": or at it), -1 without one."""
    return np.searchsorted(moments, until, side=side) - 1
