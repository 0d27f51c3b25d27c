"""A process that launches `rank_program.py` as SCENARIO says; its own end is what the tests bring about."""

import os
import sys
from pathlib import Path

from harness.config import Trainer
from harness.launch import launch

status = launch(
    Trainer.Config(world_size=2),
    Path(sys.argv[1]),
    mode="cpu",
    environment={"SCENARIO": os.environ["SCENARIO"]},
    grace_s=5,
    program=(str(Path(__file__).with_name("rank_program.py")),),
)
print(status.state)
