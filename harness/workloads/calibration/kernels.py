"""Kernels that memory bounds, each with the call that the trainer, FSDP2 or DTensor makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, torch's own name for it

from harness.ledger.hardware_points import KERNEL_KINDS, Kernel, KernelKind
from harness.trainer.model.rope import rotary_table
from harness.workloads.calibration.clock import Clock, Operation
from harness.workloads.calibration.sizes import Sizes

PARTS = 8
"""Tensors that the kernels over lists of them get."""
RANKS = 2
"""Over which the copies around collectives are laid out."""

aten: Any = torch.ops.aten
Make = Callable[[torch.device, Sizes, int], tuple[int, Operation]]
"""Bytes that the operation really moves, as near as its shapes come to those asked for, and the operation."""


def kernels(clock: Clock, sizes: Sizes) -> list[Kernel]:
    return list(_points(clock, sizes))


def _points(clock: Clock, sizes: Sizes) -> Iterator[Kernel]:
    for kind in KERNEL_KINDS:
        seen = set()
        for wanted in sizes.kernel_bytes:
            moved, operation = MAKE[kind](clock.device, sizes, wanted)
            if moved not in seen:  # rows of a vocabulary are long: the smallest sizes are one row each
                seen.add(moved)
                taken = clock.measure(operation)
                yield Kernel(kind=kind, bytes=moved, ns=taken.ns, spread_pct=taken.spread_pct)


def _bf16(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _rows(wanted: int, bytes_per_row: int) -> int:
    return max(1, wanted // bytes_per_row)


def _elementwise(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    rows = _rows(wanted, 6 * sizes.width)
    x, y = _bf16(device, rows, sizes.width), _bf16(device, rows, sizes.width)
    return 6 * x.numel(), lambda: x + y


def _widen(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    x = _bf16(device, _rows(wanted, 6 * sizes.width), sizes.width)
    return 6 * x.numel(), x.float


def _narrow(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    x = torch.randn(_rows(wanted, 6 * sizes.width), sizes.width, device=device)
    return 6 * x.numel(), x.bfloat16


def _rotary(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    """The product alone, without the conversions around it."""
    heads = sizes.width // sizes.head_dim
    tokens = _rows(wanted, 8 * sizes.width)
    table = rotary_table(tokens, sizes.head_dim, 10_000.0, device)[None, :, None, :]
    x = torch.randn(1, tokens, heads, sizes.head_dim, device=device)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return 8 * x.numel(), lambda: pairs * table


def _strided_copy(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    tokens = _rows(wanted, 4 * sizes.width)
    x = _bf16(device, 1, tokens, sizes.width // sizes.head_dim, sizes.head_dim).transpose(1, 2)
    return 4 * x.numel(), lambda: x.clone(memory_format=torch.contiguous_format)


def _tp_gather_copy_out(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    """torch.distributed._functional_collectives:all_gather_tensor with gather_dim 1, two sequences."""
    x = _bf16(device, RANKS * 2, _rows(wanted, 4 * sizes.width * RANKS * 2), sizes.width)
    return 4 * x.numel(), lambda: torch.cat(torch.chunk(x, RANKS, dim=0), dim=1)


def _tp_scatter_copy_in(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    """torch.distributed._functional_collectives:reduce_scatter_tensor with scatter_dim 1, two sequences."""
    x = _bf16(device, 2, RANKS * _rows(wanted, 4 * sizes.width * RANKS * 2), sizes.width)
    return 4 * x.numel(), lambda: torch.cat(torch.chunk(x, RANKS, dim=1))


def _rms_norm(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    x = _bf16(device, _rows(wanted, 4 * sizes.width), sizes.width)
    weight = _bf16(device, sizes.width).requires_grad_()
    return 4 * x.numel(), lambda: F.rms_norm(x, (sizes.width,), weight)


def _rms_norm_backward(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    x = _bf16(device, _rows(wanted, 10 * sizes.width), sizes.width).requires_grad_()
    weight = _bf16(device, sizes.width).requires_grad_()
    out = F.rms_norm(x, (sizes.width,), weight)
    gradient = torch.randn_like(out)
    return 10 * x.numel(), lambda: torch.autograd.grad(out, (x, weight), gradient, retain_graph=True)


def _embedding(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    table = _bf16(device, sizes.embedding_rows, sizes.width)
    tokens = torch.randint(sizes.embedding_rows, (_rows(wanted, 4 * sizes.width),), device=device)
    return 4 * tokens.numel() * sizes.width, lambda: F.embedding(tokens, table)


def _embedding_backward(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    """Without the zeros that the whole gradient begins as: those of a table as small as the gradients allow."""
    tokens = torch.randint(sizes.embedding_rows, (_rows(wanted, 4 * sizes.width),), device=device)
    rows = min(sizes.embedding_rows, max(256, tokens.numel()))
    tokens, gradient = tokens % rows, _bf16(device, tokens.numel(), sizes.width)
    return 2 * 2 * gradient.numel(), lambda: aten.embedding_dense_backward(gradient, tokens, rows, -1, False)


def _log_softmax(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    x = torch.randn(_rows(wanted, 8 * sizes.vocabulary), sizes.vocabulary, device=device)
    return 8 * x.numel(), lambda: F.log_softmax(x, dim=-1)


def _log_softmax_backward(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    x = torch.randn(_rows(wanted, 12 * sizes.vocabulary), sizes.vocabulary, device=device)
    out, gradient = F.log_softmax(x, dim=-1), torch.randn_like(x)
    return 12 * x.numel(), lambda: aten._log_softmax_backward_data(gradient, out, -1, torch.float32)


def _float_parts(device: torch.device, sizes: Sizes, wanted: int, bytes_per_element: int) -> list[torch.Tensor]:
    rows = _rows(wanted, bytes_per_element * sizes.width * PARTS)
    return [torch.randn(rows, sizes.width, device=device) for _ in range(PARTS)]


def _all_gather_copy_in(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    """torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.all_gather_inputs, which casts, and
    _fsdp_collectives:all_gather_copy_in."""
    shards = _float_parts(device, sizes, wanted, 10)
    casts = [torch.empty_like(shard, dtype=torch.bfloat16) for shard in shards]
    whole = torch.empty(sum(shard.numel() for shard in shards), dtype=torch.bfloat16, device=device)
    parts = list(torch.split(whole, [shard.numel() for shard in shards]))
    flat = [cast.view(-1) for cast in casts]

    def copy() -> None:
        torch._foreach_copy_(casts, shards)
        torch._foreach_copy_(parts, flat)

    return 10 * whole.numel(), copy


def _all_gather_copy_out(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    """_fsdp_collectives:foreach_all_gather_copy_out."""
    width = _rows(wanted, 4 * RANKS * PARTS * sizes.width) * sizes.width
    gathered = _bf16(device, RANKS, PARTS * width)
    outputs = [torch.empty(RANKS, width, dtype=torch.bfloat16, device=device) for _ in range(PARTS)]
    return 4 * gathered.numel(), lambda: torch.split_with_sizes_copy(gathered, [width] * PARTS, dim=1, out=outputs)


def _reduce_scatter_copy_in(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    """_fsdp_collectives:reduce_scatter_copy_in."""
    rows = RANKS * _rows(wanted, 6 * RANKS * PARTS * sizes.width)
    gradients = [_bf16(device, rows, sizes.width) for _ in range(PARTS)]
    whole = torch.empty(RANKS, PARTS * rows * sizes.width // RANKS, device=device)
    return 6 * whole.numel(), lambda: torch._chunk_cat(gradients, dim=0, num_chunks=RANKS, out=whole)


def _adamw(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    parameters = _float_parts(device, sizes, wanted, 28)
    for parameter in parameters:
        parameter.requires_grad_()
        parameter.grad = torch.randn_like(parameter)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=fused, foreach=not fused)
    return 28 * sum(parameter.numel() for parameter in parameters), optimizer.step


def _gradient_norm(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    gradients = _float_parts(device, sizes, wanted, 4)
    return 4 * sum(part.numel() for part in gradients), lambda: torch._foreach_norm(gradients)


def _gradient_scale(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    gradients, one = _float_parts(device, sizes, wanted, 8), torch.ones((), device=device)
    return 8 * sum(part.numel() for part in gradients), lambda: torch._foreach_mul_(gradients, one)


def _fill(device: torch.device, sizes: Sizes, wanted: int) -> tuple[int, Operation]:
    x = torch.empty(_rows(wanted, 4 * sizes.width), sizes.width, device=device)
    return 4 * x.numel(), lambda: x.fill_(0)


MAKE: dict[KernelKind, Make] = {
    "elementwise": _elementwise,
    "widen": _widen,
    "narrow": _narrow,
    "rotary": _rotary,
    "strided_copy": _strided_copy,
    "tp_gather_copy_out": _tp_gather_copy_out,
    "tp_scatter_copy_in": _tp_scatter_copy_in,
    "rms_norm": _rms_norm,
    "rms_norm_backward": _rms_norm_backward,
    "embedding": _embedding,
    "embedding_backward": _embedding_backward,
    "log_softmax": _log_softmax,
    "log_softmax_backward": _log_softmax_backward,
    "all_gather_copy_in": _all_gather_copy_in,
    "all_gather_copy_out": _all_gather_copy_out,
    "reduce_scatter_copy_in": _reduce_scatter_copy_in,
    "adamw": _adamw,
    "gradient_norm": _gradient_norm,
    "gradient_scale": _gradient_scale,
    "fill": _fill,
}
