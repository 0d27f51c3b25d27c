"""TORCH_NCCL_AVOID_RECORD_STREAMS: whether collectives keep their tensors alive by record_stream or by references."""

from probes.knobs.knob import Knob

KNOB = Knob(
    name="record_streams",
    hypothesis="memory that record_stream marks is reused only once the other stream is known to be done, so freed "
    "blocks stack up: active and reserved peaks grow, the allocated peak does not",
    acts_on="ProcessGroupNCCL of torch up to 2.7; from 2.8 the variable is ignored (pytorch#150398)",
    metric="peak_active_bytes",
    variable="TORCH_NCCL_AVOID_RECORD_STREAMS",
    values=("0", "1"),
    needs_cuda=True,
    known=(
        "torch 2.11 on 2 H200s: 0 and 1 gave identical memory and time, 1 prints the deprecation warning",
        "point-to-point still records streams whatever the variable says: 40 sends of 64 MiB kept 2,624–2,688 MiB "
        "active of 320 MiB allocated",
    ),
)
