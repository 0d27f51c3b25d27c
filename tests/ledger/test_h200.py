"""Predicted against measured peaks on H200s, torch 2.11: numbers that ship with the tests.

The CUDA table came from the other trainer's snapshots, so its rows show that the table is right; those with activation
checkpointing (AC) and our own trainer's were predicted before they were looked at. The exception is fsdp8_fp32: its
attention falls back to plain operators, which no snapshot showed, and two of their temporaries were settled by this row
(see `Operators._attention_math`).
Rows marked `held_out` are of HSDP, tied embeddings, accumulation and deterministic kernels; what was predicted for them
was kept before the first was measured. What came after all of them is where blocks are taken from (`harness.allocator`,
driven by the tape), which changes by up to 0.6 % what of a segment is handed out unsplit, and the order of allocations
within an operator.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest

from harness.allocator.conf import parse_conf
from harness.config import ActivationCheckpoint, Decoder, Parallelism, Trainer, Training
from harness.config_json import from_dict
from harness.ledger import Implementation, predict
from harness.ledger.prediction import RankMemory
from harness.ledger.step import Step
from harness.ledger.tape import Instant
from harness.text import in_ranges

GIB = 2**30
PEAKS = json.loads((Path(__file__).parent / "h200_peaks.json").read_text())
MEASURED, REAL, RESERVED = PEAKS["runs"], PEAKS["real"]["runs"], PEAKS["reserved"]["runs"]
CONFIGS = {run["name"]: run["config"] for run in (*MEASURED, *REAL, *RESERVED) if "config" in run}
CONFS = {run["name"]: run["alloc_conf"] for run in RESERVED if "alloc_conf" in run}

EXPANDABLE = "expandable_segments:True"

TOLERANCE_PCT = 0.12
"""A few MiB that blocks have unsplit, which depends on what was freed before."""


@cache
def ranks_of(name: str) -> list[RankMemory]:
    return predict(from_dict(CONFIGS[name]), "cuda", settings=parse_conf(CONFS.get(name, ""))).ranks


@pytest.mark.parametrize("run", MEASURED, ids=[run["name"] for run in MEASURED])
def test_own_trainer(run: dict[str, Any]) -> None:
    memory = ranks_of(run["name"])[0]
    for predicted, measured in (
        (memory.peak_allocated_bytes, run["steady_peak_allocated_bytes"]),
        (memory.first_step_peak_allocated_bytes, run["first_step_peak_allocated_bytes"]),
        (phase(memory.timeline, "forward"), run["steady_phase_peak_allocated_bytes"]["forward"]),
        (phase(memory.timeline, "backward"), run["steady_phase_peak_allocated_bytes"]["backward"]),
    ):
        assert abs(100 * (predicted - measured) / measured) < TOLERANCE_PCT


@pytest.mark.parametrize("run", REAL, ids=[run["name"] for run in REAL])
def test_real_ranks(run: dict[str, Any]) -> None:
    ranks = ranks_of(run["name"])
    assert sorted(rank for peaks in run["peaks"] for rank in peaks["ranks"]) == [memory.rank for memory in ranks]
    for peaks in run["peaks"]:
        for rank in peaks["ranks"]:
            for predicted, measured in (
                (ranks[rank].peak_allocated_bytes, peaks["steady_peak_allocated_bytes"]),
                (ranks[rank].first_step_peak_allocated_bytes, peaks["first_step_peak_allocated_bytes"]),
            ):
                assert abs(100 * (predicted - measured) / measured) < TOLERANCE_PCT


WAITED_PCT = {("pp2_fsdp2_tp2", 6): 7.0}
"""What was sent and freed while NCCL's stream had it: when it can be reused is a matter of time, and one rank of four
that do the same took 502 MiB more."""


@pytest.mark.parametrize("run", RESERVED, ids=[run["name"] for run in RESERVED])
def test_reserved_bytes(run: dict[str, Any]) -> None:
    for peaks in run["peaks"]:
        for rank in peaks["ranks"]:
            predicted, measured = ranks_of(run["name"])[rank].peak_reserved_bytes, peaks["reserved_bytes"]
            assert predicted is not None
            assert abs(100 * (predicted - measured) / measured) < WAITED_PCT.get((run["name"], rank), 0.2)


def test_reserved_bytes_that_grow_with_every_step() -> None:
    """Requests of 62.5 MiB get segments of 64 MiB, which `max_split_size_mb:64` keeps whole and for large requests."""
    settings = parse_conf("max_split_size_mb:64")
    config = from_dict(CONFIGS["fsdp4tp2_4L_untied"])
    step = Step(config, target="cuda", implementation=Implementation(), settings=settings)
    reserved = []
    for _ in range(4):
        step.run()
        reserved.append(step.tape.reserved_bytes)
    assert reserved[1:] == [2_908_749_824, 3_579_838_464, 4_250_927_104]  # an H200's, from the second step on
    prediction = predict(config, "cuda", settings=settings)
    assert prediction.ranks[0].reserved_grows
    assert prediction.notes == ["reserved bytes still grow after 5 steps, and are those after 5"]


@pytest.mark.parametrize(("row", "conf", "reserved_gib"), [(0, "", 25.676), (1, "", 16.41), (0, EXPANDABLE, 24.107)])
def test_another_trainer_reserves_about_as_much(row: int, conf: str, reserved_gib: float) -> None:
    """How it initialises parameters is not known here."""
    memory = predict(RECORDED[row].config(), "cuda", OTHER_TRAINER, parse_conf(conf)).ranks[0]
    assert memory.peak_reserved_bytes is not None
    assert abs(100 * (memory.peak_reserved_bytes / GIB / reserved_gib - 1)) < 2


def phase(timeline: list[Instant], name: str) -> int:
    return max(instant.bytes for instant in timeline if instant.name.startswith(name))


OTHER_TRAINER = Implementation(keeps_logits=True, copies_heads=True, vocab_parallel_loss="dtensor")
"""The trainer of the shared recordings: holds its logits, rotates after transposing, DTensor's loss parallelism."""


