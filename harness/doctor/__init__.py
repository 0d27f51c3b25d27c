"""What this machine can run, what is missing, and the command that provides it. Nothing here imports torch."""

from harness.doctor.checks import examine
from harness.doctor.findings import Check, Report
from harness.doctor.modes import Choice, choose_mode, memory_bytes

__all__ = ["Check", "Choice", "Report", "choose_mode", "examine", "memory_bytes"]
