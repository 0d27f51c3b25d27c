"""One optimizer step of a pipeline rank: the actions of its schedule, each replayed as torch's runtime carries it out.

What is held when, from torch/distributed/pipelining (stage.py, schedules.py:_PipelineScheduleRuntime, _backward.py):

- Receive buffers, one per micro-batch for the activations and one for the gradients, are made once and stay. Where the
  neighbouring stage is on the same rank its tensor takes the buffer's place, until the next pass brings another.
- A stage's output lives until its backward (`fwd_cache`), the last stage's logits too.
- What was sent is held by the work of its transfer until the pass ends, by gloo; NCCL records the stream on it instead
  (ProcessGroupNCCL::pointToPoint), so that it is freed as if it had not been sent, though not reused at once.
- Gradients of parameters are added up whole, in the dtype of the reduction, until REDUCE_GRAD.
- After I, whose graph W still needs, everything from the first weight on stays, and with it the gradient that arrived
  at each weight, into which autograd then adds no other (input_buffer.cpp); the gradients of the inputs stay with these
  (`inp.grad`) until the next pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.allocator import Settings
from harness.config import Trainer
from harness.ledger.autograd import ACCUMULATE_GRAD, Gradient, Kept, Node, Tensor
from harness.ledger.layout import quantities
from harness.ledger.operators import LOGITS, Target
from harness.ledger.simulate import COMPUTE, TRANSFER
from harness.ledger.step import Implementation, Step
from harness.ledger.tape import Storage, Tape
from harness.pipeline.actions import Action, each_step
from harness.pipeline.plan import plan

if TYPE_CHECKING:
    from harness.ledger.program import Program

BUFFERS = "pipeline receive buffers"


class PipelineStep:
    """A rank's state over its stages; `run` as `Step.run`."""

    def __init__(
        self,
        config: Trainer.Config,
        *,
        target: Target,
        pipeline_rank: int,
        shard_rank: int = 0,
        implementation: Implementation,
        settings: Settings | None = None,
        tape: Tape | None = None,
    ) -> None:
        pipeline = plan(config)
        self.config, self.actions = config, pipeline.actions[pipeline_rank]
        self.plan, self.pipeline_rank = pipeline, pipeline_rank
        self.program: Program | None = None
        self.arrived: dict[tuple[int, str, int], int] = {}
        numbers = pipeline.stages_of(pipeline_rank)
        self.exchanges_gradients = config.tied_across_stages and pipeline.other_end(pipeline_rank) is not None
        self.quantities = quantities(config, shard_rank, [pipeline.parts[number] for number in numbers])
        self.stages: dict[int, _Stage] = {}
        self.sent: list[Storage] = []
        self.holds_sent = target == "cpu"
        first: Step | None = None
        for number in numbers:
            step = Step(
                config,
                target=target,
                shard_rank=shard_rank,
                implementation=implementation,
                settings=settings,
                tape=tape,
                part=pipeline.parts[number],
                values=self.quantities,
                beside=first,
            )
            first = first or step
            self.stages[number] = _Stage(
                step,
                number,
                self.stages.get(number - 1),
                micro_batches=pipeline.micro_batches,
                is_last=number == len(pipeline.parts) - 1,
            )
        assert first is not None, "a rank without a stage is refused"
        first.initialise()
        self.first = first
        self.tape, self.host = first.tape, first.host

    def run(self) -> None:
        tape, passes = self.tape, self.config.training.accumulation_steps
        self.first.start_step()
        coefficient = 8 * self.quantities.values["n"]
        batches = [self.first.ops.new("batch", coefficient, "T") for _ in range(2 * passes)]
        for stage in self.stages.values():
            for unit in stage.step.sharding.units:
                unit.zero_gradients()
        for number in range(1, passes + 1):
            self._pass("" if passes == 1 else f", pass {number}")
        tape.instant("optimizer")
        self._exchange_tied_gradients()
        self.first._update()
        del batches

    def write_down(self, program: Program) -> None:
        """What the host has the device do in the steps from here on."""
        self.program = program
        for stage in self.stages.values():
            stage.step.write_down(program)

    def _exchange_tied_gradients(self) -> None:
        """What comes from the other end, and with CPU offload what is sent."""
        if self.exchanges_gradients:
            self._exchange()
            received = self.first.ops.new("tied gradients", 4, "V·d/t/W")
            sent = self.first.ops.new("tied gradients", 4, "V·d/t/W") if self.config.training.cpu_offload else None
            del received, sent

    def _exchange(self) -> None:
        other = self.plan.other_end(self.pipeline_rank)
        if self.program is not None and other is not None:
            self.program.wait_stream(TRANSFER, COMPUTE)
            ends = sorted((self.pipeline_rank, other))
            size = self.quantities.size(4, "V·d/t/W").bytes
            self.program.transfer("tied embedding gradients", size, source=ends[0], to=ends[1])
            self.program.wait_stream(COMPUTE, TRANSFER)
            self.program.moves("elementwise", "tied gradients", 3 * size)

    def _pass(self, suffix: str) -> None:
        for stage in self.stages.values():
            stage.start_pass()
        for action in each_step(self.actions):
            self._carry_out(action, suffix)
        self.sent.clear()
        if self.program is not None:
            self.program.wait_stream(COMPUTE, TRANSFER)

    def _transfer(self, action: Action) -> None:
        """A send, or a receive that the action on what comes will wait for."""
        program, stage, what = self.program, action.stage, action.kind.removesuffix("_F").removesuffix("_B")
        if program is None:
            return
        other = self.plan.rank_of[stage + (1 if action.kind in ("SEND_F", "RECV_B") else -1)]
        ends = (self.pipeline_rank, other) if what == "SEND" else (other, self.pipeline_rank)
        program.wait_stream(TRANSFER, COMPUTE)  # ProcessGroupNCCL has its stream wait for the caller's, to receive too
        size = self.first.ops.quantities.size(self.first.ops.e, self.first.plan.stream).bytes
        of = "activations" if action.kind.endswith("_F") else "activation gradients"
        program.transfer(of, size, source=ends[0], to=ends[1])
        if what == "RECV":
            self.arrived[stage, action.kind[-1], action.micro_batch or 0] = program.record(TRANSFER)

    def _await(self, action: Action) -> None:
        """What the action computes on, if another rank sends it."""
        if self.program is not None:
            kind = "F" if action.kind == "F" else "B"
            self.program.wait(self.arrived.pop((action.stage, kind, action.micro_batch or 0), None))

    def _carry_out(self, action: Action, suffix: str) -> None:
        stage, number = self.stages[action.stage], action.micro_batch or 0
        stage.step.suffix = f" ({action}){suffix}"
        if action.kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"):
            self._transfer(action)
        elif action.kind in ("F", "B", "I"):
            self._await(action)
        if action.kind == "UNSHARD":
            stage.unshard()
        elif action.kind == "RESHARD":
            stage.reshard()
        elif action.kind == "REDUCE_GRAD":
            stage.reduce()
        elif action.kind == "F":
            stage.forward(number)
        elif action.kind == "SEND_F":
            self._send(stage.outputs[number].storage)
        elif action.kind == "B":
            stage.backward(number)
        elif action.kind == "I":
            stage.backward_inputs(number)
        elif action.kind == "W":
            stage.backward_weights(number)
        elif action.kind == "SEND_B":
            self._send(stage.to_send.pop(number))

    def _send(self, storage: Storage) -> None:
        if self.holds_sent:
            self.sent.append(storage)


