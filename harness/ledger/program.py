"""What the host of one rank issues in a step, with the cost of each piece, as the replay of the step comes to it.

Operators, FSDP2's units and the schedule say here which kernels they start; times are those of the hardware file
(`harness.ledger.hardware`), and what it has no point for raises `UnmeasuredError`. A kernel whose bytes a docstring of
`hardware.KernelKind` counts is given them; everything too small to show (metadata copies, scalars) is left out.

The host needs a while for every kernel, by where the kernel belongs: forward or backward, on DTensors or not. What it
needs for a unit of FSDP2 it needs in equal parts before each thing that it issues there, and after the last.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from harness.config import Trainer
from harness.ledger.autograd import Graph
from harness.ledger.hardware import Hardware, UnmeasuredError
from harness.ledger.hardware_points import CollectiveKind, DType, HostKind, KernelKind, Layout
from harness.ledger.simulate import COMPUTE, TRANSFER, Collective, Item, Kernel, Record, Synchronise, Wait, Work
from harness.ledger.sizes import Quantities, Size
from harness.ledger.tape import Tape

PRODUCTS = "matrix products"

LAUNCHES: dict[KernelKind, int] = {"rms_norm_backward": 2, "embedding_backward": 15}
"""Kernels of those that are several; the host needs its time for each."""

_PLACE = re.compile(r"^(?P<phase>forward|backward|optimizer)?(?:: )?(?P<layer>layers\.\d+ )?(?P<part>[^,(]*)")
REST = "rest"
"""The phase of what is in none: the batch, and a pipeline's gathering and waiting."""


_OPERATORS: dict[bool, tuple[HostKind, HostKind, HostKind, HostKind]] = {
    False: (
        "forward_operator",
        "selective_forward_operator",
        "backward_operator",
        "checkpointed_backward_operator",
    ),
    True: (
        "dtensor_forward_operator",
        "dtensor_selective_forward_operator",
        "dtensor_backward_operator",
        "dtensor_checkpointed_backward_operator",
    ),
}
"""On DTensors or not: in forward, in a selectively checkpointed region, in backward, in that of a checkpointed one."""


@dataclass(frozen=True, slots=True)
class Line:
    """Work of one kind in one part of the model: `matrix products` of `layers, attention` in `backward`; the part is
    empty where it is none of the model's."""

    phase: str
    part: str
    what: str


