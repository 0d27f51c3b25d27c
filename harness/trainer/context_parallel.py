"""Context parallelism: each rank has some tokens of every sequence, and its queries attend to the keys of all.

Keys and values are all-gathered, or passed round a ring (arXiv 2310.01889) while those that are there are worked on.
What a rank's queries see is put together from one fused kernel per rank of keys: their outputs are merged by their
log-sum-exps, and in backward each is given the whole output and log-sum-exp, which makes the sum of its gradients exact
(arXiv 2205.14135). torch's own ring (torch.distributed.tensor.experimental.context_parallel) has no kernel for CPUs,
gathers unless a private option says otherwise, and works by replacing F.scaled_dot_product_attention in the process;
this one is the same code on both devices, so that what tests show on CPUs is what GPUs run.

A ring's hop is an all-to-all with one destination, as in torch's: the memory of point-to-point sends waits for streams
(`record_stream`), that of collectives does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from harness.config import Trainer
from harness.context_parallel import Block, Exchange, LoadBalance, positions, sources, visible
from harness.errors import UsageError
from harness.trainer.collectives import all_gather_single, reduce_scatter_single
from harness.trainer.model.decoder import Decoder, DecoderLayer

aten: Any = torch.ops.aten

Kernel = Literal["flash_attention_for_cpu", "flash_attention", "cudnn_attention"]
Share = tuple[int, torch.Tensor]
"""A rank, and its keys and values: [2, batch, tokens, key heads, head_dim]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextParallel:
    """A rank's place among those that share its sequences."""

    group: dist.ProcessGroup
    exchange: Exchange
    balance: LoadBalance

    @classmethod
    def of(cls, config: Trainer.Config, group: dist.ProcessGroup) -> ContextParallel:
        layout = config.parallelism
        return cls(group=group, exchange=layout.cp_attention, balance=layout.cp_load_balance)

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def positions(self, seq_len: int) -> torch.Tensor:
        """Where this rank's tokens are in a sequence: int64 [seq_len / size], ascending."""
        return torch.tensor(positions(seq_len, self.rank, self.size, self.balance), device="cpu")

    def shard(self, model: Decoder) -> None:
        """Makes `model` one of this rank's tokens; before its buffers are filled."""
        model.positions = self.positions(model.seq_len)
        for layer in model.layers.values():
            assert isinstance(layer, DecoderLayer)
            layer.attention.attend = self.attend

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention of this rank's queries to the keys of all ranks.

        q: [batch, heads, tokens, head_dim]; k, v: the same with key heads. All are this rank's tokens in ascending
        order. Raises `UsageError` where the device has no fused kernel for them.
        """
        out: torch.Tensor = _Attention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return out

    def pass_on(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Sends a tensor to the next rank of the ring; returns how to wait for the previous one's."""
        received = torch.empty_like(tensor)
        to, of = [0] * self.size, [0] * self.size
        to[(self.rank + 1) % self.size] = of[(self.rank - 1) % self.size] = tensor.shape[0]
        work = dist.all_to_all_single(received, tensor, of, to, self.group, async_op=True)
        sent = [(work, tensor)]

        def wait() -> torch.Tensor:
            work, _ = sent.pop()
            work.wait()
            return received

        return wait


