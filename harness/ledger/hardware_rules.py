"""Times between measured points. Free of torch; nanoseconds and bytes.

Two rules, both exact at every point. What memory or a link bounds depends on one size: linear between neighbours, which
is latency plus bytes over bandwidth. What operations bound depends on shapes: a latency and the roofline time
(Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009) over an efficiency, which is the mean of the points' in
logarithms, weighted by distance to the power of -6 with a doubling of one dimension as unit (Shepard 1968, inverse
distance weighting).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from harness.config import DTYPE_BYTES

POWER = 6
"""Above the number of dimensions far points do not outweigh the near ones by their number."""
BACKWARD_PRODUCTS = 2.5
"""Backward of attention makes five products (scores again, and gradients of them, queries, keys, values) where forward
makes two (arXiv 2205.14135, algorithm 4)."""


class Point(NamedTuple):
    place: tuple[float, ...]
    roofline_ns: float
    ns: int


def between(place: tuple[float, ...], roofline_ns: float, points: Sequence[Point]) -> int:
    """The time at `place`. The latency is the time of the fastest point."""
    latency = min(point.ns for point in points)
    log_place = [math.log2(value) for value in place]
    total = weighted = 0.0
    for point in points:
        squared = sum((log - math.log2(value)) ** 2 for log, value in zip(log_place, point.place, strict=True))
        if squared < 1e-12:
            # Another layout or mask at the same place has its efficiency.
            return round(point.ns * ((latency + roofline_ns) / (latency + point.roofline_ns)))
        weight = squared ** (-POWER / 2)
        total += weight
        weighted += weight * math.log(point.ns / (latency + point.roofline_ns))
    return round((latency + roofline_ns) * math.exp(weighted / total))


def by_size(points: Sequence[tuple[int, int]], size: int) -> int:
    """The time at `size` bytes from (bytes, ns) in ascending order: linear between points, the first point's below it,
    the last one's bandwidth beyond it."""
    place = bisect_left(points, (size, 0))
    if place == 0:
        return points[0][1]
    before, ns_before = points[place - 1]
    if place == len(points):
        return round(ns_before * size / before)
    after, ns_after = points[place]
    return round(ns_before + (ns_after - ns_before) * (size - before) / (after - before))


def roofline_ns(flops: float, size: float, flops_per_s: float, bytes_per_s: float) -> float:
    return max(flops / flops_per_s, size / bytes_per_s) * 1e9


def matmul_flops(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


def matmul_bytes(dtype: str, m: int, n: int, k: int) -> int:
    """Operands read once, the product written once."""
    return DTYPE_BYTES[dtype] * (m * k + k * n + m * n)


def attention_flops(
    direction: str, batch: int, queries: int, keys: int, heads: int, head_dim: int, causal: bool
) -> float:
    """Of the products; of causal attention only those whose scores are seen: queries see keys up to their own place
    from the end, so a triangle where there are as many."""
    seen = queries * keys - (queries * min(queries, keys) / 2 if causal else 0)
    return (BACKWARD_PRODUCTS if direction == "backward" else 1) * 4 * batch * heads * head_dim * seen


def sent_share(kind: str, ranks: int) -> float:
    """What of the whole buffer each of `ranks` sends in a ring (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md)."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter"):
        return (ranks - 1) / ranks
    return 1.0
