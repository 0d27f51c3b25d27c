"""How FSDP2 keeps, gathers and reduces: fields of the configuration, on any device."""

from harness.config import Trainer
from harness.recording import Mode
from probes.knobs.knob import Arm, Inaction, Knob


def _staged(config: Trainer.Config, mode: Mode, arm: Arm) -> Inaction | None:
    if config.parallelism.pp > 1:
        return Inaction(
            "unavailable in this build",
            f"with parallelism.pp={config.parallelism.pp} the schedule says when a stage is gathered and freed, and "
            "gathers it whole: set pp to 1",
        )
    return None


def _gathered_by_schedule(config: Trainer.Config, mode: Mode, arm: Arm) -> Inaction | None:
    return _not_sharded(config, mode, arm) or _staged(config, mode, arm)


def _not_sharded(config: Trainer.Config, mode: Mode, arm: Arm) -> Inaction | None:
    if config.fsdp_shards == 1:
        return Inaction(
            "unavailable in this build",
            "nothing is gathered or scattered with parallelism.dp_shard=1: shard over two ranks or more",
        )
    return None


KNOBS = (
    Knob(
        name="fsdp.reshard",
        hypothesis="keeping parameters gathered until backward saves the second all-gather and costs the memory of the "
        "whole gathered model",
        acts_on="FSDP2, any device; on a single rank too, where a unit's parameters in the dtype of computation are "
        "made again instead of gathered",
        metric="step_wall_ns",
        field="parallelism.reshard_after_forward",
        values=("default", "always", "never"),
        inaction=_staged,
        known=(
            "torch's own default keeps the last unit gathered, which backward needs first",
            "FSDP2 of a 1B model on 2 H200s, 7 pairs: never took 2.8 % less time a step than default (1.3 to 4.4 %) "
            "and 1.8 GiB more",
        ),
    ),
    Knob(
        name="fsdp.prefetch",
        hypothesis="units gathered further ahead hide all-gathers that take longer than the computation of one unit, "
        "and each costs the memory of a gathered unit",
        acts_on="FSDP2, any device; dp_shard of 2 or more; with reshard never in forward only",
        metric="step_wall_ns",
        field="parallelism.fsdp_prefetch",
        values=("default", "0", "1", "2"),
        inaction=_gathered_by_schedule,
        fsdp_methods=("set_modules_to_forward_prefetch",),
        known=(
            "default gathers one unit ahead in backward; in forward the host issues the next all-gather as soon as it "
            "gets there, which is early unless the host is what the step waits for",
            "1 differs from default in forward alone: its all-gather is issued before the computation of the unit",
        ),
    ),
    Knob(
        name="fsdp.async_unshard",
        hypothesis="gathered parameters in memory of the compute stream are reused at once, so that fewer bytes are "
        "reserved; without explicit prefetch forward waits for every all-gather",
        acts_on="FSDP2, dp_shard of 2 or more; on CPUs too, which have no reserved bytes: name another --metric there",
        metric="peak_reserved_bytes",
        field="parallelism.fsdp_async_unshard",
        values=("false", "true"),
        inaction=_gathered_by_schedule,
        fsdp_methods=("_set_unshard_async_op",),
        known=(
            "compare with --parallelism.fsdp_prefetch 1 in both arms to see the memory without the lost overlap",
            "its all-gathers run on the process group's stream: nccl.high_priority acts on them",
        ),
    ),
    Knob(
        name="fsdp.reduce_scatter_group",
        hypothesis="one NCCL communicator does one collective at a time, so that in backward all-gathers wait for "
        "reduce-scatters; with a communicator for each they overlap, if the links have bandwidth left",
        acts_on="FSDP2, dp_shard of 2 or more; torch 2.13 has it, earlier torch by a collective of our own; on gloo "
        "nothing overlaps anyway",
        metric="step_wall_ns",
        field="parallelism.fsdp_reduce_scatter_group",
        values=("shared", "separate"),
        inaction=_not_sharded,
        fsdp_methods=("set_separate_reduce_scatter_group", "set_custom_reduce_scatter"),
        known=(
            "pytorch#186335",
            "FSDP2 of a 1B model on 2 H200s, 7 pairs: separate against shared -0.9 % step time (95 %: -3.0 to +1.3 %), "
            "not decided",
            "traces show the second group as fsdp_reduce_scatter and count it to dp_shard: same number of collectives, "
            "same bytes, same allocated memory; a communicator more takes memory that no allocator sees",
        ),
    ),
)