class Program:
    """`items` in the order of issue; their `line` is a place in `lines`.

    Of each pipeline rank one context-parallel rank is simulated, or all `contexts` of them where they differ; other
    ranks are like these.
    """

    def __init__(
        self,
        hardware: Hardware,
        config: Trainer.Config,
        *,
        graph: Graph,
        tape: Tape,
        quantities: Quantities,
        pipeline_rank: int = 0,
        context_rank: int = 0,
        contexts: int = 1,
    ) -> None:
        self.hardware, self.contexts, self.context_rank = hardware, contexts, context_rank
        self.rank = self._number(pipeline_rank)
        of_pipeline_rank = tuple(range(pipeline_rank * contexts, (pipeline_rank + 1) * contexts))
        self._peers = {
            "pp": tuple(self._number(other) for other in range(config.parallelism.pp)),
            "cp": of_pipeline_rank,
            config.fsdp_axis: of_pipeline_rank,
        }
        self.graph, self.tape, self.quantities = graph, tape, quantities
        self.items: list[Item] = []
        self.lines: dict[Line, int] = {}
        layout = config.parallelism
        self.dtype: DType = config.training.mixed_precision_param
        self.on_dtensors, self.sequence_parallel = layout.tp > 1, layout.sequence_parallel
        self.selective = config.activation_checkpoint.mode == "selective"
        self.sizes = {
            "dp_replicate": layout.dp_replicate,
            config.fsdp_axis: config.fsdp_shards,
            "cp": layout.cp,
            "tp": layout.tp,
            "pp": layout.pp,
        }
        self.fsdp_axis, self.world_size = config.fsdp_axis, config.world_size
        self.separate_reductions = layout.fsdp_reduce_scatter_group == "separate"
        self.extrapolated: set[tuple[CollectiveKind, int]] = set()
        """Kinds of collectives and numbers of ranks that the hardware file has no measurement of."""
        self._events = 0
        self._met: Counter[tuple[object, ...]] = Counter()
        self._places: dict[str, tuple[str, str]] = {}
        self._costs: dict[tuple[object, ...], int] = {}

    # ------------------------------------------------------------------------------------------------- kernels

    def kernel(self, kind: KernelKind, what: str, *terms: tuple[int, str]) -> None:
        """On the compute stream; `terms`: bytes an element and the elements that it reads and writes."""
        self.moves(kind, what, sum(self.quantities.size(*term).bytes for term in terms))

    def moves(
        self,
        kind: KernelKind,
        what: str,
        size: int,
        *,
        stream: str = COMPUTE,
        host_ns: int | None = None,
        part: str | None = None,
        is_copy: bool = False,
    ) -> None:
        """A kernel that moves `size` bytes; `part` of the model, if not that which the replay is at. `is_copy`: a
        memory operation, which takes as long."""
        key = kind, size
        if key not in self._costs:
            self._costs[key] = self.hardware.kernel_ns(kind, size)
        if size:
            host_ns = self._operator_ns() * LAUNCHES.get(kind, 1) if host_ns is None else host_ns
            self._issue(what, self._costs[key], stream=stream, host_ns=host_ns, part=part, is_copy=is_copy)

    def product(self, shape: tuple[str, str, str], layout: Layout) -> None:
        """Of a linear layer whose input, matrix and output have these elements."""
        key = shape, layout
        if key not in self._costs:
            rows, inner, outer = (self.quantities.size(1, monomial).bytes for monomial in shape)
            # rows = t·i, inner = o·i, outer = t·o
            tokens = round((rows * outer / inner) ** 0.5)
            i, o = rows // tokens, outer // tokens
            m, n, k = {
                "forward": (tokens, o, i),
                "input_gradient": (tokens, i, o),
                "weight_gradient": (o, i, tokens),
            }[layout]
            self._costs[key] = self.hardware.matmul_ns(self.dtype, m, n, k, layout)
        self._issue(PRODUCTS, self._costs[key], fills=True)

    def attention(self, *, backward: bool, queries: float = 1.0, keys: float = 1.0, causal: bool = True) -> None:
        """Of this share of a rank's queries and keys."""
        key = "attention", backward, queries, keys, causal
        if key not in self._costs:
            value = self.quantities.values
            self._costs[key] = self.hardware.attention_ns(
                "backward" if backward else "forward",
                self.dtype,
                batch=value["B"],
                queries=int(queries * value["S"]),
                keys=int(keys * value["S"]),
                heads=value["H"] // value["t"],
                kv_heads=value["K"] // value["t"],
                head_dim=value["hd"],
                causal=causal,
            )
        value = self.quantities.values
        launches = (5 if value["H"] != value["K"] else 3) if backward else 1  # cuDNN; grouped heads are added up
        self._issue("attention kernels", self._costs[key], host_ns=launches * self._operator_ns())

    def _issue(
        self,
        what: str,
        ns: int,
        *,
        stream: str = COMPUTE,
        host_ns: int | None = None,
        part: str | None = None,
        fills: bool = False,
        is_copy: bool = False,
    ) -> None:
        host_ns = self._operator_ns() if host_ns is None else host_ns
        self.items.append(Kernel(stream, ns, host_ns, self._line(what, part), fills, is_copy))

    # ------------------------------------------------------------------------------------------------- collectives

    def collective(
        self,
        kind: CollectiveKind,
        axis: str,
        what: str,
        size: int,
        *,
        stream: str = COMPUTE,
        host_ns: int | None = None,
        part: str | None = None,
    ) -> None:
        """`size`: bytes of the whole buffer; nothing where the axis has one rank. The rest as of `moves`."""
        ranks = self.sizes[axis]
        if ranks == 1 or not size:
            return
        ns = self.hardware.collective_ns(kind, ranks, size)
        if ranks not in self.hardware.measured_ranks(kind):
            self.extrapolated.add((kind, ranks))
        group = "world" if ranks == self.world_size else axis
        if self.separate_reductions and kind == "reduce_scatter" and axis == self.fsdp_axis:
            group = "fsdp_reduce_scatter"
        peers = self._peers.get(axis, (self.rank,))
        line = self._line(f"{kind.replace('_', '-')} of {what}", part)
        host_ns = self.hardware.host_ns("collective") if host_ns is None else host_ns
        self._meet(kind, axis, ns, line, stream, host_ns, group, peers, ("collective", group, axis, peers))

    def transfer(self, what: str, size: int, *, source: int, to: int) -> None:
        """A send or receive between pipeline ranks, of `size` bytes; both at once where ranks exchange what they have,
        `source` then the lower one on both."""
        ns = self.hardware.collective_ns("send", 2, size)
        source, to = self._number(source), self._number(to)
        line, host_ns = self._line(f"transfer of {what}", ""), self.hardware.host_ns("collective")
        self._meet("send", "pp", ns, line, TRANSFER, host_ns, "pp", (source, to), ("transfer", source, to))

    def _number(self, pipeline_rank: int) -> int:
        return pipeline_rank * self.contexts + self.context_rank

    def _meet(
        self,
        kind: CollectiveKind,
        axis: str,
        ns: int,
        line: int,
        stream: str,
        host_ns: int,
        communicator: str,
        peers: tuple[int, ...],
        meeting: tuple[object, ...],
    ) -> None:
        self._met[meeting] += 1
        number, beside = self._met[meeting], self.hardware.overlap(kind, self.sizes[axis])
        self.items.append(Collective(stream, ns, host_ns, line, axis, communicator, (*meeting, number), peers, *beside))

    # ------------------------------------------------------------------------------------------------- step

    def start_step(self) -> None:
        """The first half of what a step has besides, and the number of valid tokens."""
        self.work("step", 2)
        self._over_data("valid tokens", 8)

    def update(self, optimizer: str) -> None:
        """Gradient norm, for which the host sends numbers and so waits; clipping, AdamW and the logged loss."""
        if optimizer != "fused":
            raise UnmeasuredError(f"AdamW's {optimizer} implementation is not timed")
        parameters = self.quantities.values["P"]
        self.moves("gradient_norm", "gradient norm", 4 * parameters, host_ns=0)
        self.synchronise()
        for axis in ("dp_replicate", self.fsdp_axis, "tp", "pp"):
            self.collective("all_reduce", axis, "gradient norm", 4)
        self.moves("gradient_scale", "clipping", 8 * parameters, host_ns=0)
        self.work("optimizer_step")
        self.moves("adamw", "AdamW", 28 * parameters, host_ns=0)
        self._over_data("logged loss", 4)
        self.collective("all_reduce", "pp", "logged loss", 4)
        self.work("step", 2)

    def _over_data(self, what: str, size: int) -> None:
        for axis in ("dp_replicate", self.fsdp_axis):
            self.collective("all_reduce", axis, what, size)

    def add_gradients(self, size: Size) -> None:
        self.moves("elementwise", "sums of gradients", 3 * size.bytes)

    # ------------------------------------------------------------------------------------------------- order

    def record(self, stream: str = COMPUTE) -> int:
        """An event after all that `stream` has been given."""
        self._events += 1
        self.items.append(Record(stream, self._events))
        return self._events

    def wait(self, event: int | None, stream: str = COMPUTE) -> None:
        if event is not None:
            self.items.append(Wait(stream, event))

    def wait_stream(self, stream: str, other: str) -> None:
        """`stream` goes on once `other` has done what it has been given."""
        self.wait(self.record(other), stream)

    def synchronise(self) -> None:
        """The host waits for the compute stream."""
        self.items.append(Synchronise(COMPUTE))

    def work(self, kind: HostKind, parts: int = 1) -> None:
        """The host's own, or one part of it."""
        self.busy(self.host_ns(kind, parts))

    def busy(self, host_ns: int) -> None:
        self.items.append(Work(host_ns))

    def host_ns(self, kind: HostKind, parts: int = 1) -> int:
        return self.hardware.host_ns(kind) // parts

    def _operator_ns(self) -> int:
        graph = self.graph
        kinds = _OPERATORS[self.on_dtensors]
        if graph.runs_backward and not graph.computes_again:
            return self.hardware.host_ns(kinds[3 if graph.unpacks else 2])
        return self.hardware.host_ns(kinds[1 if graph.frame is not None and self.selective else 0])

    def _line(self, what: str, part: str | None = None) -> int:
        name = self.tape.now.name if self.tape.now is not None else ""
        if name not in self._places:
            match = _PLACE.match(name)
            assert match is not None, "every name matches"
            part = ("layers, " if match["layer"] else "") + match["part"].strip()
            self._places[name] = match["phase"] or REST, part if match["phase"] in ("forward", "backward") else ""
        phase, place = self._places[name]
        line = Line(phase, place if part is None else part, what)
        return self.lines.setdefault(line, len(self.lines))
