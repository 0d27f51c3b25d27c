"""One training step of `harness.trainer`, replayed symbolically on a tape.

Reads like the trainer, line by line, because what Python names keep alive is part of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from harness.allocator import Allocator, Settings
from harness.config import DTYPE_BYTES, Trainer
from harness.float8 import conversion
from harness.ledger.autograd import Gradient, Tensor
from harness.ledger.chunked_loss import forward_and_backward, turns
from harness.ledger.compiled import (
    CompiledOperators,
    after_attention,
    compiled_cross_entropy,
    fuses_loss,
    keeps_attention,
    keeps_last_product,
    within_budget,
)
from harness.ledger.context_parallel import ContextParallel
from harness.ledger.float8 import Float8
from harness.ledger.fully_sharded import Sharding, Unit, after, before
from harness.ledger.layout import checkpointed_layers, quantities, unit_parameters, within_a_budget
from harness.ledger.loss import VocabParallelLoss, cross_entropy, vocab_parallel_cross_entropy
from harness.ledger.operators import LOGITS, Operators, Target
from harness.ledger.recompute import Keeps, checkpointed, keeps_every_other, keeps_nothing
from harness.ledger.sizes import Quantities
from harness.ledger.start_up import fill_normal, rotary_table
from harness.ledger.tape import Storage, Tape
from harness.ledger.tensor_parallel import Redistribution
from harness.ledger.workspaces import gradient_norms
from harness.pipeline.split import Part, whole

if TYPE_CHECKING:
    from harness.ledger.program import Program

ATTENTION = "activations: attention"
FEED_FORWARD = "activations: feed-forward"
NORM = "activations: norms"
RESIDUAL = "activations: residual stream"
OPTIMIZER = "optimizer states"


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """What a trainer's code decides about memory and its configuration does not say; defaults: `harness.trainer`."""

    keeps_logits: bool = False
    """A Python name holds the logits until backward is done."""
    copies_heads: bool = False
    """Rotary embeddings after the transposition to [batch, heads, seq, head_dim]: the attention output is laid out
    by heads and copied before the output projection."""
    vocab_parallel_loss: VocabParallelLoss = "in_place"


