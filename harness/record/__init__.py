"""Recording what each rank of a training run does: `Recorder` attaches to any training loop."""

from harness.record.recorder import Recorder

__all__ = ["Recorder"]
