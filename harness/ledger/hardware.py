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
from typing import Any

import msgspec

from harness.errors import InputError, MeshscopeError, UsageError
from harness.ledger import hardware_rules as rules
from harness.ledger.hardware_points import (
    Attention,
    Collective,
    CollectiveKind,
    Direction,
    DType,
    HostCost,
    HostKind,
    Kernel,
    KernelKind,
    Layout,
    MatrixProduct,
    OutsideMemory,
    Overlap,
    Peaks,
    Provenance,
    Sustained,
)

SCHEMA_VERSION = 1
SHIPPED = Path(__file__).parent / "calibrations"


class UnmeasuredError(MeshscopeError):
    """The hardware file has no point for it; the message says for what and, if the file does, why."""


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
