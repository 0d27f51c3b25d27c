"""What a machine can do, as measured: a file of points that `meshscope calibrate` writes, and times read from them.

The ledger predicts times of operators, kernels and collectives from these points; the rules between points are in
`harness.ledger.hardware_rules` and in docs/calibration.md. A question that no point answers raises `UnmeasuredError`: a
time is never guessed. Times are nanoseconds, sizes bytes. Free of torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from harness.errors import InputError, MeshscopeError, UsageError
from harness.ledger import hardware_rules as rules

SCHEMA_VERSION = 1
SHIPPED = Path(__file__).parent / "calibrations"

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

MemoryKind = Literal["context", "first_collective", "first_send"]

Positive = Annotated[int, msgspec.Meta(gt=0, le=2**62)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Factor = Annotated[float, msgspec.Meta(ge=0.1, le=1e3)]
Rate = Annotated[float, msgspec.Meta(ge=1, le=1e18)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Several = Annotated[int, msgspec.Meta(ge=2, le=2**62)]


class UnmeasuredError(MeshscopeError):
    """The hardware file has no point for it; the message says for what and, if the file does, why."""


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


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One machine's points. `unmeasured`: why a section is empty or lacks some, by its name."""

    schema_version: int = SCHEMA_VERSION
    provenance: Provenance
    peaks: Peaks | None = None
    matrix_products: list[MatrixProduct] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    host: list[HostCost] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    overlaps: list[Overlap] = field(default_factory=list)
    outside_memory: list[OutsideMemory] = field(default_factory=list)
    sustained: list[Sustained] = field(default_factory=list)
    unmeasured: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The object of the file and of `meshscope calibrate --json`; what is unknown of a point is left out."""
        found = asdict(self)
        for name, value in found.items():
            if isinstance(value, list):
                found[name] = [{key: one for key, one in point.items() if one is not None} for point in value]
        return found

    def matmul_ns(self, dtype: DType, m: int, n: int, k: int, layout: Layout = "forward") -> int:
        """[m, k]·[k, n]: exact at a point, else latency and roofline time over an efficiency between those of the
        points near it (`hardware_rules.between`). Products of `layout`, of any where it was not measured."""
        points = [point for point in self.matrix_products if point.dtype == dtype]
        points = [point for point in points if point.layout == layout] or points
        if self.peaks is None or dtype not in self.peaks.flops_per_s or not points:
            raise self._unmeasured("matrix_products", f"products in {dtype}")
        peak, bandwidth = self.peaks.flops_per_s[dtype], self.peaks.bytes_per_s
        return rules.between(
            (m, n, k),
            rules.roofline_ns(rules.matmul_flops(m, n, k), rules.matmul_bytes(dtype, m, n, k), peak, bandwidth),
            [
                rules.Point(
                    (p.m, p.n, p.k),
                    rules.roofline_ns(
                        rules.matmul_flops(p.m, p.n, p.k), rules.matmul_bytes(dtype, p.m, p.n, p.k), peak, bandwidth
                    ),
                    p.ns,
                )
                for p in points
            ],
        )

    def attention_ns(
        self,
        direction: Direction,
        dtype: DType,
        *,
        batch: int,
        queries: int,
        keys: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        causal: bool = True,
    ) -> int:
        """By the same rule over batch, heads, queries, keys, head_dim, heads a key-value head and the mask, which
        counts as a doubling; its roofline is that of the operations alone."""
        points = [p for p in self.attention if p.dtype == dtype and p.direction == direction]
        if self.peaks is None or dtype not in self.peaks.flops_per_s or not points:
            raise self._unmeasured("attention", f"attention {direction} in {dtype}")
        peak = self.peaks.flops_per_s[dtype]

        def point(p: Attention) -> rules.Point:
            flops = rules.attention_flops(p.direction, p.batch, p.queries, p.keys, p.heads, p.head_dim, p.causal)
            place = (p.batch, p.heads, p.queries, p.keys, p.head_dim, p.heads / p.kv_heads, 1 + p.causal)
            return rules.Point(place, flops / peak * 1e9, p.ns)

        asked = point(
            Attention(
                dtype=dtype,
                direction=direction,
                batch=batch,
                queries=queries,
                keys=keys,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                causal=causal,
                ns=1,
            )
        )
        return rules.between(asked.place, asked.roofline_ns, [point(p) for p in points])

    def kernel_ns(self, kind: KernelKind, size: int) -> int:
        """A kernel that moves `size` bytes: linear between points, the smallest's time below them, the largest's
        bandwidth beyond. 0 bytes take no kernel."""
        if size == 0:
            return 0
        points = self._kernels.get(kind)
        if not points:
            raise self._unmeasured("kernels", f"{kind} kernels")
        return rules.by_size(points, size)

    def host_ns(self, kind: HostKind) -> int:
        for cost in self.host:
            if cost.kind == kind:
                return cost.ns
        raise self._unmeasured("host", f"host time for {kind}")

    def collective_ns(self, kind: CollectiveKind, ranks: int, size: int) -> int:
        """Alone, `size` bytes of the whole buffer, by the rule of `kernel_ns`. For another number of ranks than any
        measured (`measured_ranks`): the time of the nearest number, scaled by what each rank sends in a ring."""
        if ranks == 1 or size == 0:
            return 0
        near = self._nearest(kind, ranks)
        ns = rules.by_size(self._collectives[kind, near], size)
        return round(ns * rules.sent_share(kind, ranks) / rules.sent_share(kind, near))

    def measured_ranks(self, kind: CollectiveKind) -> list[int]:
        """For how many ranks the collective was measured; others are extrapolated, within one host."""
        return sorted(ranks for measured, ranks in self._collectives if measured == kind)

    def overlap(self, kind: CollectiveKind, ranks: int) -> tuple[float, float]:
        """How many times as long matrix products and the collective take beside each other, of the nearest number of
        ranks; (1, 1) where that was not measured."""
        found = [one for one in self.overlaps if one.kind == kind]
        if not found:
            return 1.0, 1.0
        near = min(found, key=lambda one: abs(one.ranks - ranks))
        return near.compute_factor, near.collective_factor

    @cached_property
    def _kernels(self) -> dict[str, list[tuple[int, int]]]:
        return _curves((point.kind, point.bytes, point.ns) for point in self.kernels)

    @cached_property
    def _collectives(self) -> dict[tuple[str, int], list[tuple[int, int]]]:
        return _curves(((point.kind, point.ranks), point.bytes, point.ns) for point in self.collectives)

    def _nearest(self, kind: CollectiveKind, ranks: int) -> int:
        measured = self.measured_ranks(kind)
        if not measured:
            raise self._unmeasured("collectives", kind)
        return min(measured, key=lambda count: (abs(count - ranks), -count))

    def _unmeasured(self, section: str, what: str) -> UnmeasuredError:
        why = next((why for name, why in self.unmeasured.items() if name.partition(":")[0] == section), None)
        return UnmeasuredError(
            f"the calibration of {self.provenance.device} has no {what}" + (f": {why}" if why else "")
        )


def _curves(points: Iterable[tuple[Any, int, int]]) -> dict[Any, list[tuple[int, int]]]:
    """(key, bytes, ns) as sorted (bytes, ns) by key."""
    found: dict[Any, list[tuple[int, int]]] = {}
    for key, size, ns in sorted(points):
        found.setdefault(key, []).append((size, ns))
    return found


def load(name_or_path: str) -> Hardware:
    """The shipped calibration of that name, else the file at that path.

    Raises `UsageError` for what is neither, `InputError` for a file that is no calibration.
    """
    path = SHIPPED / f"{name_or_path}.json" if name_or_path in shipped() else Path(name_or_path)
    if not path.is_file():
        found = "is not a file" if path.exists() else "no such file"
        raise UsageError(
            f"hardware {name_or_path}: {found}, and none is shipped under that name (shipped: "
            f"{', '.join(shipped())}); meshscope calibrate --out FILE measures this machine"
        )
    return read(path)


def shipped() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def fitting(device: str) -> str | None:
    """The shipped calibration of a device of that name (`NVIDIA H200`), None where there is none."""
    return next((name for name in shipped() if read(SHIPPED / f"{name}.json").provenance.device == device), None)


def read(path: Path) -> Hardware:
    """Raises `InputError`, one line that says what is wrong with the file and where in it."""
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise InputError(path, f"cannot be read: {error.strerror}") from None
    except RecursionError:
        raise InputError(path, "is nested too deeply to be read") from None
    except msgspec.DecodeError as error:  # not UTF-8, not JSON, or no object
        raise InputError(path, f"is not a JSON object: {error}") from None
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(path, f"is no calibration of schema_version {SCHEMA_VERSION} (it says {repr(version)[:40]})")
    try:
        hardware = msgspec.convert(document, Hardware)
    except msgspec.ValidationError as error:
        raise InputError(path, f"is no calibration: {str(error)[:1].lower()}{str(error)[1:]}") from None
    for section, keys in _KEYS.items():
        counts = Counter(tuple(getattr(point, key) for key in keys) for point in getattr(hardware, section))
        twice = next((key for key, count in counts.items() if count > 1), None)
        if twice is not None:
            raise InputError(path, f"{section}: {dict(zip(keys, twice, strict=True))} is there more than once")
    return hardware


_KEYS = {
    "matrix_products": ("dtype", "layout", "m", "n", "k"),
    "attention": (*("dtype", "direction", "batch", "queries", "keys", "heads", "kv_heads", "head_dim", "causal"),),
    "kernels": ("kind", "bytes"),
    "host": ("kind",),
    "collectives": ("kind", "ranks", "bytes"),
    "overlaps": ("kind", "ranks"),
    "outside_memory": ("kind", "ranks", "group"),
    "sustained": ("kind",),
}
"""What tells the points of a section apart."""
KERNEL_KINDS: tuple[KernelKind, ...] = get_args(KernelKind)
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
