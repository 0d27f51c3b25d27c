"""compile.cuda_graphs: forward and backward of every compiled layer captured and replayed."""

from harness.config import Trainer
from harness.recording import Mode
from probes.knobs.knob import Arm, Inaction, Knob


def _not_captured(config: Trainer.Config, mode: Mode, arm: Arm) -> Inaction | None:
    if mode == "cpu":
        why = "CUDA graphs need CUDA: in mode cpu nothing is captured"
    elif config.parallelism.pp > 1:
        why = (
            f"with parallelism.pp={config.parallelism.pp} a layer's activations of several micro-batches live at once, "
            "and the replay of a graph writes them to one place: set pp to 1"
        )
    elif not config.compile.blocks:
        why = "inductor captures compiled layers, and none is compiled: add --compile.blocks true"
    elif config.compile.backend != "inductor":
        why = f"inductor captures them, and compile.backend is {config.compile.backend}: leave it at inductor"
    else:
        return None
    return Inaction("unavailable in this build", why)


KNOB = Knob(
    name="cuda_graphs",
    hypothesis="one launch for the whole forward, or backward, of a layer takes the host out of a step that waits for "
    "it, and keeps a private pool of memory",
    acts_on="layers compiled by inductor on CUDA (--compile.blocks true), without a pipeline; what was captured, and "
    "why not, is in ranks/rank{r}.json under compile.cuda_graphs",
    metric="step_wall_ns",
    values=("false", "true"),
    field="compile.cuda_graphs",
    inaction=_not_captured,
    known=(
        "a graph replays at the addresses at which it was captured: where FSDP2 gathers a layer's parameters elsewhere "
        "it is captured again, and after 128 times left out (torch._inductor.config.triton."
        "cudagraph_unexpected_rerecord_limit)",
        "Llama 3.2 1B with 8 layers on one H200, torch 2.11: 16 graphs captured 128 times in 9 steps, 216 to 300 ms a "
        "step against 55 without",
        "torchtitan 0.3.0 replays forward and backward as one graph by default (torchtitan#3559); its traces then have "
        "neither FSDP units nor phases; here the hooks of FSDP2 stay outside the graphs, and traces keep both",
        "kernels of NCCL get longer inside a graph as they share the device: duration is not cost (torchtitan#2071)",
    ),
)
