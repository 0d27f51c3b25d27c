"""CUDA_DEVICE_MAX_CONNECTIONS: hardware work queues between the host and one GPU, for each CUDA context."""

from probes.knobs.knob import Knob

# Contexts are quickly made: the count of hardware queues covers all that is asked for in practice.
QUEUE_VALUES = ("unset", "1", "2", "8", "16", "32")

KNOB = Knob(
    name="max_connections",
    hypothesis="streams that share a queue wait for one another, so one queue keeps communication from overlapping; "
    "more queues than busy streams gain nothing",
    acts_on="any CUDA device; read when a process makes its context; under MPS the ranks of a GPU share a pool",
    metric="step_wall_ns",
    variable="CUDA_DEVICE_MAX_CONNECTIONS",
    default="8",
    default_under_mps="2",
    values=("unset", "1", "8", "32"),
    needs_cuda=True,
    known=(
        "FSDP2 on 2 H200s, 3 runs each: 1 took 170.3 ms a step and hid 28–44 % of its communication, unset 165.3 ms "
        "and 81–90 %, 32 165.5 ms and 77–87 %: 1 costs 3 %, 32 gains nothing",
        "contexts of an H200 (torch 2.11, CUDA 13.0) have the 1, 2, 8, 16 or 32 queues that are asked for, 8 if unset: "
        "of 12 streams, 11 of them busy, the last one's work is held up with 8 and not with 16",
        "unset is 8, CUDA's documented default; to a client of MPS it is 2, counted on an H200, so that 8 is another "
        "setting in mode shared-gpu",
        "32 with 4 ranks on one GPU under MPS failed: the connections are a shared pool",
    ),
)
