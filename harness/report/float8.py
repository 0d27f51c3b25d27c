"""Float8 in a run: how many linear layers were converted, and what multiplied them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.float8 import LINEARS, Outcome
from harness.report.finding import Finding
from harness.text import counted

if TYPE_CHECKING:
    from harness.report.build import Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Float8:
    """Of the whole model, tensor- and data-parallel ranks counting once. `left`: (name, why) -> how many. `products`:
    those of float8 operands in the traces of all ranks, None where they cannot be seen: no complete step is traced,
    or CUDA graphs are replayed without a word."""

    recipe: str
    torchao: str
    emulated: bool
    gpu_has_float8: bool
    converted: dict[str, int]
    left: dict[tuple[str, str], int]
    products: int | None

    def to_json(self) -> dict[str, Any]:
        left = [{"name": name, "reason": reason, "count": count} for (name, reason), count in self.left.items()]
        return {**{name: getattr(self, name) for name in self.__dataclass_fields__}, "left": left}

    def words(self) -> str:
        """In a line: recipe, layers, kernel."""
        layers, names = counted(sum(self.converted.values()), "linear layer"), ", ".join(self.converted)
        parts = [f"{self.recipe} (torchao {self.torchao}), {layers} converted{f' ({names})' if names else ''}"]
        if self.left:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.left)
            parts.append(f"{sum(self.left.values()):,} left ({reasons})")
        if self.emulated:
            parts.append("emulated by products in float32")
        elif self.products is not None:
            parts.append(f"_scaled_mm {self.products:,} times in the traces")
        return ", ".join(parts)


def float8_of(report: Report) -> Float8 | None:
    """None where a run has no float8, or says nothing of it."""
    if report.recording is None or report.config is None:
        return None
    config, ranks = report.config, report.recording.ranks
    of_stage = max(1, config.world_size // config.parallelism.pp)
    outcomes: list[Outcome] = [
        document["float8"] for rank, document in ranks.items() if rank % of_stage == 0 and document.get("float8")
    ]
    if not outcomes:
        return None
    converted: Counter[str] = Counter()
    left: Counter[tuple[str, str]] = Counter()
    for outcome in outcomes:
        converted.update(outcome["converted"])
        left.update({(name, why["reason"]): why["count"] for name, why in outcome["left"].items()})
    captures = report.complete_captures
    is_seen = captures and not config.compile.cuda_graphs
    return Float8(
        recipe=outcomes[0]["recipe"],
        torchao=outcomes[0]["torchao"],
        emulated=outcomes[0]["emulated"],
        gpu_has_float8=outcomes[0]["gpu_has_float8"],
        converted=dict(converted),
        left=dict(left),
        products=sum(capture.float8_products for capture in captures) if is_seen else None,
    )


def float8_findings(report: Report) -> Iterator[Finding]:
    """Float8 that was asked for and is not in effect."""
    float8 = report.float8
    if float8 is None:
        return
    if not float8.converted:
        reasons = [f"{name}: {reason}" for name, reason in float8.left if name in LINEARS]
        yield Finding(
            severity="high",
            title="Float8 was asked for, and no linear layer is converted",
            evidence={"recipe": float8.recipe, "left_layers": sum(float8.left.values())},
            where="; ".join(reasons),
            advice="Dimensions on a tensor-parallel rank have to be multiples of 16: change widths of the model or "
            "parallelism.tp, or name other layers in float8.linears.",
        )
    elif float8.emulated and float8.gpu_has_float8:
        yield Finding(
            severity="high",
            title="Float8 is emulated by products in float32 on a GPU that multiplies float8",
            evidence={"recipe": float8.recipe, "converted_layers": sum(float8.converted.values())},
            where="all ranks",
            advice="Leave out float8.emulate: it is for tests, and slower than no float8 at all.",
        )
    elif not float8.emulated and float8.products == 0:
        yield Finding(
            severity="high",
            title="Float8 was asked for, and no float8 product (_scaled_mm) is in the traces",
            evidence={"recipe": float8.recipe, "converted_layers": sum(float8.converted.values())},
            where="traced steps of all ranks",
            advice="Layers are converted and multiply in another precision: compare torchao and torch of this run with "
            "those of one in which it worked.",
        )
