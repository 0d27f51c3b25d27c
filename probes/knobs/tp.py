"""parallelism.tp_async: where the redistributions of tensor parallelism are waited for."""

from harness.config import Trainer
from harness.recording import Mode
from probes.knobs.knob import Arm, Inaction, Knob


def _one_rank(config: Trainer.Config, mode: Mode, arm: Arm) -> Inaction | None:
    if config.parallelism.tp == 1:
        return Inaction("unavailable in this build", "nothing is redistributed with parallelism.tp=1: use two or more")
    return None


KNOB = Knob(
    name="tp.async",
    hypothesis="a redistribution that is waited for where its result is used hides behind what is computed until then",
    acts_on="DTensor redistributions, tp of 2 or more, any device",
    metric="step_wall_ns",
    field="parallelism.tp_async",
    values=("false", "true"),
    inaction=_one_rank,
    known=(
        "little can be hidden in a decoder: each result is used by the next operator, so kernels start as before and "
        "what remains is the host's time between the two",
        "no effect on sequence-parallel all-gathers: what is gathered along the sequence is put together by a copy, "
        "which waits (torch.distributed._functional_collectives.all_gather_tensor, gather_dim != 0)",
        "same collectives, same allocated peak",
    ),
)
