"""The types of what a recording's JSON holds. A value of another type counts as not stated: it is left out and named,
so that no reader has to ask again what a field is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from harness import compilation, float8
from harness.errors import InputError
from harness.limits import LARGEST_OF

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=999_999)]  # a snapshot's name has six digits for it
Number = Annotated[float, msgspec.Meta(ge=-1e100, le=1e100)]  # beyond any loss, and sums of them stay finite
Numbers = dict[str, Number | None]

# Every field may be null, or absent; those not named here are anybody's own and stay as they are.
ROW: dict[str, Any] = {
    "step": Count,
    "tokens": Count,
    "tokens_per_s": Number,
    "tflops_per_s": Number,
    "mfu_pct": Number,
    "mfu_peak_source": str,
    "loss": Number,
    "grad_norm": Number,
    "scalars": Numbers,
    "memory_source": str,
    "alloc_retries": Count,
    "ooms": Count,
    "phases": dict[str, dict[str, Any]],
    "tags": list[str],
}
RANK: dict[str, Any] = {
    "rank": Rank,
    "pid": Count,
    "host": str,
    "device": dict[str, Any],
    "environment_before": dict[str, str],
    "compile": compilation.Outcome,
    "float8": float8.Outcome,
    "end_state": str,
    "exception": str,
    "ended_unix_ns": Count,
}
MANIFEST: dict[str, Any] = {
    "schema_version": int,
    "mode": str,
    "name": str,
    "world_size": Annotated[int, msgspec.Meta(ge=1, le=LARGEST_OF["world_size"])],
    "recorded_ranks": list[Rank],
    "config": dict[str, Any],
    "mesh": dict[str, Any],
    "versions": dict[str, Any],
}
UNITS = ("_ns", "_bytes")  # what ends so is a count of them
MISSING_NAMED = 8


def checked_manifest(path: Path, manifest: Mapping[str, Any]) -> tuple[dict[str, Any], list[InputError]]:
    return _checked_document(path, manifest, MANIFEST)


def checked_rank(path: Path, document: Mapping[str, Any]) -> tuple[dict[str, Any], list[InputError]]:
    return _checked_document(path, document, RANK)


def checked_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[InputError]]:
    """The step rows of one rank in the order of their steps, each step once (its last row), and what was left out:
    one error for each field and reason, however many rows have it."""
    problems: Counter[str] = Counter()
    first_step: dict[str, object] = {}
    by_number: dict[int, dict[str, Any]] = {}
    for row in rows:
        kept, wrong = _checked_row(row)
        number = kept.get("step")
        if number is None:
            wrong.append("a row without a step number is left out")
        elif number in by_number:
            wrong.append("a step is there more than once: its last row counts")
        for problem in wrong:
            problems[problem] += 1
            first_step.setdefault(problem, number)
        if number is not None:
            by_number[number] = kept
    errors = []
    for problem, count in problems.items():
        step = first_step[problem]
        where = [] if step is None else [f"first at step {step}"]
        where += [f"{count} rows"] if count > 1 else []
        errors.append(InputError(path, problem + (f" ({', '.join(where)})" if where else "")))
    return [by_number[number] for number in sorted(by_number)], errors


def missing_rank_errors(missing: Sequence[int], path_of: Callable[[int], Path]) -> list[InputError]:
    """One error per rank without a step, up to `MISSING_NAMED`; the rest are counted in one more."""
    errors = [InputError(path_of(rank), "has no step: this rank is missing") for rank in missing[:MISSING_NAMED]]
    if rest := missing[MISSING_NAMED:]:
        errors.append(InputError(path_of(rest[0]), f"and {len(rest) - 1} more ranks up to {rest[-1]} have no step"))
    return errors


def _checked_row(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    kept, wrong = _checked(row, ROW, UNITS)
    phases = {}
    for name, phase in (kept.get("phases") or {}).items():
        phases[name], inside = _checked(phase, {}, UNITS)
        wrong += [f"phases.{name}.{problem}" for problem in inside]
    return ({**kept, "phases": phases} if phases else kept), wrong


def _checked_document(
    path: Path, document: Mapping[str, Any], types: Mapping[str, Any]
) -> tuple[dict[str, Any], list[InputError]]:
    kept, wrong = _checked(document, types)
    return kept, [InputError(path, problem) for problem in wrong]


def _checked(
    fields: Mapping[str, Any], types: Mapping[str, Any], units: tuple[str, ...] = ()
) -> tuple[dict[str, Any], list[str]]:
    kept, wrong = {}, []
    for name, value in fields.items():
        kind = types.get(name, Count if units and name.endswith(units) else None)
        if kind is not None and value is not None:
            try:
                value = msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                wrong.append(f"{name} is left out: {str(error)[:1].lower()}{str(error)[1:]}")
                continue
        kept[name] = value
    return kept, wrong
