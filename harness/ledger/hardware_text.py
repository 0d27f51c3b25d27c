"""A calibration as plain text: what `meshscope calibrate` prints. The file has every point."""

from __future__ import annotations

from collections.abc import Iterator

from harness.ledger.hardware import Hardware
from harness.ledger.hardware_points import KERNEL_KINDS, KernelKind, Layout, MatrixProduct
from harness.ledger.hardware_rules import attention_flops, matmul_flops, sent_share
from harness.text import MIB, counted, size, table

SHOWN = 2
"""Message sizes of a collective besides the smallest: the largest ones."""


def report(hardware: Hardware) -> str:
    sections = (
        ("", _head(hardware)),
        ("Matrix products of linear layers with the most tokens measured, TFLOP/s", _products(hardware)),
        ("Attention", _attention(hardware)),
        ("Kernels that memory bounds", _kernels(hardware)),
        ("Host, per piece of work", _host(hardware)),
        ("Collectives alone, time of the slowest rank", _collectives(hardware)),
        ("Matrix products beside a collective: times as long as alone", _overlaps(hardware)),
        ("Memory outside torch's allocator, by process group", _outside(hardware)),
        ("Not measured", (f"  {section}: {why}" for section, why in hardware.unmeasured.items())),
    )
    blocks = ((title, list(lines)) for title, lines in sections)
    return "\n\n".join("\n".join([*([title] if title else []), *lines]) for title, lines in blocks if lines)


def _head(hardware: Hardware) -> Iterator[str]:
    about = hardware.provenance
    versions = ("torch", about.torch), ("CUDA", about.cuda), ("NCCL", about.nccl), ("driver", about.driver)
    known = ", ".join(f"{name} {version}" for name, version in versions if version is not None)
    yield f"{about.device}, {counted(about.ranks, 'rank')}, mode {about.mode}, {known}, {about.date}"
    yield f"{about.source} ({about.command})"
    if hardware.peaks is not None:
        for dtype, rate in hardware.peaks.flops_per_s.items():
            yield f"{dtype}: {rate / 1e12:,.1f} TFLOP/s"
        yield f"  {hardware.peaks.flops_source}"
        yield f"memory: {hardware.peaks.bytes_per_s / 1e9:,.0f} GB/s ({hardware.peaks.bytes_source})"


def _linear(point: MatrixProduct) -> tuple[int, int, int]:
    """Tokens, outputs and inputs of the layer whose product this is (`hardware.Layout`)."""
    places: dict[Layout, tuple[int, int, int]] = {
        "forward": (point.m, point.n, point.k),
        "input_gradient": (point.m, point.k, point.n),
        "weight_gradient": (point.k, point.m, point.n),
    }
    return places[point.layout]


def _products(hardware: Hardware) -> list[str]:
    most: dict[tuple[str, int, int], int] = {}
    rates: dict[tuple[str, int, int, int], dict[Layout, float]] = {}
    for point in hardware.matrix_products:
        tokens, outputs, inputs = _linear(point)
        most[point.dtype, outputs, inputs] = max(tokens, most.get((point.dtype, outputs, inputs), 0))
        rate = matmul_flops(point.m, point.n, point.k) / point.ns / 1e3
        rates.setdefault((point.dtype, outputs, inputs, tokens), {})[point.layout] = rate
    layouts: tuple[Layout, ...] = ("forward", "input_gradient", "weight_gradient")
    rows = [
        [dtype, f"{inputs} to {outputs}", f"{tokens}"]
        + [_figure(rates[dtype, outputs, inputs, tokens].get(layout)) for layout in layouts]
        for (dtype, outputs, inputs), tokens in sorted(most.items())
    ]
    head = ["dtype", "features", "tokens", "forward", "input's gradient", "weight's gradient"]
    return table(head, rows, left=2) if rows else []


def _attention(hardware: Hardware) -> list[str]:
    rows = []
    for p in hardware.attention:
        flops = attention_flops(p.direction, p.batch, p.queries, p.keys, p.heads, p.head_dim, p.causal)
        shape = f"{p.batch} x {p.queries}" + ("" if p.keys == p.queries else f" on {p.keys}")
        heads = f"{p.heads}/{p.kv_heads} x {p.head_dim}"
        mask = "causal" if p.causal else "full"
        rows.append([p.dtype, p.direction, shape, heads, mask, _time(p.ns), f"{flops / p.ns / 1e3:,.1f}"])
    head = ["dtype", "direction", "sequences x tokens", "heads", "mask", "time", "TFLOP/s"]
    return table(head, rows, left=5) if rows else []


def _kernels(hardware: Hardware) -> list[str]:
    by_kind: dict[KernelKind, list[tuple[int, int]]] = {}
    for point in sorted(hardware.kernels, key=lambda point: point.bytes):
        by_kind.setdefault(point.kind, []).append((point.bytes, point.ns))
    rows = []
    for kind, points in sorted(by_kind.items(), key=lambda item: KERNEL_KINDS.index(item[0])):
        (least, least_ns), (most, most_ns) = points[0], points[-1]
        rows.append([kind, size(least), _time(least_ns), size(most), _time(most_ns), f"{most / most_ns:,.0f}"])
    head = ["kind", "smallest", "time", "largest", "time", "GB/s"]
    return table(head, rows) if rows else []


def _host(hardware: Hardware) -> list[str]:
    return table(["for", "time"], [[cost.kind, _time(cost.ns)] for cost in hardware.host]) if hardware.host else []


def _collectives(hardware: Hardware) -> list[str]:
    by_kind: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for point in sorted(hardware.collectives, key=lambda point: point.bytes):
        by_kind.setdefault((point.kind, point.ranks), []).append((point.bytes, point.ns))
    rows = []
    for (kind, ranks), points in by_kind.items():
        for moved, ns in points[:1] + points[1:][-SHOWN:]:
            bus = f"{moved / ns * sent_share(kind, ranks):,.1f}" if moved >= MIB else ""
            rows.append([kind, f"{ranks}", size(moved), _time(ns), bus])
    return table(["kind", "ranks", "bytes", "time", "bus GB/s"], rows) if rows else []


def _overlaps(hardware: Hardware) -> list[str]:
    rows = [[o.kind, f"{o.ranks}", f"{o.compute_factor:.2f}", f"{o.collective_factor:.2f}"] for o in hardware.overlaps]
    lines = table(["collective", "ranks", "products", "collective"], rows) if rows else []
    for one in hardware.sustained:
        lines.append(f"  on a device that has not rested for {one.seconds:g} s: {one.kind} {one.factor:.3f}")
    return lines


def _outside(hardware: Hardware) -> list[str]:
    rows = [[m.kind, f"{m.ranks}", f"{m.group}", size(m.bytes)] for m in hardware.outside_memory]
    return table(["kind", "ranks", "group", "bytes"], rows) if rows else []


def _time(ns: int) -> str:
    return f"{ns / 1e6:,.3f} ms" if ns >= 1_000_000 else f"{ns / 1e3:,.1f} us"


def _figure(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.1f}" if value >= 1 else f"{value:.3f}"
