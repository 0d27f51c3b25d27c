"""parallelism.reshard_after_forward: whether FSDP2 frees gathered parameters after forward."""

from probes.knobs.knob import Knob

KNOB = Knob(
    name="reshard",
    hypothesis="keeping parameters gathered until backward saves the second all-gather and costs the memory of the "
    "whole gathered model",
    acts_on="FSDP2, any device; dp_shard of 2 or more",
    metric="step_wall_ns",
    field="parallelism.reshard_after_forward",
    values=("default", "always", "never"),
    known=("torch's own default keeps the last unit gathered, which backward needs first",),
)
