"""How collectives keep their tensors alive: by record_stream or by references.

The variable TORCH_NCCL_AVOID_RECORD_STREAMS chose between them up to torch 2.7; `training.collective_memory` does so
on any torch, by emulation (`harness.trainer.legacy_streams`).
"""

from probes.knobs.knob import Knob

KNOB = Knob(
    name="record_streams",
    hypothesis="memory that record_stream marks is reused only once the other stream is known to be done, so freed "
    "blocks stack up: active and reserved peaks grow, the allocated peak does not",
    acts_on="the variable: ProcessGroupNCCL of torch up to 2.7, later ones ignore it (pytorch#150398); "
    "references, record_stream, record_stream_async: collectives of any torch on CUDA, by emulation, as in "
    "--arms references,record_stream --module workloads --config collectives; python=PATH: another torch",
    metric="peak_active_bytes",
    variable="TORCH_NCCL_AVOID_RECORD_STREAMS",
    values=("0", "1"),
    field="training.collective_memory",
    field_values=("references", "record_stream", "record_stream_async"),
    needs_cuda=True,
    known=(
        "torch 2.11 on 2 H200s: 0 and 1 gave identical memory and time, 1 prints the deprecation warning",
        "40 × all-gather, matrix product, reduce-scatter on 2 H200s, torch 2.11: references 352 MiB active, "
        "record_stream 2,688–3,808 MiB, at the same speed and the same allocated peak",
        "torch 2.2 to 2.7 recorded no streams for synchronous all-gathers and reduce-scatters such as FSDP2's "
        "(pytorch#111431): record_stream_async is what they did, record_stream what torch did before",
        "point-to-point still records streams whatever is set: 40 sends of 64 MiB on 2 H200s kept 2,624–2,688 MiB "
        "active of 320 MiB allocated (--module workloads --config point_to_point shows it; buffers that are used again "
        "do not stack)",
    ),
)