class Step:
    """A rank's state, and `run` for one optimizer step on it; the first has no optimizer states yet.

    `settings` are those of the CUDA allocator, unless it has another `tape`. With `part` it is a pipeline stage;
    `beside` is another one of the same rank, which shares all but parameters.
    """

    def __init__(
        self,
        config: Trainer.Config,
        *,
        target: Target,
        shard_rank: int = 0,
        implementation: Implementation,
        settings: Settings | None = None,
        tape: Tape | None = None,
        part: Part | None = None,
        values: Quantities | None = None,
        beside: Step | None = None,
    ) -> None:
        self.config, self.implementation, self.shard_rank = config, implementation, shard_rank
        self.part = part or whole(config.model.n_layers)
        self.quantities = values or quantities(config, shard_rank)
        allocator = Allocator(settings or Settings()) if target == "cuda" else None
        self.tape: Tape = beside.tape if beside else tape or Tape(allocator)
        self.host: Tape = beside.host if beside else Tape()
        element = DTYPE_BYTES[config.training.mixed_precision_param]
        self.ops: Operators = (
            beside.ops if beside else Operators(self.tape, self.quantities, target=target, element=element)
        )
        cp = config.parallelism.cp
        # On the host, where GPUs do not count it.
        counts = cp > 1 and target == "cpu" and beside is None
        self.positions = self.ops.new("token positions", 8, "S") if counts else None
        self.attend = self.ops.attention if cp == 1 else ContextParallel(self.ops, config, shard_rank % cp).attention
        self.float8 = Float8(self.ops, config.float8.recipe, emulate=config.float8.emulate)
        self.converted = conversion(config).converted
        self.compiled = CompiledOperators(self.ops) if config.compile.blocks else None
        self.held: list[Tensor] = []
        self.plan = Redistribution(
            self.ops,
            sequence_parallel=config.parallelism.sequence_parallel,
            keeps_received=within_a_budget(config),
        )
        self.sharding = Sharding(
            self.tape,
            self.quantities,
            element=element,
            reduce_element=DTYPE_BYTES[config.training.mixed_precision_reduce],
            replicated=config.parallelism.dp_replicate > 1,
            async_unshard=config.parallelism.fsdp_async_unshard,
            root=0 if beside is None else len(beside.stages),
            host=self.host if config.training.cpu_offload else None,
        )
        # The gradients of a tied matrix meet in autograd, in the form of the head's, unless that has its own backward.
        meet = config.model.tied_embeddings and config.training.loss_chunks == 1
        self.ops.adds_up_gradients = not config.training.reduce_every_micro_batch and not meet
        self.optimizer = config.optimizer.resolved(target)
        self.states: list[Storage] = []

        policy = "never" if config.parallelism.pp > 1 else config.parallelism.reshard_after_forward
        parameters = unit_parameters(config, self.part)
        frees = policy != "never"
        self.tied = config.model.tied_embeddings and not config.tied_across_stages
        self.embedding: Unit | None = None
        if "embedding" in parameters:
            self.embedding = Unit(
                self.sharding, "tok_embeddings", "N_embedding", parameters["embedding"], reshards=frees
            )
        self.layers = [
            Unit(self.sharding, f"layers.{i}", "N_layer", parameters["layer"], reshards=frees) for i in self.part.layers
        ]
        self.checkpointed = {f"layers.{i}" for i in checkpointed_layers(config)}
        self.head: Unit | None = None
        for name in parameters.keys() & {"head", "norm"}:
            reshards = frees if config.training.loss_chunks > 1 else policy == "always"
            self.head = Unit(self.sharding, name, f"N_{name}", parameters[name], reshards=reshards)
        self.embedding = self.head if self.tied else self.embedding
        self.sharding.set_prefetch(config.parallelism.fsdp_prefetch, first=self.embedding or self.sharding.units[0])
        self.program: Program | None = None

        units = self.sharding.units
        # `to_empty` goes from module to module, and makes a tied matrix twice.
        for unit in [self.embedding, *units] if self.tied and self.embedding else units:
            unit.materialise()
        # Of the rank: the stages after this one add themselves.
        self.stages: list[Step] = beside.stages if beside else []
        self.stages.append(self)
        self.rotary: Storage = beside.rotary if beside else self.ops.new("rotary table", 4, "S·hd")
        if part is None:
            self.initialise()

    def units(self) -> list[Unit]:
        return [unit for stage in self.stages for unit in stage.sharding.units]

    def initialise(self) -> None:
        """Parameters get their values, once all of the rank's are there."""
        shards = self.sharding.shards
        matrices = [p for unit in self.units() for p in unit.parameters if not p.name.endswith("norm")]
        if self.ops.target == "cuda":
            shapes = [(p.local(shards, self.shard_rank) // p.columns, p.columns) for p in matrices]
            fill_normal(self.tape, shapes)
            self.rotary = rotary_table(self.ops, self.config.training.seq_len)

    def write_down(self, program: Program) -> None:
        """What the host has the device do in the steps from here on."""
        self.program = self.ops.program = program
        self.ops.graph.on_sum = program.add_gradients
        self.sharding.write_down(program)

    def run(self) -> None:
        """Batches, zero_grad, forward and backward of every micro-batch, clipping, optimizer: the trainer's order."""
        tape, micro_batches = self.tape, self.config.training.accumulation_steps
        self.start_step()
        batches = [self.ops.new("batch", 8, "T") for _ in range(2 * micro_batches)]
        for unit in self.sharding.units:
            unit.zero_gradients()

        reduces_every = self.config.training.reduce_every_micro_batch
        for name, is_last in turns(
            "micro-batch", "micro-batches", micro_batches, all_alike=reduces_every, folded=self.program is None
        ):
            self.sharding.reduces = is_last or reduces_every
            self._micro_batch(f", {name}" if micro_batches > 1 else "")

        tape.instant("optimizer")
        self._update()
        del batches  # the trainer's names live until the step returns

    def start_step(self) -> None:
        self.tape.start_step()
        self.tape.instant("batch")
        if self.program is not None:
            self.program.start_step()
        self.host.start_step()
        self.host.instant("step")

    def _micro_batch(self, suffix: str) -> None:
        """Forward, loss, backward and reduction; `suffix` goes to the names of its instants."""
        if self.config.training.loss_chunks > 1:
            forward_and_backward(self, suffix)
            return
        graph, self.suffix = self.ops.graph, suffix
        logits = self.forward()
        self.instant("loss")
        kept = logits.storage if self.implementation.keeps_logits else None
        loss = self.loss(logits)
        del logits
        assert loss.node is not None
        root, loss.node = loss.node, None
        graph.backward(root, Gradient(self.ops.new(LOGITS, 4, "1")))
        self.end_backward()
        del kept

    def end_backward(self) -> None:
        """The callback at the end of backward."""
        self.tape.instant(f"backward: embedding reduction{self.suffix}")
        assert self.embedding is not None, "stages of a pipeline have their own order"
        self.embedding.end_backward()
        self.sharding.finalize_backward()

    def instant(self, name: str) -> None:
        """What is allocated from here on, and the backward of what is recorded, belongs to `name`."""
        self.ops.graph.instant = name + self.suffix
        again = self.ops.graph.computes_again
        self.tape.instant(f"{'backward' if again else 'forward'}: {name}{', again' if again else ''}{self.suffix}")

    def forward(self, h: Tensor | None = None, *, head: bool = True) -> Tensor:
        """The logits, without `head` what that is given; of a pipeline stage what it hands on, made of `h` unless it
        begins with the embedding."""
        ops, graph, plan = self.ops, self.ops.graph, self.plan
        weights: dict[str, Tensor] = {}
        if self.embedding is not None:
            self.instant("embedding")
            self.embedding.pre_forward()  # its input has no gradient: its post-backward comes last, in `_micro_batch`
            weights = self.embedding.tensors()
            h = plan.leave(RESIDUAL, ops.embedding(RESIDUAL, weights["tok_embeddings"]))
            if not self.tied:  # else the unit goes on until the head is done
                h = after(graph, self.embedding, h)
        assert h is not None
        for unit in self.layers:
            h = self._layer(unit, h)
        if self.head is not None:
            h = self._end(self.head, weights, h, head=head)
        self.sharding.all_gather_state = None  # freed when the root's forward ends
        return h

    def _end(self, unit: Unit, weights: dict[str, Tensor], h: Tensor, *, head: bool) -> Tensor:
        """Last norm and head; `weights` are those of a tied embedding."""
        ops, graph, plan = self.ops, self.ops.graph, self.plan
        self.instant("head")
        if not self.tied:
            weights = unit.tensors()
            h = before(graph, unit, h)
        if self.part.norm:
            h = ops.rms_norm(NORM, h, weights["norm"], plan.stream, plan.rows)
        if self.part.head and head:
            gathered = plan.enter(h)
            matrix = weights["tok_embeddings" if self.tied else "lm_head"]
            h = ops.linear(LOGITS, gathered, matrix, ("T·d", "V·d/t", "T·V/t"))
        return after(graph, unit, h)

    def _layer(self, unit: Unit, x: Tensor) -> Tensor:
        graph, weights = self.ops.graph, unit.tensors()
        self.instant(f"{unit.name} attention")
        x = before(graph, unit, x)
        if unit.name not in self.checkpointed:
            return after(graph, unit, self._block(unit.name, weights, x))
        block, keeps = partial(self._block, unit.name, weights), self._keeps()
        if self.compiled is None or not keeps_attention(keeps):
            return after(graph, unit, checkpointed(graph, block, x, keeps, lets_go=self.compiled is not None))
        # What attention returned is there: what lies before it is computed again when its own backward needs it.
        heads, rest = partial(self._heads, unit.name, weights), partial(self._rest, unit.name, weights, x)
        attended = checkpointed(graph, heads, x, keeps, lets_go=True)
        return after(graph, unit, checkpointed(graph, rest, attended, after_attention(keeps), lets_go=True))

    def _keeps(self) -> Keeps:
        mode = self.config.activation_checkpoint.mode
        if mode == "memory_budget":
            return within_budget(self.config, self.quantities)
        return keeps_every_other if mode == "selective" else keeps_nothing

    def _block(self, name: str, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return self._rest(name, weights, x, self._heads(name, weights, x))

    def _heads(self, name: str, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """What attention returns. Uncompiled, the normalised input, what is gathered from it, queries, keys and values
        stay alive until that has been projected: Attention.forward and what calls it have names for them."""
        ops, plan = self.ops, self.plan
        ops.in_compiled_layer = self.compiled is not None
        if ops.graph.computes_again:
            self.instant(f"{name} attention")
        normalised = self._norm(x, weights["attention_norm"], [])
        gathered = plan.enter(normalised)
        self.held = [] if self.compiled else [normalised, gathered]
        del normalised
        q = self._linear("wq", ATTENTION, gathered, weights, ("T·d", "d·d/t", "T·d/t"))
        k = self._linear("wk", ATTENTION, gathered, weights, ("T·d", "kv·d/t", "T·kv/t"))
        v = self._linear("wv", ATTENTION, gathered, weights, ("T·d", "kv·d/t", "T·kv/t"))
        q, k = ops.rotary(ATTENTION, q, "T·d/t"), ops.rotary(ATTENTION, k, "T·kv/t")
        self.held += [] if self.compiled else [q, k, v]
        out = self.attend(ATTENTION, q, k, v)
        if self.implementation.copies_heads:
            out = ops.copy_heads(ATTENTION, out)
        ops.in_compiled_layer = False
        return out

    def _rest(self, name: str, weights: dict[str, Tensor], x: Tensor, attended: Tensor) -> Tensor:
        ops, plan = self.ops, self.plan
        ops.in_compiled_layer = self.compiled is not None
        projected = self._linear("wo", RESIDUAL, attended, weights, ("T·d/t", "d·d/t", "T·d"))
        branch = plan.leave(RESIDUAL, projected)
        self.held.clear()
        del projected, attended
        total = ops.add(RESIDUAL, x, branch, plan.stream)
        made_of, x = [x, branch] if self.compiled else [], total
        del branch, total
        self.instant(f"{name} feed-forward")
        branch = self._feed_forward(self._norm(x, weights["ffn_norm"], made_of), weights)
        x = ops.add(RESIDUAL, x, branch, plan.stream)
        ops.in_compiled_layer = ops.is_last_part = False
        return x

    def _norm(self, x: Tensor, weight: Tensor, made_of: list[Tensor]) -> Tensor:
        """`made_of`: what `x` is the sum of; this empties it. Where a compiled layer's operators run one by one, what
        it computes again is there for all that need it."""
        again = self.ops.graph.computes_again and self.ops.target == "cpu"
        if self.compiled is None or again:
            return self.ops.rms_norm(NORM, x, weight, self.plan.stream, self.plan.rows)
        return self.compiled.rms_norm(NORM, x, weight, self.plan.stream, self.plan.rows, made_of)

    def _feed_forward(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        ops, plan = self.ops, self.plan
        gathered = plan.enter(x)
        shape = ("T·d", "f·d/t", "T·f/t")
        gate = self._linear("w1", FEED_FORWARD, gathered, weights, shape)
        elementwise = self.compiled or ops
        gate = elementwise.silu(FEED_FORWARD, gate)
        up = self._linear("w3", FEED_FORWARD, gathered, weights, shape)
        if self.compiled:  # a graph lets go of its values after their last use, no module holds its argument
            del x, gathered
        hidden = elementwise.multiply(FEED_FORWARD, gate, up)
        del gate, up
        ops.is_last_part = self.compiled is not None and not keeps_last_product(self.config)
        out = self._linear("w2", RESIDUAL, hidden, weights, ("T·f/t", "f·d/t", "T·d"))
        ops.is_last_part = self.compiled is not None
        return plan.leave(RESIDUAL, out)

    def _linear(
        self, name: str, category: str, x: Tensor, weights: dict[str, Tensor], shape: tuple[str, str, str]
    ) -> Tensor:
        multiply = self.float8.linear if name in self.converted else self.ops.linear
        return multiply(category, x, weights[name], shape)

    def loss(self, logits: Tensor) -> Tensor:
        if fuses_loss(self.config, self.ops.target):
            return compiled_cross_entropy(self.ops, logits)
        if self.config.parallelism.tp == 1:
            return cross_entropy(self.ops, logits)
        return vocab_parallel_cross_entropy(self.ops, logits, self.implementation.vocab_parallel_loss)

    def _update(self) -> None:
        """AdamW: two float32 states of every local element and one step counter a tensor. `foreach` needs one more
        copy, the root of the second moment (torch/optim/adam.py `_multi_tensor_adam`)."""
        new = self.sharding.new_resident
        if self.program is not None:
            self.program.update(self.optimizer)
        shards = [4 * p.local(self.sharding.shards, self.shard_rank) for unit in self.units() for p in unit.parameters]
        if self.sharding.host is None:
            self.ops.workspace(gradient_norms(max(shards) // 4))
        if not self.states:
            counters = new(OPTIMIZER, 4, "tensors", parts=[4] * len(shards))
            self.states = [counters, new(OPTIMIZER, 8, "P", parts=[size for size in shards for _ in range(2)])]
        if self.optimizer == "foreach":
            new("optimizer temporaries", 4, "P", parts=shards)