@dataclass(frozen=True)
class Recorded:
    """A row of recordings/README.md (NVIDIA H200, torch 2.11.0+cu130, 2026-11-29); GiB as printed there."""

    name: str
    dp_shard: int
    tp: int
    n_layers: int
    vocab_size: int
    seq_len: int
    batch: int
    peak_gib: float
    first_step_gib: float | None = None
    checkpointing: Literal["none", "full"] = "none"
    tolerance_pct: float = TOLERANCE_PCT

    def config(self) -> Trainer.Config:
        return Trainer.Config(
            world_size=self.dp_shard * self.tp,
            model=Decoder.Config(
                vocab_size=self.vocab_size, dim=2048, n_layers=self.n_layers, n_heads=32, n_kv_heads=8, ffn_dim=8192
            ),
            parallelism=Parallelism.Config(dp_shard=self.dp_shard, tp=self.tp),
            activation_checkpoint=ActivationCheckpoint.Config(mode=self.checkpointing),
            training=Training.Config(micro_batch_size=self.batch, seq_len=self.seq_len),
        )


RECORDED = [
    Recorded("h200x2_fsdp2_connections_unset", 2, 1, 8, 32000, 8192, 2, 22.3726),
    Recorded("h200x2_tp2", 1, 2, 8, 32000, 8192, 2, 14.4543),
    Recorded("h200_fsdp4_tp2", 4, 2, 4, 32000, 1024, 1, 1.1319, tolerance_pct=0.35),
    Recorded("h200_fsdp2_tp2", 2, 2, 8, 32000, 2048, 2, 4.5692),
    Recorded("h200_llama1b_untied_fsdp4_tp2", 4, 2, 16, 128256, 2048, 1, 6.2178),
    Recorded("rehearsed, FSDP4 x TP2, 1B", 4, 2, 16, 128256, 8192, 2, 32.8809, first_step_gib=31.4525),
    Recorded("h200_fsdp4_ac", 4, 1, 8, 32000, 2048, 2, 3.7763, checkpointing="full"),
    Recorded(
        "rehearsed, FSDP4 x TP2, 1B, full AC",
        *(4, 2, 16, 128256, 8192, 2),
        20.6143,
        first_step_gib=19.1859,
        checkpointing="full",
    ),
]


