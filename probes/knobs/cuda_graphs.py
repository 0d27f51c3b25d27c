"""CUDA graphs of forward and backward: what keeps this trainer from them, layout by layout."""

from harness.config import Trainer
from harness.recording import Mode
from probes.knobs.knob import Arm, Inaction, Knob


def _not_captured(config: Trainer.Config, mode: Mode, arm: Arm) -> Inaction:
    layout = config.parallelism
    if layout.pp > 1:
        why = "a pipeline's schedule sends and receives between micro-batches"
    elif config.fsdp_shards > 1:
        why = (
            f"with {config.fsdp_shards} shards FSDP2 frees parameters and gathers them again through the caching "
            "allocator, on side streams, in every forward and backward"
        )
    elif layout.tp > 1:
        why = (
            f"with tp={layout.tp} functional collectives hand their work to a registry on the host, and FSDP2, which "
            "casts the parameters, reduces gradients into new memory on a side stream"
        )
    else:
        why = (
            "FSDP2, which casts the parameters on a single rank too, reduces gradients into new memory on a side stream"
        )
    return Inaction("unavailable in this build", f"this trainer captures no CUDA graph: {why}")


KNOB = Knob(
    name="cuda_graphs",
    hypothesis="one launch for a whole forward and backward takes the host out of a step that waits for it, and keeps "
    "a private pool of memory",
    acts_on="CUDA; nothing in this trainer yet",
    metric="step_wall_ns",
    values=("off", "on"),
    inaction=_not_captured,
    known=(
        "torchtitan 0.3.0 replays forward and backward as one graph by default (torchtitan#3559); its traces then have "
        "neither FSDP units nor phases",
        "kernels of NCCL get longer inside a graph as they share the device: duration is not cost (torchtitan#2071)",
    ),
)
