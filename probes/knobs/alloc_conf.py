"""PYTORCH_ALLOC_CONF: how the CUDA caching allocator takes memory from the driver and gives it back."""

from probes.knobs.knob import Knob

KNOB = Knob(
    name="alloc_conf",
    hypothesis="segments that can grow leave less unused between blocks: the same tensors need fewer reserved bytes",
    acts_on="torch's CUDA caching allocator; read once, at the first allocation of a process",
    metric="peak_reserved_bytes",
    variable="PYTORCH_ALLOC_CONF",
    default="expandable_segments:False",
    values=("unset", "expandable_segments:True"),
    needs_cuda=True,
    known=(
        "H200, expandable_segments:True: reserved 25.676 → 24.107 GiB (FSDP2 on 2), 16.41 → 15.816 GiB (TP2); "
        "allocated 22.3726 → 22.3668 and 14.4543 → 14.4504 GiB",
    ),
)
