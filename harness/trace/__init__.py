"""Chrome traces of torch.profiler → exact communication and overlap figures. Needs no torch.

`analyse` gives the whole `overlap --json` object; `read_captures`, `Capture.records` and `collective_counts` what a
comparison with predictions needs.
"""

from harness.trace.analysis import analyse, analyse_captures
from harness.trace.capture import Capture, CollectiveRecord, collective_counts, read_captures

__all__ = ["Capture", "CollectiveRecord", "analyse", "analyse_captures", "collective_counts", "read_captures"]
