"""How long a step takes, and how much of its communication computation hides: predicted from the configuration and
from what the hardware was measured to do.

A steady step is replayed (`Step`, `PipelineStep`) with a `Program` that writes down what each rank's host issues, and
simulated (`harness.ledger.simulate`). Figures are defined as those of traces: `compute_ns` and `comm_ns` are unions of
kernels' spans over the step, `exposed_ns` what of the latter no computation runs beside, waiting for other ranks
included. What cannot be predicted is null, and `notes` say why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any

from harness.config import Trainer
from harness.garbage import no_garbage_collection
from harness.ledger.hardware import Hardware, UnmeasuredError
from harness.ledger.operators import Target
from harness.ledger.pipeline import PipelineStep
from harness.ledger.program import Line, Program
from harness.ledger.simulate import DeadlockError, Kernel, Span, Timeline, overlap_ns, simulate, total_ns, union
from harness.ledger.step import Implementation, Step
from harness.ledger.tape import WeightlessTape


@dataclass(kw_only=True, slots=True)
class DimensionTime:
    """Communication of one mesh dimension; what several expose at once counts for each."""

    dimension: str
    comm_ns: int
    exposed_ns: int


@dataclass(kw_only=True, slots=True)
class PhaseTime:
    """What belongs to forward, backward (what it computes again included), the optimizer, and the rest of a step."""

    phase: str
    compute_ns: int
    exposed_ns: int


@dataclass(kw_only=True, slots=True)
class LineTime:
    """Kernels or collectives of one kind in one part of the model: how long they run, and how much of that is
    communication that nothing hides."""

    phase: str
    part: str
    what: str
    is_communication: bool
    count: int
    ns: int
    exposed_ns: int


@dataclass(kw_only=True, slots=True)
class RankTime:
    """One rank; `idle_ns`: the step without computation and communication, `host_ns` what its host needs for the step,
    which is busy for all of it where the device waits for the host."""

    pipeline_rank: int | None
    context_rank: int | None
    compute_ns: int
    comm_ns: int
    exposed_ns: int
    idle_ns: int
    overlap_pct: float | None
    host_ns: int
    dimensions: list[DimensionTime]
    phases: list[PhaseTime]
    lines: list[LineTime]


@dataclass(kw_only=True, slots=True)
class ComparedTime:
    """A figure of `Time` and what was measured of it: of `step_ns` the median of undisturbed steps, of the others the
    mean over ranks and traced steps. `error_pct` = 100·(predicted − measured)/measured, of `overlap_pct` the
    difference in points."""

    figure: str
    predicted: float | None
    measured: float
    error_pct: float | None


@dataclass(kw_only=True, slots=True)
class Time:
    """`compute_ns` and the like: means over the ranks, whose own are in `ranks`; None where nothing is predicted.
    `overlap_pct`: the mean of theirs that communicate."""

    hardware: str | None = None
    step_ns: int | None = None
    compute_ns: int | None = None
    comm_ns: int | None = None
    exposed_ns: int | None = None
    overlap_pct: float | None = None
    tokens_per_s: float | None = None
    mfu_pct: float | None = None
    ranks: list[RankTime] = field(default_factory=list)
    compared: list[ComparedTime] = field(default_factory=list)
    """With what was measured, in `measured_mode`."""
    measured_mode: str | None = None
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@no_garbage_collection()
def predict_time(
    config: Trainer.Config,
    target: Target,
    hardware: Hardware,
    *,
    name: str | None = None,
    implementation: Implementation | None = None,
) -> Time:
    """`config` is valid; `name`: what the hardware is called by."""
    if reasons := _out_of_reach(config, target, hardware):
        return Time(hardware=name, notes=[f"no time: {reason}" for reason in reasons])
    try:
        programs = _programs(config, target, hardware, implementation or Implementation())
    except UnmeasuredError as error:
        return Time(hardware=name, notes=[f"no time: {error}"])

    never_rests = next((one.factor for one in hardware.sustained if one.kind == "layers"), 1.0)

    def sustained(busy_share: float) -> float:
        return 1 + (never_rests - 1) * busy_share

    try:
        timelines = simulate([program.items for program in programs], sustained)
    except DeadlockError as error:
        return Time(hardware=name, notes=[f"no time: {error}"])
    step_ns = max(timeline.end for timeline in timelines)
    ranks = [_rank(config, *of, step_ns) for of in zip(programs, timelines, strict=True)]
    shares = [rank.overlap_pct for rank in ranks if rank.overlap_pct is not None]
    layout = config.parallelism
    tokens_per_s = config.tokens_per_step * 1e9 / step_ns / (layout.tp * layout.cp * layout.pp)
    peak = hardware.peaks.flops_per_s.get(programs[0].dtype) if hardware.peaks is not None else None
    flops = config.model.flops_per_token(config.training.seq_len)
    return Time(
        hardware=name,
        step_ns=step_ns,
        compute_ns=round(mean(rank.compute_ns for rank in ranks)),
        comm_ns=round(mean(rank.comm_ns for rank in ranks)),
        exposed_ns=round(mean(rank.exposed_ns for rank in ranks)),
        overlap_pct=mean(shares) if shares else None,
        tokens_per_s=tokens_per_s,
        mfu_pct=100 * tokens_per_s * flops / peak if peak is not None else None,
        ranks=ranks,
        notes=_notes(programs, hardware),
    )


def _out_of_reach(config: Trainer.Config, target: Target, hardware: Hardware) -> list[str]:
    training, found = config.training, []
    if target == "cpu":
        found.append("on a CPU the host itself computes, which is not simulated")
    elif hardware.provenance.mode == "cpu":
        found.append("the calibration is of a CPU")
    if config.compile.blocks or config.compile.loss:
        found.append("what compiled layers fuse is not timed")
    if config.float8.recipe != "none":
        found.append("float8 products and the kernels that convert their operands are not timed")
    if training.cpu_offload:
        found.append("copies of CPU offload, and the host's waiting for them, are not timed")
    if config.activation_checkpoint.mode == "memory_budget":
        found.append("what a memory budget recomputes is only known of compiled layers")
    return found


def _notes(programs: Sequence[Program], hardware: Hardware) -> list[str]:
    extrapolated = {item for program in programs for item in program.extrapolated}
    if not extrapolated:
        return []
    kinds = sorted({kind for kind, _ in extrapolated})
    counts = sorted({ranks for _, ranks in extrapolated})
    measured = sorted({count for kind in kinds for count in hardware.measured_ranks(kind)})
    return [
        f"time: collectives over {_listed(counts)} ranks ({', '.join(kinds)}) are extrapolated from "
        f"{_listed(measured)} within one host; links between hosts are slower"
    ]


def _listed(counts: Sequence[int]) -> str:
    return " and ".join(map(str, counts))


def _programs(
    config: Trainer.Config, target: Target, hardware: Hardware, implementation: Implementation
) -> list[Program]:
    """One for each pipeline rank, and of it for each context-parallel rank if these attend to different amounts."""
    layout = config.parallelism
    contexts = layout.cp if layout.cp_load_balance == "none" else 1
    programs = []
    for pipeline_rank in range(layout.pp):
        for context_rank in range(contexts):
            step: Step | PipelineStep = (
                Step(
                    config,
                    target=target,
                    shard_rank=context_rank,
                    implementation=implementation,
                    tape=WeightlessTape(),
                )
                if layout.pp == 1
                else PipelineStep(
                    config,
                    target=target,
                    pipeline_rank=pipeline_rank,
                    shard_rank=context_rank,
                    implementation=implementation,
                    tape=WeightlessTape(),
                )
            )
            ops = step.ops if isinstance(step, Step) else step.first.ops
            program = Program(
                hardware,
                config,
                graph=ops.graph,
                tape=step.tape,
                quantities=step.quantities,
                pipeline_rank=pipeline_rank,
                context_rank=context_rank,
                contexts=contexts,
            )
            step.write_down(program)
            step.run()
            programs.append(program)
    return programs


def _rank(config: Trainer.Config, program: Program, timeline: Timeline, step_ns: int) -> RankTime:
    spans = union([(start, end) for start, end, _, _ in timeline.collectives])
    comm_ns, hidden_ns = total_ns(spans), overlap_ns(spans, timeline.compute)
    busy = total_ns(union([*spans, *timeline.compute]))
    lines = _lines(program, timeline)
    return RankTime(
        pipeline_rank=program.rank // program.contexts if config.parallelism.pp > 1 else None,
        context_rank=program.context_rank if program.contexts > 1 else None,
        compute_ns=total_ns(timeline.compute),
        comm_ns=comm_ns,
        exposed_ns=comm_ns - hidden_ns,
        idle_ns=step_ns - busy,
        overlap_pct=100 * hidden_ns / comm_ns if comm_ns else None,
        host_ns=sum(getattr(item, "host_ns", 0) for item in program.items),
        dimensions=_dimensions(timeline),
        phases=_phases(lines),
        lines=lines,
    )


def _dimensions(timeline: Timeline) -> list[DimensionTime]:
    of: dict[str, list[Span]] = defaultdict(list)
    for start, end, dimension, _ in timeline.collectives:
        of[dimension].append((start, end))
    found = []
    for dimension, spans in of.items():
        own = union(spans)
        exposed = total_ns(own) - overlap_ns(own, timeline.compute)
        found.append(DimensionTime(dimension=dimension, comm_ns=total_ns(own), exposed_ns=exposed))
    return found


def _phases(lines: Sequence[LineTime]) -> list[PhaseTime]:
    phases = dict.fromkeys(line.phase for line in lines)
    return [
        PhaseTime(
            phase=phase,
            compute_ns=sum(line.ns for line in lines if line.phase == phase and not line.is_communication),
            exposed_ns=sum(line.exposed_ns for line in lines if line.phase == phase),
        )
        for phase in phases
    ]


def _lines(program: Program, timeline: Timeline) -> list[LineTime]:
    """Longest first."""
    names: dict[int, Line] = {place: line for line, place in program.lines.items()}
    found: dict[int, LineTime] = {}

    def add(place: int, ns: int, exposed_ns: int, *, is_communication: bool) -> None:
        if place not in found:
            name = names[place]
            found[place] = LineTime(
                phase=name.phase,
                part=name.part,
                what=name.what,
                count=0,
                ns=0,
                exposed_ns=0,
                is_communication=is_communication,
            )
        line = found[place]
        line.count, line.ns, line.exposed_ns = line.count + 1, line.ns + ns, line.exposed_ns + exposed_ns

    for item in program.items:
        if isinstance(item, Kernel):
            add(item.line, item.ns, 0, is_communication=False)
    for start, end, _, place in timeline.collectives:
        hidden = overlap_ns([(start, end)], timeline.compute)
        add(place, end - start, end - start - hidden, is_communication=True)
    return sorted(found.values(), key=lambda line: -line.ns)
