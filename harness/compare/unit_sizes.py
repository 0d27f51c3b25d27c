"""How large the storage of an FSDP unit is in each state: what the trace's collectives and the allocator snapshot
measured, else what the configuration says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from harness.config import DTYPE_BYTES, Trainer
from harness.ledger.parameters import ParameterShapes
from harness.memory import Analysis
from harness.trace.classify import full_bytes
from harness.trace.lifetime import Life, State, Transfer

Source = Literal["trace", "snapshot", "configuration"]
SHARD_DTYPE = "float32"


class Size(NamedTuple):
    """`measured`: a collective or an allocation had it; else it follows from the source."""

    bytes: int | None
    source: Source | None
    measured: bool | None


UNKNOWN = Size(None, None, None)


class UnitSizes:
    """`shapes`: the unit's parameters, empty where no configuration says them."""

    def __init__(
        self,
        config: Trainer.Config | None,
        life: Life,
        shapes: Sequence[ParameterShapes],
        snapshots: Analysis | None,
        rank: int | None,
    ) -> None:
        training = config.training if config is not None and shapes else None
        self.dtype = training.mixed_precision_param if training else None
        self.reduce_dtype = training.mixed_precision_reduce if training else None
        self.shard_dtype = SHARD_DTYPE if training else None
        self.shards = config.fsdp_shards if config is not None else 1
        self.life, self.shapes = life, shapes
        devices = [device for file, device in snapshots.devices if file.rank == rank] if snapshots else []
        self.buffers = {
            category: size for d in devices for (unit, category), size in d.unit_bytes.items() if unit == life.unit
        }
        modules = tuple(f"{module}." for module in life.unit.split(", "))
        self.held: Counter[str] = Counter()
        for device in devices:
            for (category, name), size in device.held_bytes.items():
                if name.startswith(modules):
                    self.held[category] += size

    @property
    def casts(self) -> bool:
        """Whether shards are cast before they are gathered, into a buffer of their own; so they are where not known."""
        return self.dtype is None or self.dtype != self.shard_dtype

    def of(self, state: State) -> tuple[Size, str | None]:
        """Bytes and dtype of a state."""
        padded = sum(shape.padded_elements for shape in self.shapes)
        whole = sum(shape.gathered_elements for shape in self.shapes)
        gathered = padded * self.shards
        size: Size | None
        match state.name:
            case "sharded parameters":
                dtype = self.shard_dtype
                size = self._held("parameter") or self._derived(padded, dtype)
            case "all-gather input":
                dtype = self.dtype
                size = self._part("all_gather", state) or self._derived(padded, dtype)
            case "all-gather output":
                dtype = self.dtype
                size = self._full("all_gather", state) or self._derived(gathered, dtype)
            case "unsharded parameters":
                dtype = self.dtype
                size = self._buffer("unsharded_parameter") or self._derived(gathered, dtype) or self._like_gathered()
            case "unsharded gradients":
                dtype = self.dtype
                size = self._derived(whole, dtype) or self._like_gathered()
            case "accumulated gradients":
                dtype = self.reduce_dtype
                size = self._derived(whole, dtype)
            case "reduce-scatter input":
                dtype = self.reduce_dtype
                measured = self._full("reduce_scatter", state) or self._buffer("reduce_scatter_input")
                size = measured or self._derived(gathered, dtype)
            case "gradient shards":
                dtype = self.shard_dtype
                size = self._held("gradient") or self._derived(padded, dtype)
        return size or UNKNOWN, dtype

    def moved(self, transfer: Transfer) -> Size:
        """The full (unsharded) side of a collective."""
        one = transfer.collective
        return _measured(full_bytes(transfer.kind, one.in_bytes, one.out_bytes), "trace") or UNKNOWN

    def _held(self, category: str) -> Size | None:
        return _measured(self.held.get(category), "snapshot")

    def _buffer(self, category: str) -> Size | None:
        return _measured(self.buffers.get(category), "snapshot")

    def _collective(self, kind: str, state: State | None) -> Transfer | None:
        """The one that reads or writes a state; by default the first."""
        since = self.life.span.start if state is None else state.span.start
        return next((one for one in self.life.transfers if one.kind == kind and one.span.end > since), None)

    def _full(self, kind: str, state: State | None = None) -> Size | None:
        one = self._collective(kind, state)
        return self.moved(one) if one is not None and self.moved(one).bytes is not None else None

    def _part(self, kind: str, state: State) -> Size | None:
        """The sharded side, which host ranges do not say."""
        one = self._collective(kind, state)
        if one is None or self.life.source == "host":
            return None
        return _measured(one.collective.in_bytes if kind == "all_gather" else one.collective.out_bytes, "trace")

    def _derived(self, elements: int, dtype: str | None) -> Size | None:
        return None if dtype is None else Size(elements * DTYPE_BYTES[dtype], "configuration", measured=False)

    def _like_gathered(self) -> Size | None:
        """As large as what an all-gather brings together."""
        full = self._full("all_gather")
        return Size(full.bytes, "trace", measured=False) if full else None


def _measured(value: int | None, source: Source) -> Size | None:
    return None if value is None else Size(value, source, measured=True)
