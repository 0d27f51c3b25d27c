"""Identities known in closed form, formulas that give their own numbers, the JSON contract, and no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from math import prod

import pytest

from harness.config import Decoder, Parallelism, Trainer, Training
from harness.errors import UsageError
from harness.ledger import Prediction, predict
from harness.ledger.communication import collectives
from harness.ledger.text import report

LLAMA_8B = Decoder.Config(vocab_size=128_256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336)


def run_of(dp_shard: int, tp: int, *, n_layers: int = 32, seq_len: int = 2048) -> Trainer.Config:
    model = Decoder.Config(vocab_size=128_256, dim=4096, n_layers=n_layers, n_heads=32, n_kv_heads=8, ffn_dim=14_336)
    return Trainer.Config(
        world_size=dp_shard * tp,
        model=model,
        parallelism=Parallelism.Config(dp_shard=dp_shard, tp=tp),
        training=Training.Config(micro_batch_size=1, seq_len=seq_len),
    )


def activation_bytes(config: Trainer.Config) -> int:
    """Held for backward when the loss is computed."""
    (loss,) = [i for i in predict(config, "cuda").ranks[0].timeline if i.name == "forward: loss"]
    return sum(size for category, size in loss.categories.items() if category.startswith("activations"))


@pytest.mark.parametrize(("tp", "expected"), [(1, 168_072), (2, 92_228), (4, 54_306), (8, 35_345)])
def test_activations_of_a_layer(tp: int, expected: int) -> None:
    """Bytes per token of one Llama-3-8B layer, no checkpointing, sequence parallel: 12d+4kv+8f+4H+8, and
    4d+(8d+4kv+8f+4H+8)/t (both counted with DTensor and a storage tracker, bfloat16)."""
    more, less = run_of(2, tp, n_layers=5), run_of(2, tp, n_layers=4)
    assert (activation_bytes(more) - activation_bytes(less)) / 2048 == expected


def test_resident_bytes_are_16_a_parameter() -> None:
    memory = predict(run_of(8, 1), "cuda").ranks[0]
    parameters = LLAMA_8B.params // 8
    extra = 4 * 2048 * 128 + 4 * memory.quantities["tensors"] + 2 * 32 * 2**20  # rotary table, counters, cuBLAS
    assert memory.resident_bytes == pytest.approx(16 * parameters + extra, abs=512 * 300)


def evaluate(formula: str, quantities: dict[str, int]) -> int:
    total = 0
    for term in formula.split(" + "):
        if "B: blocks" in term:
            total += int(term.split("·")[0].replace(",", ""))
            continue
        numerator, *divisors = term.split("/")
        coefficient, *names = numerator.split("·")
        elements = prod(1 if name == "1" else quantities[name] for name in names)
        total += int(coefficient.replace(",", "")) * (elements // prod(quantities[name] for name in divisors))
    return total


@pytest.mark.parametrize("target", ["cuda", "cpu"])
@pytest.mark.parametrize("tp", [1, 2])
def test_formulas_give_their_bytes(target: str, tp: int) -> None:
    memory = predict(run_of(4, tp, n_layers=3), target).ranks[0]  # type: ignore[arg-type]
    assert len(memory.entries) > 12
    for entry in memory.entries:
        assert evaluate(entry.formula, memory.quantities) == entry.bytes, entry
        assert 0 <= entry.at_peak_bytes <= entry.bytes
    assert sum(entry.at_peak_bytes for entry in memory.entries) == memory.peak_allocated_bytes
    assert max(instant.bytes for instant in memory.timeline) == memory.peak_allocated_bytes


def test_nothing_leaks_from_step_to_step() -> None:
    from harness.ledger.step import Implementation, Step

    step = Step(run_of(2, 2, n_layers=2), target="cuda", implementation=Implementation())
    step.run()
    after_first = step.tape.total
    for _ in range(3):
        step.run()
    assert step.tape.total == after_first


def test_communication_by_hand() -> None:
    """2 layers, FSDP3 x TP2, T 4, d 6: every count and size worked out by hand."""
    model = Decoder.Config(vocab_size=10, dim=8, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=12)
    config = Trainer.Config(
        world_size=6,
        model=model,
        parallelism=Parallelism.Config(dp_shard=3, tp=2),
        training=Training.Config(micro_batch_size=1, seq_len=4),
    )
    # Rows of a rank's tensor-parallel part, padded to multiples of 3, times columns.
    embedding = 6 * 8  # 10/2 = 5 rows
    norm = 9
    layer = 2 * norm + 6 * 8 + 2 * (3 * 8) + 9 * 4 + 2 * (6 * 8) + 9 * 6  # wq 4 rows, wk wv 2, wo 8, w1 w3 6, w2 8
    head = norm + embedding
    found = {(c.dimension, c.kind): (c.count, c.bytes) for c in predict(config).communication}
    assert found == {
        ("dp_shard", "all_gather"): (2 + 4 + 1, 2 * (2 * embedding + 4 * layer + head)),
        ("dp_shard", "reduce_scatter"): (4, 4 * (embedding + 2 * layer + head)),
        ("dp_shard", "all_reduce"): (3, 8 + 4 + 4),
        ("tp", "all_gather"): (10, 10 * 4 * 8 * 2),
        ("tp", "reduce_scatter"): (10, 10 * 4 * 8 * 2),
        ("tp", "all_reduce"): (5 + 3 + 1, 5 * 8 * 2 + 3 * 4 * 4 + 4),
    }
    config.parallelism.sequence_parallel = False
    replicated = {(c.dimension, c.kind): (c.count, c.bytes) for c in predict(config).communication}
    assert replicated[("tp", "all_reduce")] == (10 + 3 + 1, 10 * 4 * 8 * 2 + 3 * 4 * 4 + 4)
    assert ("tp", "all_gather") not in replicated


@pytest.mark.parametrize(("policy", "gathers"), [("always", 8), ("default", 7), ("never", 4)])
def test_gathers_by_policy(policy: str, gathers: int) -> None:
    config = run_of(2, 1, n_layers=2)
    config.parallelism.reshard_after_forward = policy  # type: ignore[assignment]
    assert sum(c.count for c in collectives(config) if c.kind == "all_gather") == gathers


def test_one_rank_sends_nothing() -> None:
    assert predict(run_of(1, 1, n_layers=1)).communication == []


def test_uneven_ranks() -> None:
    """10 rows over 4 ranks: 3, 3, 3, 1; 8 rows over 5 ranks: 2, 2, 2, 2, none."""
    model = Decoder.Config(vocab_size=10, dim=8, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=4)
    for dp_shard, rows in ((4, [3, 3, 3, 1]), (5, [2, 2, 2, 2, 2])):
        config = Trainer.Config(world_size=dp_shard, model=model, training=Training.Config(seq_len=8))
        ranks = predict(config, "cpu").ranks
        assert [rank.rank for rank in ranks] == list(range(dp_shard))
        held = [rank.quantities["P"] for rank in ranks]
        assert sum(held) == model.params
        assert held[0] - held[-1] >= 2 * 8 * (rows[0] - rows[-1])


def as_json(prediction: Prediction) -> dict[str, object]:
    tree: dict[str, object] = json.loads(json.dumps(prediction.to_json(), allow_nan=False))
    return tree


def test_json_contract() -> None:
    tree = as_json(predict(run_of(2, 2, n_layers=2)))
    assert {"schema_version", "mode", "world_size", "ranks", "communication", "time"} <= tree.keys()
    ranks = tree["ranks"]
    assert isinstance(ranks, list)
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
    assert ranks[0]["peak_reserved_bytes"] is None
    for entry in ranks[3]["entries"]:
        assert entry.keys() == {"category", "formula", "bytes", "at_peak_bytes", "measured_bytes", "error_pct"}
    assert {"at", "bytes"} <= ranks[0]["timeline"][0].keys()
    communication = tree["communication"]
    assert isinstance(communication, list)
    assert all(item.keys() == {"dimension", "kind", "count", "bytes"} for item in communication)


def test_text_names_every_line_and_quantity() -> None:
    prediction = predict(run_of(2, 2, n_layers=2))
    text = report(prediction)
    assert f"{prediction.ranks[0].peak_allocated_bytes / 2**30:.4f} GiB at {prediction.ranks[0].at}" in text
    for entry in prediction.ranks[0].entries:
        assert entry.category in text
        assert entry.formula in text
    legend = text.split("  where ")[1].split("\n")[0]
    explained = set(re.findall(r"(\w+) = ", legend))
    used = {n for e in prediction.ranks[0].entries for n in re.findall(r"N_\w+|\b(?:kv|hd|[TBSdfHVtWP])\b", e.formula)}
    assert used - {"B"} <= explained


def test_refuses_what_cannot_run() -> None:
    config = run_of(2, 2)
    config.world_size = 3
    with pytest.raises(UsageError, match="world_size=3"):
        predict(config)


def test_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from harness.recipes.llama3 import llama3_1b\n"
        "import harness.commands.ledger\n"
        "from harness.ledger import predict\n"
        "print(predict(llama3_1b()).ranks[0].peak_allocated_bytes)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert int(out) > 2**30