@pytest.mark.parametrize("row", RECORDED, ids=[row.name for row in RECORDED])
def test_other_trainer(row: Recorded) -> None:
    memory = predict(row.config(), "cuda", OTHER_TRAINER).ranks[0]
    assert memory.at == "backward: loss"
    assert abs(100 * (memory.peak_allocated_bytes / GIB / row.peak_gib - 1)) < row.tolerance_pct
    if row.first_step_gib:
        assert abs(100 * (memory.first_step_peak_allocated_bytes / GIB / row.first_step_gib - 1)) < row.tolerance_pct


def accuracy() -> list[tuple[str, float, float, str]]:
    """Of every row its name, predicted and measured steady peak in GiB, and what was predicted to be the peak."""
    found = []
    for run in MEASURED:
        memory = ranks_of(run["name"])[0]
        measured = run["steady_peak_allocated_bytes"] / GIB
        found.append((run["name"], memory.peak_allocated_bytes / GIB, measured, memory.at))
    for run in REAL:
        for peaks in run["peaks"]:
            memory = ranks_of(run["name"])[peaks["ranks"][0]]
            name = f"{run['name']}, {'ranks' if peaks['ranks'][1:] else 'rank'} {', '.join(map(str, peaks['ranks']))}"
            measured = peaks["steady_peak_allocated_bytes"] / GIB
            found.append((name, memory.peak_allocated_bytes / GIB, measured, memory.at))
    for row in RECORDED:
        memory = predict(row.config(), "cuda", OTHER_TRAINER).ranks[0]
        found.append((row.name, memory.peak_allocated_bytes / GIB, row.peak_gib, memory.at))
    return found


def test_table_of_signed_errors() -> None:
    """Printed by `pytest -rP`, and what docs/ledger.md says: 100·(predicted − measured)/measured of every row."""
    documented = (Path(__file__).parents[2] / "docs" / "ledger.md").read_text()
    errors = []
    for name, predicted, measured, at in accuracy():
        errors.append(100 * (predicted / measured - 1))
        line = f"| {name} | {predicted:.4f} | {measured:.4f} | {errors[-1]:+.3f} % | {at} |"
        print(line)
        assert line in documented
    mean = sum(map(abs, errors)) / len(errors)
    summary = f"Mean of {len(errors)} absolute errors {mean:.3f} %, worst {max(errors, key=abs):+.3f} %."
    print(summary)
    assert summary in documented
    assert mean < 0.03


def test_table_of_reserved_bytes() -> None:
    """As above; a mean over rows, of which one is for all ranks with the same figures."""
    documented = (Path(__file__).parents[2] / "docs" / "ledger.md").read_text()
    errors = []
    for run in RESERVED:
        for peaks in run["peaks"]:
            ranks = peaks["ranks"]
            predicted = ranks_of(run["name"])[ranks[0]].peak_reserved_bytes
            assert predicted is not None
            measured = peaks["reserved_bytes"]
            errors.append(100 * (predicted / measured - 1))
            name = f"{run['name']}, {'ranks' if ranks[1:] else 'rank'} {in_ranges(ranks)}"
            line = f"| {name} | {predicted / GIB:.4f} | {measured / GIB:.4f} | {errors[-1]:+.3f} % |"
            line += " held out |" if run.get("held_out") else " |"
            print(line)
            assert line in documented
    mean = sum(map(abs, errors)) / len(errors)
    summary = f"Mean of {len(errors)} absolute errors {mean:.2f} %, worst {max(errors, key=abs):+.2f} %."
    print(summary)
    assert summary in documented
