"""What each mode needs to start: ranks to rehearse, environment, a daemon of MPS. The mode itself is chosen in
`harness.doctor`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config import Trainer
from harness.doctor import Choice, memory_bytes
from harness.doctor.shared_gpu import share
from harness.launch import launch
from harness.mps import mps
from harness.recording import Mode, Status
from harness.rehearsal import parse_ranks, ranks_to_rehearse
from harness.validation import validate_device, validate_rehearsal


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How a run starts: the ranks it rehearses, if it does, the environment that its mode needs, what the manifest says
    about it, and the reason in words."""

    mode: Mode
    why: str
    rehearsed: Sequence[int] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)


def prepare(
    config: Trainer.Config,
    choice: Choice,
    *,
    ranks: str | None = None,
    nccl: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Start:
    """How `config` starts in the mode chosen; nothing is started or written yet.

    `ranks` (`0,3`) are those to rehearse, `nccl` a library for ranks that share a GPU, `environment` what they will be
    given. Raises `UsageError` and `UnavailableError` for what the mode cannot do.
    """
    mode, device, gpus, why = choice
    validate_device(config, device)
    if mode == "shared-gpu":
        sharing = share(config, gpus, nccl, environment)
        why += f", NCCL {sharing.nccl.version} with at most {sharing.max_ctas} CTAs"
        return Start(mode=mode, why=why, environment=sharing.environment, about={"shared_gpu": sharing.to_json()})
    # On CPUs no rank may open a CUDA context by accident.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    if mode != "rehearsal":
        return Start(mode=mode, why=why, environment=hidden)
    validate_rehearsal(config)
    wanted = None if ranks is None else parse_ranks(ranks)
    rehearsed = ranks_to_rehearse(config, wanted, host_memory_bytes=memory_bytes() if device == "cpu" else None)
    return Start(mode=mode, why=why, rehearsed=rehearsed, environment=hidden)


def launch_in_mode(
    start: Start,
    config: Trainer.Config,
    directory: Path,
    *,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Status:
    """`harness.launch.launch` with what the mode needs, and `environment` and `options` on top; raises as it does.

    In mode shared-gpu it runs beside a daemon of MPS, which ends with the run however that ends.
    """
    ours = {**start.environment, **(environment or {})}
    with ExitStack() as stack:
        clients = stack.enter_context(mps({**os.environ, **ours})) if start.mode == "shared-gpu" else {}
        return launch(
            config,
            directory,
            mode=start.mode,
            environment={**ours, **clients},
            rehearse=start.rehearsed,
            about=start.about,
            **options,
        )
