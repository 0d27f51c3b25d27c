"""Predictions from a `Trainer.Config` alone: memory of every rank and communication of every mesh dimension.

The ledger replays one training step symbolically: every allocation of the trainer, FSDP2, autograd and the kernels is
written down in closed form, lives as long as its counterpart in torch does, and the largest sum is the peak. It
imports neither torch nor anything that measures.
"""

from harness.ledger.prediction import Prediction, predict
from harness.ledger.step import Implementation

__all__ = ["Implementation", "Prediction", "predict"]
