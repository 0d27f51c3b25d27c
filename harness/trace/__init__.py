"""Chrome traces of torch.profiler → exact communication and overlap figures. Needs no torch.

`analyse` gives the whole `overlap --json` object; `read_captures`, `Capture.records` and `collective_counts` what a
comparison with predictions needs; `complete` leaves out steps that a trace holds in part.
"""

from harness.trace.analysis import analyse, analyse_captures
from harness.trace.capture import Capture, CollectiveRecord, collective_counts, read_captures
from harness.trace.complete import complete

__all__ = [
    "Capture",
    "CollectiveRecord",
    "analyse",
    "analyse_captures",
    "collective_counts",
    "complete",
    "read_captures",
]