class _Stage:
    """One stage of a rank; `before` is the one whose output it takes without sending, if that is on the same rank."""

    def __init__(self, step: Step, number: int, before: _Stage | None, *, micro_batches: int, is_last: bool) -> None:
        self.step, self.number, self.is_last, self.micro_batches = step, number, is_last, micro_batches
        self.before = before
        self.after: _Stage | None = None
        if before is not None:
            before.after = self
        step.sharding.reduces = step.sharding.frees = False
        step.ops.adds_up_gradients = True
        self.inputs: list[Storage] = []
        self.output_gradients: list[Storage] = []
        self.outputs: dict[int, Tensor] = {}
        self.losses: dict[int, Tensor] = {}
        self.to_send: dict[int, Storage] = {}
        self.kept: dict[int, tuple[Tensor, list[Kept]]] = {}
        self.input_gradients: dict[int, Storage] = {}
        self.waits = False

    def start_pass(self) -> None:
        """Input gradients of the pass before go, and the buffers are made before the first pass."""
        self.input_gradients.clear()
        if not self.inputs and self.number:
            self.inputs = [self._buffer() for _ in range(self.micro_batches)]
        if not self.output_gradients and not self.is_last:
            self.output_gradients = [self._buffer() for _ in range(self.micro_batches)]

    def _buffer(self) -> Storage:
        return self.step.ops.new(BUFFERS, self.step.ops.e, self.step.plan.stream)

    def unshard(self) -> None:
        self.step.tape.instant(f"pipeline: gather{self.step.suffix}")
        for unit in self.step.sharding.units:
            unit.gather()
        self.waits = True

    def _wait(self) -> None:
        if self.waits:
            for unit in self.step.sharding.units:
                unit.wait()
            self.waits = False

    def reshard(self) -> None:
        for unit in self.step.sharding.units:
            unit.free()

    def reduce(self) -> None:
        self.step.tape.instant(f"backward: reduction{self.step.suffix}")
        for unit in self.step.sharding.units:
            unit.post_backward()
        self.step.sharding.finalize_backward()

    def forward(self, number: int) -> None:
        self.step.tape.instant(f"pipeline: wait{self.step.suffix}")
        self._wait()
        x = None
        if self.number:
            x = Tensor(self.inputs[number], self._leaf(number))
        self.outputs[number] = self.step.forward(x)
        if self.is_last:
            self.step.instant("loss")
            self.losses[number] = self.step.loss(self.outputs[number])
        elif self.after is not None:
            self.after.inputs[number] = self.outputs[number].storage

    def _leaf(self, number: int) -> Node:
        """What takes the gradient of an input."""

        def accumulate(gradient: Gradient) -> list[Gradient | None]:
            self.to_send[number] = gradient.storage
            return []

        return Node(ACCUMULATE_GRAD, (), accumulate, None)

    def _root(self, number: int) -> tuple[Node, Gradient]:
        """Where backward starts, and with what."""
        out = self.losses.pop(number) if self.is_last else self.outputs[number]
        node, out.node = out.node, None
        assert node is not None
        if self.is_last:
            return node, Gradient(self.step.ops.new(LOGITS, 4, "1"))
        return node, Gradient(self.output_gradients[number], is_view=True)  # of the buffer, to which nothing is added

    def backward(self, number: int) -> None:
        root, gradient = self._root(number)
        out = self.outputs.pop(number)
        self.step.ops.graph.backward(root, gradient)
        del root, gradient
        self._finish(number)
        del out

    def _finish(self, number: int) -> None:
        """torch's callback at the end of backward: a unit whose input has no gradient; and what the stage before on
        the same rank takes."""
        if self.step.embedding is not None:
            self.step.tape.instant(f"backward: embedding{self.step.suffix}")
            self.step.embedding.keep_gradients()
        if self.before is not None:
            self.before.output_gradients[number] = self.to_send.pop(number)

    def backward_inputs(self, number: int) -> None:
        if self.number == 0:  # torch leaves all to W where nothing is to be sent
            return
        root, gradient = self._root(number)
        out = self.outputs.pop(number)
        kept = self.step.ops.graph.backward(root, gradient, "inputs")
        self.kept[number] = (Tensor(self.inputs[number] if self.is_last else out.storage), kept)
        self.input_gradients[number] = self.to_send[number]
        self._finish(number)

    def backward_weights(self, number: int) -> None:
        if self.number == 0:
            self.backward(number)
            return
        held, kept = self.kept.pop(number)
        self.step.tape.instant(f"backward: weights{self.step.suffix}")
        self.step.ops.graph.backward_weights(kept)
        del held
