"""What is known about a recording, a folder of traces and snapshots, or one file, put together for a reader."""

from harness.report.build import Report, build

__all__ = ["Report", "build"]
