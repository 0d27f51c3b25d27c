"""Pipeline parallelism through torch.distributed.pipelining: stages of one model, and the schedule that runs them.

torch's runtime carries out the actions of `harness.pipeline.plan`, whatever the schedule, so that every schedule has
`PP:<action>` ranges in traces, gathers a stage's parameters once and reduces its gradients once a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from harness import config
from harness.pipeline.plan import Plan
from harness.trainer.loss import Loss, cross_entropy_sum
from harness.trainer.model.decoder import Decoder
from harness.trainer.parallel_dims import axis_group

if TYPE_CHECKING:
    from harness.record.recorder import Recorder


def own_part(model: Decoder, plan: Plan, rank: int) -> Decoder:
    """What of `model` a pipeline rank holds, under its names."""
    return model.part([name for stage in plan.stages_of(rank) for name in plan.parts[stage].names])


def stage_modules(model: Decoder, plan: Plan, rank: int) -> list[Decoder]:
    """The stages of a rank, cut from what it holds and sharing its modules."""
    return [model.part(plan.parts[stage].names) for stage in plan.stages_of(rank)]


class Pipeline:
    """The stages of one rank, materialised `parts` of its `model`, and the schedule that runs them.

    Neighbours do not have to tell each other what they send, as torch's stages do by default, with a forward and a
    backward of their own: what stages hand on has the shape of a micro-batch's residual stream.
    """

    def __init__(
        self,
        plan: Plan,
        model: Decoder,
        parts: list[Decoder],
        config: config.Trainer.Config,
        mesh: DeviceMesh,
        device: torch.device,
        recorder: Recorder,
        loss: Loss = cross_entropy_sum,
    ) -> None:
        group, training = mesh.get_group("pp"), config.training
        self._recorder, self._tp_group, self._cross_entropy = recorder, axis_group(mesh, "tp"), loss
        self._valid: torch.Tensor | None = None
        sequence = training.seq_len // config.parallelism.cp
        tokens = torch.empty(training.micro_batch_size, sequence, dtype=torch.int64, device="meta")
        hidden = _hidden(config)
        logits = hidden.new_empty(training.micro_batch_size, sequence, config.model.vocab_size // config.parallelism.tp)
        kind = _RehearsedStage if dist.get_backend(group) == "fake" else _Stage
        self._stages = []
        for number, part in zip(plan.stages_of(group.rank()), parts, strict=True):
            part.rotary = model.rotary  # materialised with the model
            out = logits if number == len(plan.parts) - 1 else hidden
            stage = kind(part, number, len(plan.parts), device, hidden if number else tokens, out, group=group)
            stage.recorder = recorder
            self._stages.append(stage)
        self._schedule = _runtime(plan, self._stages, self._loss)

    def run(self, tokens: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """One pass of the schedule, forward and backward: the sum over its micro-batches of the loss of their labels
        over `valid`, 0-d float32, zero on ranks without the last stage.

        tokens, labels: int64 [micro_batches · batch, seq], the same on all ranks of the pipeline.
        """
        self._valid = valid
        losses: list[torch.Tensor] = []
        self._schedule.step(
            *([tokens] if self._stages[0].is_first else []),
            target=labels if any(stage.is_last for stage in self._stages) else None,
            losses=losses,
            return_outputs=False,
        )
        for stage in self._stages:
            stage.let_go()
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros_like(valid).float()

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert self._valid is not None
        with self._recorder.phase("forward"):
            return self._cross_entropy(logits, labels, self._tp_group) / self._valid


def _hidden(config: config.Trainer.Config) -> torch.Tensor:
    """What one stage hands to the next, as a meta tensor: this rank's part of [batch, seq, dim]."""
    training, layout = config.training, config.parallelism
    sequence = training.seq_len // layout.cp // (layout.tp if layout.sequence_parallel else 1)
    dtype: torch.dtype = getattr(torch, training.mixed_precision_param)
    shape = (training.micro_batch_size, sequence, config.model.dim)
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def _runtime(plan: Plan, stages: Sequence[_Stage], loss: Any) -> Any:
    """torch's schedule that carries out the actions of a table; its classes of named schedules make the same tables,
    but those of GPipe and 1F1B go their own ways and leave no ranges in a trace."""
    runtime: Any = torch_schedules._PipelineScheduleRuntime
    action: Any = torch_schedules._Action
    # Sums over the valid tokens of all ranks: nothing is left to divide by the number of micro-batches.
    schedule = runtime(list(stages), plan.micro_batches, loss_fn=loss, scale_grads=False)
    actions = {rank: [action.from_str(str(one)) for one in row] for rank, row in enumerate(plan.actions)}
    schedule._prepare_schedule_with_comms(actions, format="compute_comms")
    return schedule


class _Stage(PipelineStage):
    """Says to the recorder what it computes."""

    recorder: Recorder

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.phase("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.phase("backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.phase("backward"):
            return super().backward_weight_one_chunk(*args, **kwargs)

    def perform_reduce_grad(self, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.phase("backward"):
            return super().perform_reduce_grad(*args, **kwargs)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Without those between two stages of this rank, which gloo cannot carry out. Later torch does not greet where
        shapes are known."""
        greetings: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [one for one in greetings if one.peer != dist.get_rank()]

    def let_go(self) -> None:
        """The pass is over: torch's runtime has waited for what was sent."""


class _RehearsedStage(_Stage):
    """One without neighbours: it agrees with itself that shapes are known, and on CPUs holds what it sends until the
    pass ends, as works of gloo do that torch's runtime waits for then; those of NCCL hold nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sent: list[Any] = []

    def _warmup_forward_vote(self, has_backward: bool, received_acc: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._held(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._held(super().get_bwd_send_ops(bwd_chunk_id))

    def _held(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        if self.device.type == "cpu":
            self._sent += [operation.tensor for operation in operations]
        return operations

    def let_go(self) -> None:
        self._sent.clear()