class _Attention(torch.autograd.Function):
    """Saves the queries, the output, a float32 per query and head, and keys and values: those of all ranks
    (all-gather) or its own (ring), which go round again in backward."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel) -> torch.Tensor:
        ctx.cp, ctx.kernel = cp, _kernel(q, k, v)
        shared, shares = _EXCHANGES[cp.exchange].start(cp, torch.stack((k.transpose(1, 2), v.transpose(1, 2))))
        total: _Attended | None = None
        for source, kv in shares:
            block = visible(cp.rank, source, cp.balance)
            if block is not None:
                total = _merged(total, _attend(ctx.kernel, block, q, kv), block)
            del kv
        assert total is not None
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, shared, out, total.lse, *total.random)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        q, shared, out, lse, *random = ctx.saved_tensors
        cp: ContextParallel = ctx.cp
        exchange = _EXCHANGES[cp.exchange](cp, shared)
        to_q: torch.Tensor | None = None
        for source, kv in exchange.shares():
            block = visible(cp.rank, source, cp.balance)
            to_kv: list[torch.Tensor] = []
            if block is not None:
                to_block, *to_kv = _gradients(ctx.kernel, block, grad, q, kv, out, lse, random)
                if to_q is None:
                    to_q = to_block.float()
                else:
                    _queries(block, to_q).add_(to_block)
                del to_block
            del kv
            exchange.add(source, block, to_kv)
        assert to_q is not None
        to_k, to_v = exchange.gradients().to(q.dtype).transpose(2, 3)
        return to_q.to(q.dtype), to_k, to_v, None


class _Gathered:
    """Keys and values of all ranks in one tensor, gathered while a rank attends to its own. Their gradients are
    reduce-scattered in the dtype of compute, as autograd of an all-gather does."""

    def __init__(self, cp: ContextParallel, shared: torch.Tensor) -> None:
        self._cp, self._shared = cp, shared
        self._gradients = torch.zeros_like(shared)

    @staticmethod
    def start(cp: ContextParallel, own: torch.Tensor) -> tuple[torch.Tensor, Iterator[Share]]:
        """What to save for backward, and the shares to attend to."""
        gathered = own.new_empty(cp.size, *own.shape)
        work = all_gather_single(gathered.flatten(0, 1), own, cp.group, async_op=True)

        def shares(own: torch.Tensor) -> Iterator[Share]:
            yield cp.rank, own
            work.wait()
            del own
            for source in sources(cp.rank, cp.size)[1:]:
                yield source, gathered[source]

        return gathered, shares(own)

    def shares(self) -> Iterator[Share]:
        return ((source, self._shared[source]) for source in sources(self._cp.rank, self._cp.size))

    def add(self, source: int, block: Block | None, gradients: list[torch.Tensor]) -> None:
        """Takes the gradients of a share's keys and values out of the list; those of no block are zero."""
        if block is not None:
            for whole in self._gradients[source].unbind():
                _keys(block, whole).copy_(gradients.pop(0))

    def gradients(self) -> torch.Tensor:
        """Those of this rank's own keys and values, summed over all ranks."""
        own = torch.empty_like(self._shared[0])
        reduce_scatter_single(own, self._gradients.flatten(0, 1), group=self._cp.group)
        return own


class _Ring:
    """Keys and values of one rank at a time. In backward their gradients follow one hop behind, in float32; the last
    hop brings them home."""

    def __init__(self, cp: ContextParallel, shared: torch.Tensor) -> None:
        self._cp, self._shared = cp, shared
        self._arriving: Callable[[], torch.Tensor] | None = None

    @staticmethod
    def start(cp: ContextParallel, own: torch.Tensor) -> tuple[torch.Tensor, Iterator[Share]]:
        return own, _round(cp, own)

    def shares(self) -> Iterator[Share]:
        return _round(self._cp, self._shared)

    def add(self, source: int, block: Block | None, gradients: list[torch.Tensor]) -> None:
        total = torch.zeros_like(self._shared, dtype=torch.float32) if self._arriving is None else self._arriving()
        if block is not None:
            for whole in total.unbind():
                _keys(block, whole).add_(gradients.pop(0))
        self._arriving = self._cp.pass_on(total)

    def gradients(self) -> torch.Tensor:
        assert self._arriving is not None
        return self._arriving()


_EXCHANGES: dict[Exchange, type[_Gathered] | type[_Ring]] = {"allgather": _Gathered, "ring": _Ring}


