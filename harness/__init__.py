"""meshscope: measures, predicts and compares memory and communication of distributed PyTorch training.

Reading commands (`harness.trace`, `harness.memory`, `harness.ledger`) never import torch;
`harness.trainer` and `harness.record` do, when they are used.
"""

__version__ = "0.1.0"
