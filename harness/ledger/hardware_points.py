"""What a calibration is made of: kinds of work, and points that say how long one took. Free of torch.

Times are nanoseconds, sizes bytes. `harness.ledger.hardware` reads the file and answers from these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import msgspec

Layout = Literal["forward", "input_gradient", "weight_gradient"]
"""Which operand of a product is transposed. Of a linear layer with t tokens, x [t, i], W [o, i] and gradient g [t, o]:
`forward` is x·Wᵀ, [t, i]·[i, o]; `input_gradient` g·W, [t, o]·[o, i]; `weight_gradient` gᵀ·x, [o, t]·[t, i]. The m, n
and k of a point are those of its own product, [m, k]·[k, n] = [m, n]."""
Direction = Literal["forward", "backward"]
CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
DType = Literal["bfloat16", "float32"]

KernelKind = Literal[
    "elementwise",  # one output of one or two inputs of the compute dtype: add, multiply, silu and its backward
    "widen",  # bfloat16 to float32
    "narrow",  # float32 to bfloat16
    "rotary",  # the complex product in float32; the table's bytes not counted
    "strided_copy",  # transposed heads made contiguous
    "tp_gather_copy_out",  # what DTensor gathered along the sequence put in order
    "tp_scatter_copy_in",  # what DTensor will scatter along the sequence put in order
    "rms_norm",
    "rms_norm_backward",  # both kernels: the input's gradient and the weight's, input and gradient read by each
    "embedding",
    "embedding_backward",
    "log_softmax",  # over the vocabulary, float32
    "log_softmax_backward",
    "all_gather_copy_in",  # of a float32 shard that goes as bfloat16, 10 bytes an element
    "all_gather_copy_out",  # its output, read and written
    "reduce_scatter_copy_in",  # bfloat16 gradients into the float32 input of a reduce-scatter
    "adamw",  # fused; 28 bytes a parameter: parameter, gradient and two states read, all but the gradient written
    "gradient_norm",  # of float32 gradients, which it reads
    "gradient_scale",  # in place
    "fill",
]
"""Kernels that memory bounds. Their `bytes` are those the kernel has to read and to write."""

HostKind = Literal[
    "forward_operator",  # an operator of the forward with autograd, per device kernel
    "backward_operator",  # a node of the backward, per device kernel
    "dtensor_forward_operator",  # the same on DTensors
    "dtensor_backward_operator",
    # In layers that keep less of their forward: selectively every operator passes through Python in forward and when it
    # is computed again, and what any checkpointed layer's backward saved comes out of a hook in Python.
    "selective_forward_operator",
    "checkpointed_backward_operator",
    "dtensor_selective_forward_operator",
    "dtensor_checkpointed_backward_operator",
    "fsdp_forward_unit",  # FSDP2's hooks before and after a unit's forward, its all-gather issued and copied out
    "cast_forward_unit",  # the hooks of a unit of one shard: nothing is gathered, its parameters are cast
    "cast_backward_unit",
    "fsdp_backward_unit",  # the hooks of its backward: prefetch, copy-out, copy-in, reduce-scatter
    "collective",  # issuing one and waiting for it on the device
    "optimizer_step",  # clipping and fused AdamW, once a step
    "step",  # what a step has besides: data, loss, learning rate, the recorder's row
]
"""Host time in which the device is given one such piece of work."""

KERNEL_KINDS: tuple[KernelKind, ...] = get_args(KernelKind)
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)

MemoryKind = Literal["context", "first_collective", "first_send"]

Positive = Annotated[int, msgspec.Meta(gt=0, le=2**62)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Factor = Annotated[float, msgspec.Meta(ge=0.1, le=1e3)]
Rate = Annotated[float, msgspec.Meta(ge=1, le=1e18)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Several = Annotated[int, msgspec.Meta(ge=2, le=2**62)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where the points are from. `source` in words: measured by which command, or derived from what."""

    device: str
    mode: str
    ranks: Positive
    date: str
    command: str
    source: str
    host_cpu: str | None = None
    host_cores: int | None = None
    torch: str | None = None
    cuda: str | None = None
    cudnn: int | None = None
    nccl: str | None = None
    driver: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """The roofline: operations a second by dtype, bytes a second of device memory, and where both are from."""

    flops_per_s: dict[DType, Rate]
    flops_source: str
    bytes_per_s: Rate
    bytes_source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixProduct:
    """[m, k]·[k, n]; `spread_pct`, here and below: half the interquartile range of its repetitions, in percent of the
    median, which `ns` is."""

    dtype: DType
    layout: Layout
    m: Positive
    n: Positive
    k: Positive
    ns: Positive
    spread_pct: Share | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """scaled_dot_product_attention of `queries` against `keys` tokens of `batch` sequences, all kernels of it; causal
    means aligned at the ends, each query sees the keys up to its own place."""

    dtype: DType
    direction: Direction
    batch: Positive
    queries: Positive
    keys: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    causal: bool
    ns: Positive
    spread_pct: Share | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    kind: KernelKind
    bytes: Positive
    ns: Positive
    spread_pct: Share | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCost:
    kind: HostKind
    ns: Positive
    spread_pct: Share | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One at a time with nothing beside it; `bytes` are those of the whole, unsharded buffer, of `all_to_all` and
    `send` what one rank sends. The slowest rank's median."""

    kind: CollectiveKind
    ranks: Several
    bytes: Positive
    ns: Positive
    spread_pct: Share | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Matrix products beside a running collective of `ranks` ranks: how many times as long each takes as alone. Of
    `send` beside a receive that waits, which keeps multiprocessors busy; that takes no longer for it."""

    kind: CollectiveKind
    ranks: Several
    compute_factor: Factor
    collective_factor: Factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sustained:
    """How many times as long as after a rest, which it has before points, a device takes once it has not rested for
    `seconds`: for `products` of 4096 rows and columns, the most power it can be given to use, or for `layers` of Llama
    3.2 1B, forward and backward."""

    kind: Literal["products", "layers"] = "products"
    factor: Factor
    seconds: Seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideMemory:
    """Device bytes that no allocator of torch holds: the CUDA context; a process group's first collective, and its
    first send or receive. `group`: the how-manieth process group over these ranks, from 0."""

    kind: MemoryKind
    ranks: Positive
    group: Annotated[int, msgspec.Meta(ge=0)]
    bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
