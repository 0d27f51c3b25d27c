"""What all workloads share: a process group over all ranks, and steps around which a recorder is attached."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from harness.config import Trainer
from harness.config_json import to_dict
from harness.trainer.build import DTYPES
from harness.trainer.legacy_streams import collective_memory
from harness.trainer.trainer import abandoned_collectives, device_and_mode, process_group

if TYPE_CHECKING:
    from harness.record.recorder import Recorder


class Workload(ABC):
    """One rank of a workload; which one, torchrun's environment says (without it: the only one).

    A step logs a checksum of what the ranks sent to one another as its `loss`, so that runs which should do the same
    can be held against one another. Raises `UsageError` as `harness.validation` does.
    """

    def __init__(self, config: Trainer.Config, directory: Path) -> None:
        self.config = config
        self.directory = directory
        self.device, self.mode = device_and_mode(config)
        self.dtype = DTYPES[config.training.mixed_precision_param]

    def train(self) -> list[float]:
        """Makes `training.steps` steps into a recording at `directory`; returns the checksum of each. (The name is the
        trainer's: whoever starts a rank need not know which it is.)"""
        training = self.config.training
        with process_group(self.device, training.init_timeout_s), collective_memory(training.collective_memory):
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            recorder = self.config.recorder.build(
                self.directory,
                device=self.device,
                run_config=to_dict(self.config),
                mesh={"world": list(range(self.world_size))},
                mode=self.mode,
            )
            with recorder, abandoned_collectives(self.device), torch.no_grad():
                torch.manual_seed(training.seed + self.rank)
                self.allocate()
                checksums = torch.zeros(training.steps, device=self.device)
                for number in range(training.steps):
                    with recorder.step():
                        self.step(recorder, checksums[number])
                        recorder.log(loss=checksums[number])
                return [float(value) for value in checksums.tolist()]

    @abstractmethod
    def allocate(self) -> None:
        """Makes what lives as long as the run."""

    @abstractmethod
    def step(self, recorder: Recorder, checksum: torch.Tensor) -> None:
        """Makes one step and adds to `checksum`, 0-d float32, in place."""

    def random(self, *shape: int) -> torch.Tensor:
        """The same on every run, another on every rank."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)