def _round(cp: ContextParallel, kv: torch.Tensor) -> Iterator[Share]:
    """The shares of all ranks; the next one is on its way while one is worked on."""
    order = sources(cp.rank, cp.size)
    for source in order:
        wait = cp.pass_on(kv) if source != order[-1] else None
        yield source, kv
        if wait is not None:
            kv = wait()


class _Attended(NamedTuple):
    """`out`: float32 [batch, heads, queries, head_dim]; `lse`: its log-sum-exps, float32 [batch, heads, queries];
    `random`: the state of random numbers, which the backward of CUDA's kernels wants though nothing is dropped."""

    out: torch.Tensor
    lse: torch.Tensor
    random: tuple[torch.Tensor, ...]


def _merged(total: _Attended | None, found: _Attended, block: Block) -> _Attended:
    """Attention to what `total` saw and to the keys of a block, whose softmaxes had denominators of their own; in
    place: out + w·(found − out) with w = sigmoid(lse of found − lse)."""
    if total is None:
        return found._replace(out=found.out.float())
    out, lse = _queries(block, total.out), _queries(block, total.lse)
    out.lerp_(found.out.float(), torch.sigmoid(found.lse - lse)[..., None])
    torch.logaddexp(lse, found.lse, out=lse)
    return total


def _queries(block: Block, tensor: torch.Tensor) -> torch.Tensor:
    """A block's part of [batch, heads, queries, …]."""
    return tensor if block.queries == "all" else tensor.chunk(2, dim=2)[1]


def _keys(block: Block, tensor: torch.Tensor) -> torch.Tensor:
    """A block's part of […, tokens, key heads, head_dim], as […, key heads, keys, head_dim]."""
    return (tensor if block.keys == "all" else tensor.chunk(2, dim=-3)[0]).transpose(-3, -2)


def _kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Kernel:
    """The fused kernel that torch itself would take for these."""
    if q.device.type == "cpu":
        return "flash_attention_for_cpu"
    chosen = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    if chosen == SDPBackend.CUDNN_ATTENTION.value:
        return "cudnn_attention"
    if chosen == SDPBackend.FLASH_ATTENTION.value:
        return "flash_attention"
    raise UsageError(
        f"parallelism.cp: torch has no fused attention kernel for {q.dtype}, {q.shape[1]} query heads, {k.shape[1]} "
        f"key heads and a head width of {q.shape[3]} on this GPU: use bfloat16, or set cp to 1"
    )


def _attend(kernel: Kernel, block: Block, q: torch.Tensor, kv: torch.Tensor) -> _Attended:
    q, (k, v) = _queries(block, q), _keys(block, kv)
    if kernel == "flash_attention_for_cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, block.causal)
        return _Attended(out, lse, ())
    if kernel == "cudnn_attention":
        found = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, block.causal)
    else:
        found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, block.causal)
    out, lse, _, _, _, _, seed, offset, _ = found
    return _Attended(out, lse.view(out.shape[:3]), (seed, offset))


def _gradients(
    kernel: Kernel,
    block: Block,
    grad: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    random: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A block's part of the gradients of its queries, keys and values, by the kernel's own backward."""
    grad, q, out = (_queries(block, tensor) for tensor in (grad, q, out))
    k, v = _keys(block, kv)
    lse = _queries(block, lse).contiguous()  # CUDA's kernels do not look at its strides
    named: dict[str, Any] = {"dropout_p": 0.0, "is_causal": block.causal}
    if kernel != "flash_attention_for_cpu":
        named |= {"cum_seq_q": None, "cum_seq_k": None, "max_q": q.shape[2], "max_k": k.shape[2]}
        named |= {"philox_seed": random[0], "philox_offset": random[1]}
    if kernel == "cudnn_attention":
        named, lse = named | {"attn_bias": None}, lse[..., None]
    backward = getattr(aten, f"_scaled_dot_product_{kernel}_backward")
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = backward(grad, q, k, v, out, lse, **named)
    return found
