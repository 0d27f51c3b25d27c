"""torch.compile in a run: what was compiled, and what that was asked for is not in effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from harness.compilation import MOVED, Outcome, captured_again
from harness.report.finding import Finding, ranks_text
from harness.text import counted

if TYPE_CHECKING:
    from harness.report.build import Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilation:
    """The most of any rank, and what ranks say together. `ran_eagerly`: part -> forwards that were not compiled;
    `captured`, `skips`: CUDA graphs recorded, and how often inductor left one out; None where none were asked for.
    `recaptured`: `graphs` of a step and how often a rank `captured` them, where that is again and again, else None."""

    backend: str
    layers: int
    layer_kinds: int
    layer_graphs: int
    loss_graphs: int
    graph_breaks: int
    recompile_reasons: list[str]
    ran_eagerly: dict[str, int]
    captured: int | None
    recaptured: dict[str, int] | None
    skips: int | None
    skip_reasons: list[str]
    ranks_recompiling: list[int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def words(self) -> str:
        """In a line: backend, layers, graphs."""
        parts = [self.backend]
        if self.layers:
            parts.append(f"{counted(self.layers, 'layer')} in {counted(self.layer_graphs, 'graph')}")
        if self.loss_graphs:
            parts.append("the loss")
        if self.ran_eagerly:
            parts.append(f"not compiled: {', '.join(self.ran_eagerly)}")
        if self.captured is not None:
            parts.append(f"{counted(self.captured, 'CUDA graph')} captured, {self.skips} left out")
        return "; ".join(parts)


def compilation_of(report: Report) -> Compilation | None:
    """None where nothing was to be compiled, or the run says nothing of it."""
    if report.recording is None:
        return None
    documents = report.recording.ranks
    found: dict[int, Outcome] = {rank: one["compile"] for rank, one in documents.items() if one.get("compile")}
    if not found:
        return None
    most = {name: max(one[name] for one in found.values()) for name in _COUNTS}
    graphs = [one["cuda_graphs"] for one in found.values() if one["cuda_graphs"] is not None]
    eager: Counter[str] = Counter()
    for one in found.values():
        eager.update(one["ran_eagerly"])
    return Compilation(
        backend=next(iter(found.values()))["backend"],
        **most,
        recompile_reasons=_distinct(one["recompile_reasons"] for one in found.values()),
        ran_eagerly=dict(eager),
        captured=min((one["captured"] for one in graphs), default=None),
        recaptured=next(
            ({"graphs": one["graphs"], "captured": one["captured"]} for one in graphs if captured_again(one)), None
        ),
        skips=max((one["skips"] for one in graphs), default=None),
        skip_reasons=_distinct(one["skip_reasons"] for one in graphs),
        ranks_recompiling=[rank for rank, one in found.items() if one["layer_graphs"] > one["layer_kinds"]],
    )


_Count = Literal["layers", "layer_kinds", "layer_graphs", "loss_graphs", "graph_breaks"]
_COUNTS: tuple[_Count, ...] = get_args(_Count)


def _distinct(lists: Iterator[list[str]]) -> list[str]:
    return list(dict.fromkeys(text for one in lists for text in one))


def compilation_findings(report: Report) -> Iterator[Finding]:
    """torch.compile and CUDA graphs that were asked for and are not in effect."""
    found = report.compilation
    if found is None:
        return
    if found.ran_eagerly:
        yield Finding(
            severity="high",
            title=f"torch.compile was asked for, and {counted(len(found.ran_eagerly), 'part')} ran without it",
            evidence={"forwards": sum(found.ran_eagerly.values()), "layer_graphs": found.layer_graphs},
            where=", ".join(found.ran_eagerly),
            advice="Something that it does not trace was in force, such as a TorchDispatchMode: logs/ may say.",
        )
    if found.ranks_recompiling:
        ranks: list[int | None] = [*found.ranks_recompiling]
        yield Finding(
            severity="medium",
            title=f"Layers were compiled {found.layer_graphs} times, {counted(found.layer_kinds, 'kind')} of them",
            evidence={"layer_graphs": found.layer_graphs, "layer_kinds": found.layer_kinds},
            where=ranks_text(ranks),
            advice=f"Each costs seconds; the reason that torch gives: {(found.recompile_reasons or ['none'])[-1]}",
        )
    if found.captured is not None and (found.captured == 0 or found.skips):
        reason = found.skip_reasons[0] if found.skip_reasons else "inductor gives no reason"
        yield Finding(
            severity="high" if found.captured == 0 else "medium",
            title="CUDA graphs were asked for, and none was captured"
            if found.captured == 0
            else f"CUDA graphs were left out {found.skips} times",
            evidence={"captured": found.captured, "skips": found.skips},
            where="compiled layers",
            advice=f"{reason}. A graph replays at the addresses at which it was captured, and FSDP2 frees parameters "
            "and gathers them again; parallelism.reshard_after_forward never keeps them until backward.",
        )
    if found.recaptured is not None:
        yield Finding(
            severity="high",
            title="CUDA graphs are captured again and again: {captured} times, {graphs} of them".format(
                **found.recaptured
            ),
            evidence={**found.recaptured},
            where="compiled layers",
            advice=f"Each costs more than it saves: {MOVED}. Leave compile.cuda_graphs at false.",
        )
