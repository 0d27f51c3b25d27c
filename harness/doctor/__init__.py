"""What this machine can run, what is missing, and the command that provides it. Nothing here imports torch."""

from harness.doctor.checks import examine
from harness.doctor.findings import Check, Report
from harness.doctor.modes import LATER_MODES, choose_mode

__all__ = ["LATER_MODES", "Check", "Report", "choose_mode", "examine"]
