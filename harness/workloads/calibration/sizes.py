"""At which sizes a machine is measured; free of torch. Those of GPUs cover Llama 3 from 1B to 70B and shares of
tensor parallelism; those of CPUs are what a debug model has."""

from __future__ import annotations

from dataclasses import dataclass, replace

KIB, MIB, GIB = 2**10, 2**20, 2**30
Linear = tuple[int, int]
"""Output and input features."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Of one call of attention; see `harness.ledger.hardware.Attention`."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """`float32_linears` are measured in float32 too, with `float32_tokens`; `vocabulary` is the row of a softmax,
    `width` that of a norm, an embedding and what tensor parallelism moves."""

    tokens: tuple[int, ...]
    linears: tuple[Linear, ...]
    float32_tokens: tuple[int, ...]
    float32_linears: tuple[Linear, ...]
    attention: tuple[Shape, ...]
    float32_attention: tuple[Shape, ...]
    kernel_bytes: tuple[int, ...]
    collective_bytes: tuple[int, ...]
    vocabulary: int
    width: int
    embedding_rows: int
    head_dim: int
    blocks: int
    """Repeated measurements of a point, whose median counts."""
    block_ns: int
    """How long one lasts where a single call does not take longer."""


def _causal(batch: int, tokens: int, heads: int, kv_heads: int, head_dim: int) -> Shape:
    return Shape(batch=batch, queries=tokens, keys=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


_LLAMA_1B = ((2048, 2048), (512, 2048), (8192, 2048), (2048, 8192), (128256, 2048))
_SHARES_OF_1B = ((1024, 2048), (256, 2048), (2048, 1024), (4096, 2048), (2048, 4096), (64128, 2048))
_LLAMA_8B = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))
_LLAMA_70B = ((8192, 8192), (28672, 8192), (8192, 28672))
_SMALL = ((256, 256), (1024, 1024))

_GPU = Sizes(
    tokens=(256, 2048, 8192, 16384),
    linears=_LLAMA_1B + _SHARES_OF_1B + _LLAMA_8B + _LLAMA_70B + _SMALL,
    float32_tokens=(256, 4096),
    float32_linears=((256, 256), (2048, 2048), (8192, 2048)),
    attention=(
        _causal(1, 64, 8, 8, 16),
        _causal(1, 512, 32, 8, 64),
        _causal(1, 2048, 32, 8, 64),
        _causal(2, 2048, 32, 8, 64),
        _causal(1, 4096, 32, 8, 64),
        _causal(2, 4096, 32, 8, 64),
        _causal(1, 8192, 32, 8, 64),
        _causal(2, 8192, 32, 8, 64),
        _causal(2, 8192, 16, 4, 64),
        _causal(1, 512, 32, 8, 128),
        _causal(1, 2048, 32, 8, 128),
        _causal(1, 4096, 32, 8, 128),
        _causal(2, 4096, 32, 8, 128),
        _causal(1, 8192, 32, 8, 128),
        _causal(1, 8192, 8, 1, 128),
        Shape(batch=2, queries=2048, keys=4096, heads=32, kv_heads=8, head_dim=64, causal=False),
        Shape(batch=2, queries=4096, keys=2048, heads=32, kv_heads=8, head_dim=64, causal=False),
        Shape(batch=1, queries=4096, keys=4096, heads=32, kv_heads=8, head_dim=128, causal=False),
    ),
    float32_attention=(_causal(1, 512, 32, 8, 64), _causal(1, 2048, 32, 8, 64)),
    kernel_bytes=(64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB),
    collective_bytes=(8, 4 * KIB, 64 * KIB, MIB, 8 * MIB, 32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB, GIB),
    vocabulary=128256,
    width=2048,
    embedding_rows=32768,
    head_dim=64,
    blocks=5,
    block_ns=2_000_000,
)
_GPU_QUICK = replace(
    _GPU,
    tokens=(2048, 16384),
    linears=_LLAMA_1B + _LLAMA_8B + _SMALL,
    float32_tokens=(2048,),
    attention=_GPU.attention[1::3],
    float32_attention=(),
    kernel_bytes=(MIB, 64 * MIB, 512 * MIB),
    collective_bytes=(8, MIB, 64 * MIB, 256 * MIB),
    blocks=3,
)
_CPU = Sizes(
    tokens=(64, 512),
    linears=((256, 256), (768, 256), (256, 768), (2048, 256)),
    float32_tokens=(64, 512),
    float32_linears=((256, 256), (768, 256)),
    attention=(_causal(1, 64, 8, 4, 32), _causal(1, 256, 8, 4, 32)),
    float32_attention=(_causal(1, 64, 8, 4, 32), _causal(1, 256, 8, 4, 32)),
    kernel_bytes=(64 * KIB, MIB, 8 * MIB),
    collective_bytes=(8, 64 * KIB, MIB, 8 * MIB),
    vocabulary=2048,
    width=256,
    embedding_rows=2048,
    head_dim=32,
    blocks=5,
    block_ns=2_000_000,
)
_CPU_QUICK = replace(
    _CPU,
    tokens=(64,),
    linears=_CPU.linears[:2],
    float32_linears=_CPU.float32_linears[:1],
    float32_tokens=(64,),
    attention=_CPU.attention[:1],
    float32_attention=_CPU.float32_attention[:1],
    kernel_bytes=(64 * KIB, MIB),
    collective_bytes=(8, MIB),
    blocks=3,
    block_ns=500_000,
)


def sizes(device: str, *, quick: bool) -> Sizes:
    """For `cuda` or `cpu`."""
    if device == "cuda":
        return _GPU_QUICK if quick else _GPU
    return _CPU_QUICK if quick else _CPU
